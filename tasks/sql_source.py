"""The rows of a SQL statement as records, from a SQLite file or a database URL.

One statement that reads, on a connection that cannot write (SQLite, PostgreSQL, Oracle,
MySQL, MariaDB; others as their user's rights allow), streamed: rows are fetched a
few at a time, from a server with a server-side cursor. A source is read twice, so the
statement should say ORDER BY, and the table should not lose rows meanwhile.

- Columns need names that differ. NULL is null, numbers and text stay; dates, decimals
  and the like become text; bytes refuse their row, as does text that is not UTF-8.
- `:name` in a statement is a parameter, whose value comes with the call (see
  `sql_parameters`). A moment goes to a SQLite file as its CURRENT_TIMESTAMP would write it,
  in UTC, and to a server as one with a time zone, in a session in UTC.
- A URL with a password is refused: flow parameters are kept by Prefect.
"""

import re
import sqlite3
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weighbridge.tasks.errors import SourceError
from weighbridge.tasks.refusals import (
    MAX_RECORD_BYTES,
    Record,
    Refusal,
    bad_cell,
    json_value,
    quoted,
    too_long,
)
from weighbridge.tasks.sql_parameters import parameters_alone

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine
    from sqlalchemy.engine import URL
    from sqlalchemy.exc import SQLAlchemyError

Parameters = Mapping[str, Any]

_ROWS = 256
_UNDECODED = re.compile("[\udc80-\udcff]")
_SECRETS = ("pass", "pwd", "secret", "token", "key")
_NESTED = ("odbc_connect", "dsn")
"""Parameters whose value is a whole connection string, which may hold a password."""
_FILES = frozenset({"passfile", "sslkey", "sslrootcert", "sslcert"})
"""Parameters that name a file of secrets, and hold none."""
_READ_ONLY = {
    "postgresql": "SET TRANSACTION READ ONLY",
    "oracle": "SET TRANSACTION READ ONLY",
    "mysql": "SET SESSION TRANSACTION READ ONLY",
    "mariadb": "SET SESSION TRANSACTION READ ONLY",
}
_IN_UTC = {
    "postgresql": "SET TIME ZONE 'UTC'",
    "oracle": "ALTER SESSION SET TIME_ZONE = 'UTC'",
    "mysql": "SET time_zone = '+00:00'",
    "mariadb": "SET time_zone = '+00:00'",
}
"""Else a moment and a column without a zone are compared in the zone of the session."""
_DRIVERS = {"psycopg": "psycopg[binary]", "psycopg2": "psycopg2-binary", "MySQLdb": "mysqlclient"}
_BUSY_SECONDS = 10
_EXAMPLE = "write one statement that reads: SELECT id, text FROM tickets ORDER BY id"


class _Rows:
    """The names of the columns, and rows while the statement runs."""

    def __init__(self, columns: list[str], rows: Iterator[tuple[Any, ...]]) -> None:
        self.columns = columns
        self.rows = rows


def is_url(source: str) -> bool:
    """Tell a database URL from a path."""
    return "://" in source


def require_no_password(source: str) -> None:
    """Refuse a database URL that holds a password, without repeating it.

    Raises:
        SourceError: It does, or it cannot be parsed.
    """
    url = _parsed(source)
    named = {name.lower() for name in url.query} - _FILES
    secret = any(word in name for name in named for word in (*_SECRETS, *_NESTED))
    if url.password is not None or secret:
        raise SourceError(
            "a database URL of documents must hold no password, as parameters of a flow are "
            "kept by Prefect",
            hint="leave it out, and give it to the driver: for PostgreSQL in PGPASSWORD or "
            "~/.pgpass, for MySQL in an option file",
        )


def sql_columns(source: str, query: str, parameters: Parameters | None = None) -> list[str]:
    """Run the statement up to its first rows and return the names of its columns.

    Raises:
        SourceError: The database cannot be opened, or refuses the statement.
    """
    with _running(source, query, parameters or {}) as found:
        return found.columns


