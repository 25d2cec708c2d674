"""Removes old runs, and what only they needed, in short transactions.

Each transaction leaves a whole store, so a prune may be killed anywhere and started
again: a run that has lost some of its items counts those it has. What a running run may
still ask for is left: old runs with its key stay, because it may be about to reuse the
decisions they made or share.
"""

# ruff: noqa: S608 - names of our own are all that is put into these statements

import sqlite3
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import Final

from weighbridge.db.housekeeping import (
    abandoned_runs,
    close_abandoned,
    column,
    count,
    delete_decisions,
    delete_items,
    deleting,
    fill,
    rewrite,
    store_file,
    transaction,
)
from weighbridge.db.views import SCHEMA_VIEW

# Each some hundredths of a second of the write lock.
ITEMS: Final = 1000
DECISIONS: Final = 250
DOCUMENTS: Final = 1000
_KEY: Final = ("schema_version_id", "checkpoint_id", "dtype", "prompt_version")
_ORPHANS: Final = (
    "SELECT id FROM document WHERE id NOT IN (SELECT document_id FROM decision"
    " WHERE id NOT IN (SELECT id FROM temp.gone_decision))"
    # Rejected items alone may have a document without a decision.
    " AND id NOT IN (SELECT document_id FROM item WHERE decision_id IS NULL"
    " AND document_id IS NOT NULL AND run_id NOT IN (SELECT id FROM temp.old_run))"
)
_KEPT_RUNS: Final = "FROM run WHERE id NOT IN (SELECT id FROM temp.old_run)"
_KEPT_DECISIONS: Final = "FROM decision WHERE id NOT IN (SELECT id FROM temp.gone_decision)"
_UNUSED: Final = {
    name: f"FROM {table} WHERE id NOT IN (SELECT {key} {_KEPT_RUNS})"
    f" AND id NOT IN (SELECT {key} {_KEPT_DECISIONS}) AND id NOT IN (SELECT {key} FROM claim)"
    for name, table, key in (
        ("schemas", "schema_version", "schema_version_id"),
        ("checkpoints", "checkpoint", "checkpoint_id"),
    )
}
_UNUSED_SCALINGS: Final = f"FROM scaling WHERE id NOT IN (SELECT scaling_id {_KEPT_RUNS})"


@dataclass(frozen=True)
class Pruned:
    """What a prune removed or would remove; `left` are old runs that it does not touch."""

    runs: int
    batches: int
    items: int
    decisions: int
    answers: int
    documents: int
    schemas: int
    checkpoints: int
    temperatures: int
    left: tuple[int, ...] = ()

    @property
    def nothing(self) -> bool:
        """Whether there is nothing to remove."""
        return not any(getattr(self, each.name) for each in fields(self) if each.name != "left")


def plan_prune(url: str, before: datetime) -> Pruned:
    """Count what `prune_runs` would remove; changes nothing.

    Args:
        url: The store.
        before: Finished runs that began earlier are counted.

    Raises:
        StoreError: The store cannot be opened, or is not a SQLite file.
    """
    path = store_file(url)
    abandoned = abandoned_runs(url)
    with deleting(path) as connection:
        # One snapshot. The lists lie in temporary tables, which are not part of the store.
        connection.execute("BEGIN")
        _choose(connection, before, abandoned)
        old, gone = "(SELECT id FROM temp.old_run)", "(SELECT id FROM temp.gone_decision)"
        planned = Pruned(
            runs=count(connection, "SELECT count(*) FROM temp.old_run"),
            batches=count(connection, f"SELECT count(*) FROM batch WHERE run_id IN {old}"),
            items=count(connection, f"SELECT count(*) FROM item WHERE run_id IN {old}"),
            decisions=count(connection, "SELECT count(*) FROM temp.gone_decision"),
            answers=count(connection, f"SELECT count(*) FROM answer WHERE decision_id IN {gone}"),
            documents=count(connection, f"SELECT count(*) FROM ({_ORPHANS})"),
            schemas=count(connection, f"SELECT count(*) {_UNUSED['schemas']}"),
            checkpoints=count(connection, f"SELECT count(*) {_UNUSED['checkpoints']}"),
            temperatures=count(connection, f"SELECT count(*) {_UNUSED_SCALINGS}"),
            left=tuple(column(connection, "SELECT id FROM temp.left_run ORDER BY id")),
        )
        connection.execute("ROLLBACK")
    return planned


