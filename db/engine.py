"""Opens stores: places, permissions, connections and locks.

What SQLite needs is known here, in `filesystems`, `migrate` and `typed_sql`; all else is
SQLAlchemy and runs on a database server too.

`synchronous=NORMAL` with a write-ahead log survives kill -9 at any moment. After a power
cut the last commits may be gone; the file is whole all the same.
"""

import json
import os
import sqlite3
import time
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, Engine, QueuePool, create_engine, event
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError, NoSuchModuleError, SQLAlchemyError

from weighbridge.db.errors import (
    NotAStore,
    StoreBusy,
    StoreError,
    StoreOutdated,
    StoreUnavailable,
)
from weighbridge.db.filesystems import require_local
from weighbridge.db.location import URL_HINT, display_url, parse_url, store_path
from weighbridge.db.migrate import (
    BUSY_TIMEOUT_SECONDS,
    Upgrade,
    known_versions,
    read_version,
    require_known,
    upgrade_file,
    upgrade_server,
)

_IMMEDIATE: Final = "weighbridge_immediate"


def open_engine(url: str, *, readonly: bool = False) -> Engine:
    """Open a store.

    A writer creates the file and its folder if need be and upgrades an older store. A
    reader does neither and cannot change anything.

    Args:
        url: A database URL, `sqlite:///path` for a file.
        readonly: Open for reading only.

    Raises:
        StoreUnavailable: The URL, the place or the permissions do not allow it.
        NotAStore: The file is something else.
        StoreOutdated: A reader found an older store.
        StoreTooNew: A newer Weighbridge has upgraded the store.
        StoreBusy: The write lock could not be had.
        MigrationFailed: The upgrade failed; the store is as it was.
    """
    path = store_path(url)
    if not readonly:
        upgrade_store(url)
    elif path is not None:
        _require_readable(path)
    engine = _server_engine(url) if path is None else _file_engine(path, readonly=readonly)
    try:
        with reading(engine) as connection:
            version = read_version(connection)
        known = known_versions()
        require_known(version, known)
        if version != known[-1]:
            found = "is empty" if version is None else f"has version {version}"
            raise StoreOutdated(
                f"the store must have version {known[-1]} to be read, and this one {found}",
                hint="run: weighbridge db upgrade",
            )
    except StoreError:
        engine.dispose()
        raise
    return engine


def upgrade_store(url: str) -> Upgrade:
    """Create a store or bring it to the newest version, keeping a copy of the older one.

    Raises:
        StoreError: As `open_engine` for a writer.
    """
    path = store_path(url)
    if path is not None:
        _prepare_file(path)
        return upgrade_file(path)
    engine = _server_engine(url)
    try:
        with translated(engine):
            return upgrade_server(engine)
    finally:
        engine.dispose()


@contextmanager
def reading(engine: Engine) -> Generator[Connection]:
    """Give a connection to read from; database errors come out as ours."""
    with translated(engine), engine.connect() as connection:
        yield connection


@contextmanager
def writing(engine: Engine) -> Generator[Connection]:
    """Give a connection in a transaction; on SQLite it holds the write lock from its start.

    A SQLite transaction that first reads and then asks for the lock would be refused
    without waiting when another process wrote in between; this one waits its turn.
    """
    with translated(engine), engine.connect() as connection:
        connection.execution_options(**{_IMMEDIATE: True})
        with connection.begin():
            yield connection


def connect_readonly(path: Path) -> sqlite3.Connection:
    """Open the file so that neither SQL nor a fault of ours can change it."""
    connection = _connect(f"{path.as_uri()}?mode=ro")
    connection.execute("PRAGMA query_only = ON")
    return connection


def connect_to_delete(path: Path) -> sqlite3.Connection:
    """Open the file to delete rows so that their bytes are overwritten.

    Foreign keys are not enforced: for each answer SQLite would read a whole table that has
    no index for the question. Who deletes here deletes children first, in one transaction.
    """
    connection = _connect(path.as_uri())
    connection.execute("PRAGMA foreign_keys = OFF")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("PRAGMA secure_delete = ON")
    return connection


@contextmanager
def translated(engine: Engine) -> Generator[None]:
    """Turn database errors into ours; parameters (documents) never reach the text."""
    try:
        yield
    except DBAPIError as error:
        place = engine.url.database if engine.dialect.name == "sqlite" else engine.url.host
        raise translate(error.orig, place or "the database") from error
    except UnicodeEncodeError as error:
        # What is written is spelt so that it can be kept; this is something looked for.
        raise StoreError(
            "what is looked for must be text in UTF-8, and what came is not",
            hint="see which encoding the terminal or the calling program uses",
        ) from error