def sql_records(source: str, query: str, parameters: Parameters | None = None) -> Iterator[Record]:
    """Yield one record per row.

    Raises:
        SourceError: The statement fails, also later while rows are fetched.
    """
    with _running(source, query, parameters or {}) as found:
        for row, cells in enumerate(found.rows):
            yield _record(found.columns, cells, f"in row {row + 1}")


def _record(columns: list[str], cells: tuple[Any, ...], where: str) -> Record:
    values: dict[str, Any] = {}
    refusal: Refusal | None = None
    size = 0
    for name, cell in zip(columns, cells, strict=True):
        try:
            value = json_value(cell)
        except Refusal as error:
            refusal = refusal or Refusal(error.code, f"{quoted(name)} {where}: {error.message}")
            continue
        if isinstance(value, str):
            size += len(value)
            if _UNDECODED.search(value):
                raw = value.encode("utf-8", "surrogateescape")
                refusal = refusal or bad_cell(name, raw, where)
                continue
        values[name] = value
    if size > MAX_RECORD_BYTES:
        return Record(None, {}, too_long(where))
    return Record(None, values, refusal, where)


@contextmanager
def _running(source: str, query: str, parameters: Parameters) -> Generator[_Rows]:
    path = _sqlite_path(source)
    if path is not None:
        with _on_file(path, query, parameters) as found:
            yield found
    else:
        with _on_server(source, query, parameters) as found:
            yield found


def _rows(columns: list[str], rows: Iterator[tuple[Any, ...]]) -> _Rows:
    if twice := [name for name in columns if columns.count(name) > 1]:
        raise SourceError(
            "the columns of a query must have different names, and two have the same",
            hint=f"{quoted(twice[0])} comes twice; rename one: SELECT … AS name",
        )
    return _Rows(columns, rows)


def _no_rows() -> SourceError:
    return SourceError(
        "a query must be one statement that reads rows, and this one gives none",
        hint="write one such as: SELECT id, text FROM tickets ORDER BY id",
    )


def _refused(place: object, reason: str) -> SourceError:
    # A database may quote a text that it could not convert. Prefect keeps an error's message
    # and its causes, so the reason stands in the hint, which only the terminal shows.
    return SourceError(
        f"{place} must carry out the query, and refuses it",
        hint=f"it says: {reason}\n{_EXAMPLE}",
    )


# --- SQLite -----------------------------------------------------------------------


def _sqlite_path(source: str) -> Path | None:
    """Return the file that a source names; None for a database server.

    Raises:
        SourceError: There is no such file, or the URL is not one of a file.
    """
    path = Path(source)
    if is_url(source):
        from weighbridge.db.errors import StoreError
        from weighbridge.db.location import store_path

        require_no_password(source)
        try:
            named = store_path(source)
        except StoreError as error:
            raise SourceError(
                f"documents must be in a SQLite file or a database: {error}", hint=error.hint
            ) from error
        if named is None:
            return None
        path = named
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise SourceError(
            f"a query needs a SQLite file or a database URL, and {path} {what}",
            hint=f"a relative path starts at {Path.cwd()}; a server: postgresql://user@host/name",
        )
    return path.absolute()


# The file is opened by SQLite alone: closing another descriptor of it would drop the locks
# that this process may hold on it, if it is the store itself (see `db/engine.py`).
@contextmanager
def _on_file(path: Path, query: str, parameters: Parameters) -> Generator[_Rows]:
    from weighbridge.db.engine import connect_readonly
    from weighbridge.db.typed_sql import authorize_reading

    try:
        with closing(connect_readonly(path)) as connection:
            connection.execute(f"PRAGMA busy_timeout = {_BUSY_SECONDS * 1000}")
            connection.set_authorizer(authorize_reading)
            # Bytes that are not UTF-8 would end the reading for all rows behind them.
            connection.text_factory = _text
            values = {name: _on_sqlite(value) for name, value in parameters.items()}
            cursor = connection.execute(query, values)
            if cursor.description is None:
                raise _no_rows()
            yield _rows([column[0] for column in cursor.description], _fetched(cursor))
    except sqlite3.Error as error:
        raise _explained(error, path) from None
    except (sqlite3.Warning, ValueError) as error:
        raise _refused(path, str(error)) from None


