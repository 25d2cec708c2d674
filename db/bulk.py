"""Inserts many rows at once."""

from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any

from sqlalchemy import Connection, Table, insert
from sqlalchemy.sql.compiler import SQLCompiler

DIRECT = True
"""Whether SQLite is handed the rows as they are: off, for measuring what that brings."""


def insert_rows(connection: Connection, table: Table, rows: Sequence[dict[str, Any]]) -> None:
    """Insert rows that all have the same columns, at least two, and no defaults to come.

    SQLAlchemy builds the parameters of each row anew, which takes as long as SQLite takes to
    write them. Here each value is converted by its column's type, if that converts at all,
    and nothing more. Other databases are left to SQLAlchemy and their drivers.
    """
    if not rows:
        return
    if not DIRECT or connection.dialect.name != "sqlite":
        connection.execute(insert(table), rows)
        return
    dialect = connection.dialect
    compiled = insert(table).compile(dialect=dialect, column_keys=list(rows[0]))
    assert isinstance(compiled, SQLCompiler)  # noqa: S101 - what a SQL dialect compiles to
    names = compiled.positiontup or []
    converters = {
        name: converter
        for name in names
        if (converter := table.c[name].type.dialect_impl(dialect).bind_processor(dialect))
    }
    values = map(itemgetter(*names), _converted(rows, converters))
    connection.exec_driver_sql(str(compiled), list(values))


def _converted(
    rows: Iterable[dict[str, Any]], converters: dict[str, Callable[[Any], Any]]
) -> Iterable[dict[str, Any]]:
    if not converters:
        return rows
    return (
        {**row, **{name: converter(row[name]) for name, converter in converters.items()}}
        for row in rows
    )
