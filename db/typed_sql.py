"""Runs SQL that a person typed: one statement, reading only, within a time."""

import sqlite3
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from sqlalchemy import Engine

from weighbridge.db.engine import connect_readonly, translate
from weighbridge.db.errors import QueryRefused

SECONDS: Final = 60.0
_READING: Final = frozenset(
    {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
)
_PRAGMAS: Final = frozenset({"table_info", "table_xinfo", "table_list", "index_list", "index_info"})
_STEPS: Final = 10_000
_REFUSED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "SQLITE_READONLY": "typed SQL must only read, and this statement writes",
        "SQLITE_INTERRUPT": f"typed SQL must finish within {SECONDS:.0f} s, and this did not",
    }
)


@dataclass(frozen=True)
class SqlRows:
    """What a statement gave."""

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]


def run_sql(engine: Engine, sql: str, *, seconds: float = SECONDS) -> SqlRows:
    """Run one reading statement on a SQLite store, on a connection that cannot write.

    Args:
        engine: A store; only its place is used.
        sql: One statement.
        seconds: Time to give it.

    Raises:
        QueryRefused: It is not one statement, writes, attaches, fails, or takes too long.
    """
    if engine.dialect.name != "sqlite" or engine.url.database is None:
        raise QueryRefused(
            "typed SQL is for SQLite stores", hint="use the client of your database server"
        )
    path = Path(engine.url.database)
    deadline = time.monotonic() + seconds
    try:
        with closing(connect_readonly(path)) as connection:
            connection.set_authorizer(authorize_reading)
            connection.set_progress_handler(lambda: time.monotonic() > deadline, _STEPS)
            return _fetch(connection, sql)
    except (sqlite3.Warning, sqlite3.ProgrammingError) as error:
        raise QueryRefused(
            f"typed SQL must be one statement: {error}", hint="send them one at a time"
        ) from error
    except sqlite3.DatabaseError as error:
        name = getattr(error, "sqlite_errorname", "")
        # SQLite gives a refusal of the authorizer several error codes and wordings.
        if name == "SQLITE_AUTH" or "not authorized" in str(error):
            raise QueryRefused("typed SQL must only read, and this does something else") from error
        if name in _REFUSED:
            raise QueryRefused(_REFUSED[name]) from error
        if name == "SQLITE_ERROR":
            raise QueryRefused(
                f"SQLite refused the statement: {error}",
                hint="the views to ask are results, choice_probabilities and stability",
            ) from error
        raise translate(error, str(path)) from error
    except (UnicodeError, ValueError) as error:
        raise QueryRefused(f"typed SQL must be plain text: {error}") from error


def _fetch(connection: sqlite3.Connection, sql: str) -> SqlRows:
    cursor = connection.execute(sql)
    if cursor.description is None:
        raise QueryRefused("typed SQL must give rows, and this gives none")
    columns = tuple(column[0] for column in cursor.description)
    return SqlRows(columns, cursor.fetchall())


def authorize_reading(
    action: int, argument: str | None, function: str | None, _database: str | None, _via: str | None
) -> int:
    """Allow what reads, as an authorizer of sqlite3."""
    # ATTACH would open other files, writable ones too, past mode=ro; hence an allow-list.
    if action in _READING and function != "load_extension":
        return sqlite3.SQLITE_OK
    if action == sqlite3.SQLITE_PRAGMA and argument in _PRAGMAS:
        return sqlite3.SQLITE_OK
    # What SQLite asks when it declares json_each and its like; the file stays read-only.
    if action == sqlite3.SQLITE_UPDATE and argument in {"sqlite_master", "sqlite_schema"}:
        return sqlite3.SQLITE_OK
    return sqlite3.SQLITE_DENY
