"""Sample documents and schemas, and a flow of one's own built from our tasks."""
