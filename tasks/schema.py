"""The task that reads and checks a schema."""

from pathlib import Path

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from weighbridge.scorer.schema import Schema
from weighbridge.tasks.questions import read_schema


@task(cache_policy=NO_CACHE, persist_result=False, task_run_name="validate schema")
def validate_schema(schema: str | Path, name: str | None = None) -> Schema:
    """Read and check a schema before anything is scored.

    Args:
        schema: A file, JSON text, or a Pydantic model as `module:Class`.
        name: What people call it; else the stem of the file or the name of the class.

    Raises:
        SchemaError: As in `read_schema`.
    """
    checked = read_schema(schema, name=name)
    get_run_logger().info(
        "schema %s (%s): %s",
        checked.name or "inline",
        checked.sha256[:12],
        ", ".join(f"{field.name} ({field.kind}, {len(field.choices)})" for field in checked.fields),
    )
    return checked
