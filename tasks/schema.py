"""The task that reads and checks a schema."""

from pathlib import Path

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from weighbridge.scorer.schema import Schema


def read_schema(schema: str | Path) -> Schema:
    """Read a schema from a file, or from its JSON text (which starts with `{`).

    Raises:
        SchemaError: The file is missing, or the schema does not hold what it must.
    """
    if isinstance(schema, str) and schema.lstrip().startswith("{"):
        return Schema.parse(schema)
    return Schema.load(schema)


@task(cache_policy=NO_CACHE, persist_result=False, task_run_name="validate schema")
def validate_schema(schema: str | Path) -> Schema:
    """Read and check a schema before anything is scored.

    Args:
        schema: A file, or JSON text.

    Raises:
        SchemaError: As in `read_schema`.
    """
    checked = read_schema(schema)
    get_run_logger().info(
        "schema %s (%s): %s",
        checked.name or "inline",
        checked.sha256[:12],
        ", ".join(f"{field.name} ({field.kind}, {len(field.choices)})" for field in checked.fields),
    )
    return checked