def prune_runs(url: str, before: datetime, *, vacuum: bool = False) -> Pruned:
    """Remove the finished runs that began before a time, and what only they needed.

    Runs of this host whose process is gone are closed as crashed first. Decisions go when
    no remaining item points to them, documents when no decision and no item does, then
    schemas, checkpoints and temperatures that no run has. A decision that was made by a
    removed run and is used by another is filed under the oldest run that uses it.

    Args:
        url: The store.
        before: Finished runs that began earlier are removed.
        vacuum: Give the free pages back to the disk at the end.

    Returns:
        What was removed.

    Raises:
        StoreError: The store cannot be opened, or was locked for too long; what was
            removed until then stays removed.
    """
    path = store_file(url)
    close_abandoned(url)
    with deleting(path) as connection:
        _choose(connection, before, [])
        old_runs = column(connection, "SELECT id FROM temp.old_run")
        items = sum(_remove_items(connection, run_id) for run_id in old_runs)
        decisions, answers = _remove_decisions(connection)
        _file_decisions_anew(connection)
        runs, batches = _remove_runs(connection)
        # What a run that began meanwhile has kept is no longer on the lists.
        kept = column(connection, "SELECT id FROM run WHERE id IN (SELECT id FROM temp.old_run)")
        left = {*kept, *column(connection, "SELECT id FROM temp.left_run")}
        for table in ("old_run", "gone_decision"):
            fill(connection, table, [])
        documents = _remove_documents(connection)
        with _short_transaction(connection):
            _drop_views(connection, column(connection, f"SELECT id {_UNUSED['schemas']}"))
            schemas, checkpoints = (
                connection.execute(f"DELETE {unused}").rowcount for unused in _UNUSED.values()
            )
        temperatures = _remove_scalings(connection)
        if vacuum:
            rewrite(connection, path)
        else:
            # As much of the log as nobody reads: emptying it all would make writers wait.
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
    removed = (runs, batches, items, decisions, answers, documents, schemas, checkpoints)
    return Pruned(*removed, temperatures=temperatures, left=tuple(sorted(left)))


