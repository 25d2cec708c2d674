"""Runs the migrations; the only way a store gets or changes its tables.

A migration of a SQLite file happens on a connection of its own: foreign keys off
(inside a transaction that switch does nothing, and dropping a table with it on empties
its children), then an explicit BEGIN IMMEDIATE with the driver's own transaction
handling off (it commits before DDL, so half a migration would survive a rollback). The
version is read again under that lock, the file copied, the views dropped, the
migrations run, the views created, every foreign key checked, and all of it committed
at once. A process killed anywhere in between leaves the file as it was.
"""

import logging
import os
import re
import sqlite3
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, Engine, NullPool, create_engine, event, inspect, text
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError

from weighbridge.db.errors import MigrationFailed, NotAStore, StoreBusy, StoreError, StoreTooNew
from weighbridge.db.schema_views import create_schema_views
from weighbridge.db.tables import METADATA
from weighbridge.db.views import create_views, drop_views

PACKAGE_VERSIONS: Final = Path(__file__).parent / "migrations" / "versions"
# "WBDG", kept in the file's header: tells a store from any other SQLite file.
APPLICATION_ID: Final = 0x57424447
BUSY_TIMEOUT_SECONDS: Final = 60.0
_FILE = re.compile(r"^(\d{4})_\w+\.py$")
_LOG = logging.getLogger("weighbridge.db")


@dataclass(frozen=True)
class Upgrade:
    """What an upgrade did: versions before (None: a new store) and after, and the copy kept."""

    before: str | None
    after: str
    copy: Path | None


def known_versions(folders: Iterable[Path] = (PACKAGE_VERSIONS,)) -> list[str]:
    """List the versions that the migration files lead through, oldest first.

    Read from the file names, so that a store that needs nothing never imports Alembic.
    """
    return sorted(
        match[1]
        for folder in folders
        for path in folder.iterdir()
        if (match := _FILE.match(path.name))
    )


def read_version(connection: Connection) -> str | None:
    """Give the store's version, None for an empty database.

    Raises:
        NotAStore: The database has tables, and they are not ours.
    """
    names = set(inspect(connection).get_table_names())
    if connection.dialect.name == "sqlite":
        # A file is one thing only, and says which in its header.
        fresh = not names
        found = connection.exec_driver_sql("PRAGMA application_id").scalar_one()
        ours = found == APPLICATION_ID
    else:
        # On a server, other tables may stand beside ours.
        fresh = names.isdisjoint({"alembic_version", *METADATA.tables})
        ours = {"alembic_version", "run", "decision", "answer_choice"} <= names
    if fresh:
        return None
    if not ours:
        raise NotAStore(
            "a store must be a database of its own, got one with other tables",
            hint="name another file; never share the one Prefect keeps",
        )
    return connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one()


def require_known(version: str | None, known: Sequence[str]) -> None:
    """Refuse a store that a newer Weighbridge has upgraded.

    Raises:
        StoreTooNew: The version is not among ours.
    """
    if version is not None and version not in known:
        raise StoreTooNew(
            f"the store has version {version}, and this Weighbridge knows none above {known[-1]}",
            hint="upgrade the weighbridge package, or restore the copy that the upgrade kept",
        )


def upgrade_file(path: Path, versions: Sequence[Path] = (PACKAGE_VERSIONS,)) -> Upgrade:
    """Bring a SQLite store to the newest version.

    Args:
        path: The file; it must exist, and may be empty.
        versions: Folders with migration files.

    Raises:
        StoreTooNew: A newer Weighbridge has upgraded the file.
        NotAStore: The file holds other tables.
        StoreBusy: Another process held the write lock for longer than the busy timeout.
        MigrationFailed: The upgrade was taken back; the file is as it was.
    """
    known = known_versions(versions)
    if _peek(path) == known[-1]:
        return Upgrade(known[-1], known[-1], None)
    engine = _migration_engine(path)
    try:
        with _failing_cleanly(path), engine.begin() as connection:
            before = read_version(connection)
            require_known(before, known)
            if before == known[-1]:
                return Upgrade(before, known[-1], None)
            copy = None if before is None else copy_store(path, before)
            kept = drop_views(connection, before)
            _run_migrations(connection, versions)
            create_views(connection, kept)
            create_schema_views(connection)
            connection.exec_driver_sql(f"PRAGMA application_id = {APPLICATION_ID}")
            _check_foreign_keys(connection)
    finally:
        engine.dispose()
    if copy is not None:
        _LOG.info("store upgraded from version %s to %s; copy: %s", before, known[-1], copy)
    return Upgrade(before, known[-1], copy)


