"""The metadata of documents, as columns beside their answers."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, cast

from sqlalchemy import Connection, Engine, select

from weighbridge.db import tables
from weighbridge.db.engine import reading
from weighbridge.db.errors import QueryRefused
from weighbridge.db.export import common_type
from weighbridge.db.filters import listed

_ITEM = tables.table(tables.Item)
METADATA: Final = _ITEM.c.metadata
# Items that are looked at for the names of columns: a run may have millions.
_SAMPLE: Final = 1000
_FETCHED: Final = 2000


def require_columns(connection: Connection, run_id: int, columns: Sequence[str]) -> None:
    """Refuse a column that the run's metadata does not have.

    Raises:
        QueryRefused: There is no such column among the first documents.
    """
    if not columns:
        return
    first = select(METADATA).where(_ITEM.c.run_id == run_id).order_by(_ITEM.c.position)
    names: dict[str, None] = {}
    for (metadata,) in connection.execute(first.limit(_SAMPLE)):
        names |= dict.fromkeys(cast("Mapping[str, Any]", metadata or {}))
    for column in columns:
        if column not in names:
            raise QueryRefused(
                f"a column must be one of the metadata of the run, got {column!r:.80}",
                hint=f"the columns are: {listed(list(names))}"
                if names
                else "the documents of this run came without metadata",
            )


def column_types(engine: Engine, run_id: int, columns: Sequence[str]) -> Mapping[str, type]:
    """Give the type that holds all values of each column: `str` where they are mixed."""
    # One value of each type tells enough, but of whole numbers the greatest.
    seen: dict[str, dict[str, Any]] = {column: {} for column in columns}
    statement = select(METADATA).where(_ITEM.c.run_id == run_id)
    with reading(engine) as connection:
        found = connection.execution_options(yield_per=_FETCHED).execute(statement)
        for (metadata,) in found:
            told: Mapping[str, Any] = metadata or {}
            for column in columns:
                value: Any = told.get(column)
                kind = type(value).__name__
                known: Any = seen[column].setdefault(kind, value)
                if isinstance(value, int) and abs(value) > abs(known):
                    seen[column][kind] = value
    return {column: common_type(list(values.values())) for column, values in seen.items()}


def with_columns(rows: Iterator[Sequence[Any]], columns: Sequence[str]) -> Iterator[Sequence[Any]]:
    """Put the values of columns in place of the metadata that ends each row."""
    for *values, metadata in rows:
        told: Mapping[str, Any] = metadata or {}
        yield [*values, *(told.get(column) for column in columns)]
