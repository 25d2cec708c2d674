"""Alembic migrations; `weighbridge.db.migrate` runs them, nothing else does."""