def _choose(connection: sqlite3.Connection, before: datetime, abandoned: Sequence[int]) -> None:
    """List in temporary tables what has to go, as the store stands now."""
    fill(connection, "abandoned", abandoned)
    # As UtcDateTime keeps times in SQLite: text that sorts as the times do.
    moment = [before.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S.%f")]
    began = "SELECT id FROM run WHERE started_at < ? AND"
    finished = "(status <> 'running' OR id IN (SELECT id FROM temp.abandoned))"
    old = column(connection, f"{began} {finished} AND NOT {_wanted_by_live('run')}", moment)
    fill(connection, "old_run", old)
    left = column(connection, f"{began} id NOT IN (SELECT id FROM temp.old_run)", moment)
    fill(connection, "left_run", left)
    gone = column(
        connection,
        "SELECT id FROM decision WHERE NOT EXISTS (SELECT 1 FROM item"
        " WHERE item.decision_id = decision.id"
        " AND item.run_id NOT IN (SELECT id FROM temp.old_run))"
        f" AND NOT {_wanted_by_live('decision')}",
    )
    fill(connection, "gone_decision", gone)


def _wanted_by_live(table: str) -> str:
    """Say in SQL that a running run has the key of a run or decision."""
    same = " AND ".join(f"live.{name} = {table}.{name}" for name in _KEY)
    return (
        "EXISTS (SELECT 1 FROM run AS live WHERE live.status = 'running'"
        f" AND live.id NOT IN (SELECT id FROM temp.abandoned) AND {same})"
    )


def _remove_items(connection: sqlite3.Connection, run_id: int) -> int:
    removed = 0
    while True:
        with _short_transaction(connection):
            last = count(
                connection,
                "SELECT coalesce(max(position), -1) FROM (SELECT position FROM item"
                " WHERE run_id = ? ORDER BY position LIMIT ?)",
                [run_id, ITEMS],
            )
            if last < 0 or not _still_old(connection, run_id):
                return removed
            removed += delete_items(connection, "run_id = ? AND position <= ?", [run_id, last])


def _still_old(connection: sqlite3.Connection, run_id: int) -> bool:
    """Tell, under the lock, whether no run has begun or gone on that needs this one."""
    sql = f"SELECT count(*) FROM run WHERE id = ? AND NOT {_wanted_by_live('run')}"
    return bool(count(connection, sql, [run_id]))


def _remove_decisions(connection: sqlite3.Connection) -> tuple[int, int]:
    decisions = answers = 0
    listed = column(connection, "SELECT id FROM temp.gone_decision")
    for chunk in _chunks(listed, DECISIONS):
        with _short_transaction(connection):
            fill(connection, "chunk", chunk)
            ids = column(
                connection,
                "SELECT id FROM decision WHERE id IN (SELECT id FROM temp.chunk) AND NOT EXISTS"
                " (SELECT 1 FROM item WHERE item.decision_id = decision.id)"
                f" AND NOT {_wanted_by_live('decision')}",
            )
            removed = delete_decisions(connection, ids)
        decisions, answers = decisions + removed[0], answers + removed[1]
    return decisions, answers


def _file_decisions_anew(connection: sqlite3.Connection) -> None:
    made_by_old = column(
        connection, "SELECT id FROM decision WHERE run_id IN (SELECT id FROM temp.old_run)"
    )
    for chunk in _chunks(made_by_old, ITEMS):
        with _short_transaction(connection):
            fill(connection, "chunk", chunk)
            connection.execute(
                "UPDATE decision SET (run_id, batch_id) = (SELECT item.run_id, item.batch_id"
                " FROM item WHERE item.decision_id = decision.id ORDER BY 1, position LIMIT 1)"
                " WHERE id IN (SELECT id FROM temp.chunk)"
                " AND EXISTS (SELECT 1 FROM item WHERE item.decision_id = decision.id)"
            )


def _remove_runs(connection: sqlite3.Connection) -> tuple[int, int]:
    with _short_transaction(connection):
        empty = column(
            connection,
            "SELECT id FROM run WHERE id IN (SELECT id FROM temp.old_run)"
            f" AND NOT {_wanted_by_live('run')}"
            " AND NOT EXISTS (SELECT 1 FROM item WHERE item.run_id = run.id)"
            " AND id NOT IN (SELECT run_id FROM decision)",
        )
        fill(connection, "chunk", empty)
        connection.execute("DELETE FROM claim WHERE run_id IN (SELECT id FROM temp.chunk)")
        batches = connection.execute(
            "DELETE FROM batch WHERE run_id IN (SELECT id FROM temp.chunk)"
        ).rowcount
        runs = connection.execute("DELETE FROM run WHERE id IN (SELECT id FROM temp.chunk)")
    return runs.rowcount, batches


def _remove_documents(connection: sqlite3.Connection) -> int:
    removed = 0
    for chunk in _chunks(column(connection, _ORPHANS), DOCUMENTS):
        with _short_transaction(connection):
            fill(connection, "chunk", chunk)
            removed += connection.execute(
                "DELETE FROM document WHERE id IN (SELECT id FROM temp.chunk)"
                " AND NOT EXISTS (SELECT 1 FROM decision WHERE document_id = document.id)"
                " AND NOT EXISTS (SELECT 1 FROM item WHERE document_id = document.id)"
            ).rowcount
    return removed


def _drop_views(connection: sqlite3.Connection, schema_ids: Sequence[int]) -> None:
    """Drop the views of schemas that go: their numbers may be given out again."""
    views = connection.execute("SELECT name, sql FROM sqlite_schema WHERE type = 'view'").fetchall()
    for name, sql in views:
        match = SCHEMA_VIEW.match(sql)
        if match is not None and int(match[1]) in schema_ids:
            quoted = name.replace('"', '""')
            connection.execute(f'DROP VIEW "{quoted}"')


def _remove_scalings(connection: sqlite3.Connection) -> int:
    """Remove temperatures that no run has, with the probabilities derived at them."""
    removed = 0
    for scaling_id in column(connection, f"SELECT id {_UNUSED_SCALINGS}"):
        rows = True
        while rows:
            with _short_transaction(connection):
                if count(connection, "SELECT count(*) FROM run WHERE scaling_id = ?", [scaling_id]):
                    break  # a run has begun that needs it
                ids = column(
                    connection,
                    "SELECT DISTINCT decision_id FROM answer_probability"
                    " WHERE scaling_id = ? ORDER BY 1 LIMIT ?",
                    [scaling_id, DECISIONS],
                )
                fill(connection, "chunk", ids)
                rows = bool(ids)
                for table in ("choice_probability", "answer_probability"):
                    connection.execute(
                        f"DELETE FROM {table} WHERE scaling_id = ?"
                        " AND decision_id IN (SELECT id FROM temp.chunk)",
                        [scaling_id],
                    )
                if not rows:
                    removed += connection.execute(
                        "DELETE FROM scaling WHERE id = ?", [scaling_id]
                    ).rowcount
    return removed


def _chunks(ids: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(ids), size):
        yield ids[start : start + size]


@contextmanager
def _short_transaction(connection: sqlite3.Connection) -> Generator[None]:
    """Hold the write lock for a moment, then leave it alone for as long.

    A waiting SQLite writer looks only every tenth of a second; without the pause it might
    never find the lock free.
    """
    began = time.monotonic()
    with transaction(connection):
        began = time.monotonic()
        yield
    time.sleep(time.monotonic() - began)
