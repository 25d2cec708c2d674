"""What backing up, pruning and forgetting share: the file, its lock, its free space.

Only for SQLite stores; a database server has its own tools for all of this.
"""

# ruff: noqa: S608 - names of our own are all that is put into these statements

import platform
import sqlite3
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from weighbridge.db.engine import connect_to_delete, open_engine, reading, translate, writing
from weighbridge.db.errors import StoreBusy, StoreUnavailable
from weighbridge.db.location import display_url, store_path
from weighbridge.db.run_rows import abandoned, sweep

# Children before parents.
_OF_A_DECISION: Final = (
    # Both begin with the scaling in their key, so naming all scalings finds rows by key.
    "DELETE FROM choice_probability WHERE scaling_id IN (SELECT id FROM scaling)"
    " AND decision_id IN (SELECT id FROM temp.chunk)",
    "DELETE FROM answer_probability WHERE scaling_id IN (SELECT id FROM scaling)"
    " AND decision_id IN (SELECT id FROM temp.chunk)",
    "DELETE FROM answer_choice WHERE decision_id IN (SELECT id FROM temp.chunk)",
    "DELETE FROM answer WHERE decision_id IN (SELECT id FROM temp.chunk)",
    "DELETE FROM decision WHERE id IN (SELECT id FROM temp.chunk)",
)


def store_file(url: str) -> Path:
    """Give the file of an existing store of the newest version.

    Raises:
        StoreUnavailable: The URL names a server, or no file that can be read.
        StoreError: As `open_engine` for a reader.
    """
    path = store_path(url)
    if path is None:
        raise StoreUnavailable(
            f"the store must be a SQLite file for this, got {display_url(url)}",
            hint="use the tools of your database server, such as pg_dump",
        )
    open_engine(url, readonly=True).dispose()
    return path


def close_abandoned(url: str) -> None:
    """Close the runs of this host whose process is gone, as the next run would."""
    engine = open_engine(url)
    try:
        with writing(engine) as connection:
            sweep(connection, platform.node(), datetime.now(UTC))
    finally:
        engine.dispose()


@contextmanager
def deleting(path: Path) -> Generator[sqlite3.Connection]:
    """Give a connection that deletes for good; its errors come out as ours."""
    try:
        with closing(connect_to_delete(path)) as connection:
            yield connection
    except sqlite3.Error as error:
        raise translate(error, str(path)) from error


@contextmanager
def transaction(connection: sqlite3.Connection) -> Generator[None]:
    """Hold the write lock from the start, as all our writers do; commit at the end."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def abandoned_runs(url: str) -> list[int]:
    """List the runs that stand as running though their process on this host is gone."""
    engine = open_engine(url, readonly=True)
    try:
        with reading(engine) as connection:
            return abandoned(connection, platform.node())
    finally:
        engine.dispose()


def fill(connection: sqlite3.Connection, table: str, ids: Iterable[int]) -> None:
    """Make a temporary table of ids hold exactly these."""
    connection.execute(f"CREATE TEMP TABLE IF NOT EXISTS {table} (id INTEGER PRIMARY KEY)")
    connection.execute(f"DELETE FROM temp.{table}")
    connection.executemany(
        f"INSERT INTO temp.{table} VALUES (?)",
        ((each,) for each in ids),
    )


def column(connection: sqlite3.Connection, sql: str, values: Sequence[object] = ()) -> list[int]:
    """Give the first column of what a statement finds."""
    return [row[0] for row in connection.execute(sql, values)]


def count(connection: sqlite3.Connection, sql: str, values: Sequence[object] = ()) -> int:
    """Give the one number that a statement finds."""
    return int(connection.execute(sql, values).fetchone()[0])


def delete_decisions(connection: sqlite3.Connection, ids: Iterable[int]) -> tuple[int, int]:
    """Delete decisions with all that hangs on them; give how many, and how many answers.

    Within the caller's transaction; no item may point to them any more.
    """
    fill(connection, "chunk", ids)
    deleted = [connection.execute(statement).rowcount for statement in _OF_A_DECISION]
    return deleted[-1], deleted[-2]


def delete_items(connection: sqlite3.Connection, where: str, values: Sequence[object]) -> int:
    """Delete items and take them out of their runs' counts, which stay those of what is kept.

    Within the caller's transaction. Were the counts left as they are, a retry of a run that
    was interrupted could never close its accounting.
    """
    totals = connection.execute(
        "SELECT count(*), sum(status = 'scored'), sum(status = 'reused'),"
        f" sum(status = 'rejected'), sum(wasted), run_id FROM item WHERE {where} GROUP BY run_id",
        values,
    ).fetchall()
    connection.executemany(
        "UPDATE run SET documents = documents - ?, scored = scored - ?, reused = reused - ?,"
        " rejected = rejected - ?, wasted = wasted - ? WHERE id = ?",
        totals,
    )
    return connection.execute(f"DELETE FROM item WHERE {where}", values).rowcount


def vacuum_store(url: str) -> tuple[int, int]:
    """Rewrite the store without its free pages; give the bytes of the file before and after.

    Raises:
        StoreBusy: Another process writes, or reads for longer than the busy timeout.
        StoreUnavailable: There is no room for the second copy this needs for a while.
    """
    path = store_file(url)
    with deleting(path) as connection:
        empty_log(connection)
        before = path.stat().st_size
        rewrite(connection, path)
    return before, path.stat().st_size


def rewrite(connection: sqlite3.Connection, path: Path) -> None:
    """Vacuum, then empty the log, so that the file holds live rows and nothing else."""
    connection.execute("VACUUM")
    if not empty_log(connection):
        raise StoreBusy(
            f"another program reads {path}, so its log ({path.name}-wal) could not be emptied",
            hint="what was removed is gone from the files once that program ends",
        )


def empty_log(connection: sqlite3.Connection) -> bool:
    """Bring the write-ahead log into the file and cut it to nothing; tell whether it could."""
    (busy, _, _) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    return not busy