def upgrade_server(engine: Engine, versions: Sequence[Path] = (PACKAGE_VERSIONS,)) -> Upgrade:
    """Bring a store on a database server to the newest version; the server keeps the copies."""
    known = known_versions(versions)
    with engine.begin() as connection:
        before = read_version(connection)
        require_known(before, known)
        if before != known[-1]:
            kept = drop_views(connection, before)
            _run_migrations(connection, versions)
            create_views(connection, kept)
    return Upgrade(before, known[-1], None)


def copy_store(path: Path, label: str) -> Path:
    """Copy a store that may be in use, whole and consistent, next to itself.

    The copy gets its name only once it is complete, and is readable by its owner only.
    """
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%fZ")
    copy = path.with_name(f"{path.name}.{label}-{stamp}.backup")
    partial = path.with_name(f"{path.name}.backup-partial")
    copy_database(path, partial)
    partial.replace(copy)
    return copy


def copy_database(path: Path, target: Path) -> None:
    """Copy a store that may be in use to one plain file that only its owner can read."""
    target.unlink(missing_ok=True)
    os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    # All pages in one step: one snapshot, and no writer waits for it.
    with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(target)) as copy:
        source.backup(copy)
        # The log's mode is copied too; as one plain file the copy can be moved about.
        copy.execute("PRAGMA journal_mode=DELETE")


def _peek(path: Path) -> str | None:
    """Read the version without asking for the write lock; None when there is more to say."""
    with closing(sqlite3.connect(path, timeout=BUSY_TIMEOUT_SECONDS)) as connection:
        try:
            (application,) = connection.execute("PRAGMA application_id").fetchone()
            (version,) = connection.execute("SELECT version_num FROM alembic_version").fetchone()
        except sqlite3.Error:
            return None
    return version if application == APPLICATION_ID else None


def _migration_engine(path: Path) -> Engine:
    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_SECONDS, isolation_level=None)
        connection.execute("PRAGMA foreign_keys = OFF")
        return connection

    url = URL.create("sqlite", database=str(path))
    engine = create_engine(url, creator=connect, poolclass=NullPool, hide_parameters=True)

    def begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    event.listen(engine, "begin", begin)
    return engine


def _run_migrations(connection: Connection, versions: Sequence[Path]) -> None:
    # Imported here: half a second that a store which is up to date never pays.
    from alembic.operations import Operations  # noqa: PLC0415
    from alembic.runtime.migration import MigrationContext, RevisionStep  # noqa: PLC0415
    from alembic.script import ScriptDirectory  # noqa: PLC0415

    scripts = ScriptDirectory(
        str(PACKAGE_VERSIONS.parent), version_locations=[str(folder) for folder in versions]
    )

    def steps(revision: Any, context: MigrationContext) -> list[RevisionStep]:
        del context
        return scripts._upgrade_revs("head", revision)  # pyright: ignore[reportPrivateUsage]

    context = MigrationContext.configure(connection, opts={"fn": steps, "script": scripts})
    with Operations.context(context):
        context.run_migrations()


def _check_foreign_keys(connection: Connection) -> None:
    broken = connection.exec_driver_sql("PRAGMA foreign_key_check").all()
    if broken:
        tables = sorted({str(row[0]) for row in broken})
        raise MigrationFailed(
            f"every foreign key must hold after an upgrade, {len(broken)} rows do not"
            f" (in {', '.join(tables)}); the store is as it was",
            hint="rows were removed by hand, or this is our mistake: please report it",
        )


@contextmanager
def _failing_cleanly(path: Path) -> Generator[None]:
    try:
        yield
    except StoreError:
        raise
    except DBAPIError as error:
        if getattr(error.orig, "sqlite_errorname", "").startswith("SQLITE_BUSY"):
            raise StoreBusy(
                f"{path} is being written by another process", hint="try again when it is done"
            ) from error
        raise MigrationFailed(
            f"upgrading {path} failed, the store is as it was: {error.orig}",
            hint="please report it with the two versions of weighbridge",
        ) from error
    except (sqlite3.Error, OSError) as error:
        raise MigrationFailed(
            f"{path} could not be copied before its upgrade, nothing is changed: {error}",
            hint="the copy needs as much room beside the store as the store itself",
        ) from error