def _on_sqlite(value: Any) -> Any:
    """SQLite has no times: they are texts, which compare as times if all are alike."""
    if isinstance(value, datetime):
        return value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")
    return value


def _fetched(cursor: sqlite3.Cursor) -> Iterator[tuple[Any, ...]]:
    while rows := cursor.fetchmany(_ROWS):
        yield from rows


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def _explained(error: sqlite3.Error, path: Path) -> SourceError:
    name = str(getattr(error, "sqlite_errorname", ""))
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return SourceError(
            f"{path} must be free to read, and another process had it locked for {_BUSY_SECONDS} s",
            hint="see what writes to it; try again",
        )
    if name.startswith(("SQLITE_NOTADB", "SQLITE_CORRUPT")):
        return SourceError(
            f"a query needs a SQLite file, and {path} is another kind of file or damaged: {error}",
            hint="leave out --query to read a file of records",
        )
    if name.startswith(("SQLITE_CANTOPEN", "SQLITE_PERM")):
        return SourceError(
            f"{path} must be readable, and SQLite cannot open it: {error}",
            hint="a file with a write-ahead log needs a folder that can be written, or a copy",
        )
    # SQLite gives a refusal of the authorizer several error codes.
    if name in {"SQLITE_AUTH", "SQLITE_READONLY"} or "not authorized" in str(error):
        return _refused(path, "the statement does something else than read")
    return _refused(path, str(error))


# --- database servers ---------------------------------------------------------------


@contextmanager
def _on_server(source: str, query: str, parameters: Parameters) -> Generator[_Rows]:
    from sqlalchemy import create_engine, text
    from sqlalchemy.exc import NoSuchModuleError, SQLAlchemyError

    url = _parsed(source)
    place = url.set(query={}).render_as_string(hide_password=True)
    try:
        engine = create_engine(url, hide_parameters=True)
    except NoSuchModuleError:
        raise SourceError(
            f"a database URL must begin with a kind that SQLAlchemy knows, got {place}",
            hint="write a file as sqlite:///path.db, a server as postgresql://user@host/name",
        ) from None
    except ImportError as error:
        package = _DRIVERS.get(str(error.name), error.name)
        raise SourceError(
            f"{place} needs a driver, the Python package {package}, and it is not installed",
            hint=f"install it beside weighbridge: pip install '{package}'",
        ) from None
    except SQLAlchemyError as error:
        raise SourceError(f"a database URL must be one that its driver takes: {place}") from error
    try:
        with _connected(engine, place) as connection:
            if statement := _READ_ONLY.get(engine.dialect.name):
                connection.exec_driver_sql(statement)
            if parameters and (statement := _IN_UTC.get(engine.dialect.name)):
                connection.exec_driver_sql(statement)
            streamed = connection.execution_options(stream_results=True, max_row_buffer=_ROWS)
            result = streamed.execute(text(parameters_alone(query)), dict(parameters))
            if not result.returns_rows:
                raise _no_rows()
            rows = (tuple(row) for part in result.partitions(_ROWS) for row in part)
            yield _rows(list(result.keys()), rows)
    except SQLAlchemyError as error:
        raise _refused(place, _first_line(error)) from None
    finally:
        engine.dispose()


def _connected(engine: "Engine", place: str) -> "Connection":
    from sqlalchemy.exc import SQLAlchemyError

    try:
        return engine.connect()
    except SQLAlchemyError as error:
        raise SourceError(
            f"{place} must answer, and does not: {_first_line(error)}",
            hint="look at host, port, name and user; a password belongs in PGPASSWORD or ~/.pgpass",
        ) from error


def _first_line(error: "SQLAlchemyError") -> str:
    # What the driver said, without the statement and what SQLAlchemy adds.
    return str(getattr(error, "orig", None) or error).strip().partition("\n")[0][:300]


def _parsed(source: str) -> "URL":
    from weighbridge.db.errors import StoreError
    from weighbridge.db.location import parse_url

    try:
        return parse_url(source)
    except StoreError as error:
        raise SourceError(error.message, hint=error.hint) from None