def translate(error: BaseException | None, place: str) -> StoreError:
    """Say what a driver's error means for the one who asked."""
    name = str(getattr(error, "sqlite_errorname", ""))
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return StoreBusy(
            f"{place} was locked by another process for {BUSY_TIMEOUT_SECONDS:.0f} s",
            hint="see what else writes to it; try again",
        )
    if name.startswith(("SQLITE_NOTADB", "SQLITE_CORRUPT")):
        return NotAStore(
            f"{place} must be a SQLite file, and is not or is damaged: {error}",
            hint="name another file, or restore a copy (*.backup beside it)",
        )
    if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM", "SQLITE_AUTH")):
        return StoreUnavailable(
            f"{place} cannot be opened or written: {error}",
            hint="the file and its folder must be yours to read and write",
        )
    if name.startswith("SQLITE_FULL"):
        return StoreUnavailable(
            f"the disk of {place} must have room, and it is full", hint="make room, then run again"
        )
    return StoreError(
        f"{place} must carry out what the store asks, got the refusal: {error}",
        hint="look at the database and its log; if that does not explain it, please report it",
    )


def _file_engine(path: Path, *, readonly: bool) -> Engine:
    def connect() -> sqlite3.Connection:
        if readonly:
            return connect_readonly(path)
        connection = _connect(path.as_uri())
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA synchronous = NORMAL")
        return connection

    def begin(connection: Connection) -> None:
        immediate = connection.get_execution_options().get(_IMMEDIATE, False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")

    engine = create_engine(
        URL.create("sqlite", database=str(path)),
        creator=connect,
        poolclass=QueuePool,
        hide_parameters=True,
        json_serializer=_to_json,
    )
    event.listen(engine, "begin", begin)
    return engine


def _connect(uri: str) -> sqlite3.Connection:
    # No isolation level: the driver leaves transactions to the BEGIN that the engine sends.
    return sqlite3.connect(
        uri, uri=True, timeout=BUSY_TIMEOUT_SECONDS, isolation_level=None, check_same_thread=False
    )


def _server_engine(url: str) -> Engine:
    try:
        return create_engine(parse_url(url), hide_parameters=True, json_serializer=_to_json)
    except NoSuchModuleError:
        kind = parse_url(url).get_backend_name()
        raise StoreUnavailable(
            f"a database URL must begin with a kind that SQLAlchemy knows, got {kind!r}",
            hint=f"{URL_HINT}; a server as postgresql://user@host/name",
        ) from None
    except ImportError as error:
        raise StoreUnavailable(
            f"{display_url(url)} must have its driver, the Python package {error.name}, and it is"
            " not installed",
            hint=f"install {error.name}, or name another driver as in postgresql+psycopg://…",
        ) from None
    except SQLAlchemyError:
        raise StoreUnavailable(
            f"a database URL must be one that its driver takes, got {display_url(url)}",
            hint="compare its parameters with the driver's manual",
        ) from None


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


# The file itself is never opened but by SQLite: closing any other descriptor of it would drop
# the locks that this process holds through SQLite (POSIX advisory locks; SQLite documentation,
# "How To Corrupt An SQLite Database File", section 2.2).
def _prepare_file(path: Path) -> None:
    require_file(path)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(FileExistsError):
            # Created here because SQLite would use the umask; its -wal and -shm follow the file.
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        for file in (path, *(path.with_name(path.name + end) for end in ("-wal", "-shm"))):
            with suppress(FileNotFoundError):
                if file.stat().st_uid == os.geteuid():
                    file.chmod(0o600)
    except OSError as error:
        raise no_access(path, error.strerror or str(error)) from error
    try:
        _use_wal(path)
    except sqlite3.Error as error:
        raise translate(error, str(path)) from error


def _require_readable(path: Path) -> None:
    require_file(path)
    try:
        path.stat()
    except FileNotFoundError:
        raise StoreUnavailable(
            f"a store must exist to be read, and there is no store at {path}",
            hint="weighbridge score creates one; or name another",
        ) from None
    except OSError as error:
        raise no_access(path, error.strerror or str(error)) from error
    if not os.access(path, os.R_OK):
        raise no_access(path, "permission denied")


def require_file(path: Path) -> None:
    """Refuse a place that is not local, and a folder."""
    require_local(path)  # first: it refuses what cannot be a path at all
    if path.is_dir():
        raise StoreUnavailable(
            f"a store must be a file, got the folder {path}", hint=f"name one: {path / 'store.db'}"
        )


def no_access(path: Path, reason: str) -> StoreUnavailable:
    """Say that a store cannot be opened, and why."""
    return StoreUnavailable(
        f"{path} cannot be opened: {reason}",
        hint="the file and its folder must be yours to read and write",
    )


def _use_wal(path: Path) -> None:
    with closing(_connect(path.as_uri())) as connection:
        mode = _until_free(lambda: connection.execute("PRAGMA journal_mode").fetchone()[0])
        if mode != "wal":
            # Changing the mode does not wait for other processes by itself.
            mode = _until_free(lambda: connection.execute("PRAGMA journal_mode=WAL").fetchone()[0])
    if mode != "wal":
        raise StoreUnavailable(
            f"a store must have a write-ahead log, and the file system of {path} allows none",
            hint="choose a local path",
        )


def _until_free(ask: Callable[[], str]) -> str:
    deadline = time.monotonic() + BUSY_TIMEOUT_SECONDS
    while True:
        try:
            return ask()
        except sqlite3.OperationalError as error:
            busy = error.sqlite_errorname.startswith("SQLITE_BUSY")
            if not busy or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
