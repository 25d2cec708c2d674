"""Begins, finds and closes runs; every function works inside the caller's transaction."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Table, and_, delete, func, insert, select, update
from sqlalchemy.sql.elements import ColumnElement

from weighbridge.db import tables
from weighbridge.db.errors import RunRefused
from weighbridge.db.probabilities import CHUNK
from weighbridge.db.processes import process_is_alive
from weighbridge.db.records import FinalStatus, RunStart

_RUN = tables.table(tables.Run)
_ITEM = tables.table(tables.Item)
_CLAIM = tables.table(tables.Claim)
_CHECKPOINT = tables.table(tables.Checkpoint)
_SCHEMA = tables.table(tables.SchemaVersion)
_SCALING = tables.table(tables.Scaling)
_DOCUMENT = tables.table(tables.Document)
_DECISION = tables.table(tables.Decision)
_KEY_COLUMNS = ("schema_version_id", "checkpoint_id", "dtype", "prompt_version")


@dataclass(frozen=True)
class OpenRun:
    """What writing to a run needs to know of it; `key` is the decision key but the document."""

    run_id: int
    key: dict[str, Any]
    scaling_id: int
    temperature: float
    host: str
    pid: int
    store_text: bool
    rescore: bool

    def same_key(self, table: Table) -> ColumnElement[bool]:
        """Compare a table's key columns with this run's key."""
        return and_(*(table.c[name] == value for name, value in self.key.items()))


def open_run(connection: Connection, run_id: int, process: tuple[str, int] | None) -> OpenRun:
    """Load a run that may be written to.

    Args:
        connection: A connection in a writing or reading transaction.
        run_id: The run.
        process: Host and pid that began it here, when known.

    Raises:
        RunRefused: It does not exist, is closed, or another process has taken it over.
    """
    row = connection.execute(select(_RUN).where(_RUN.c.id == run_id)).one_or_none()
    if row is None:
        raise no_such_run(run_id)
    if row.status != "running":
        raise RunRefused(
            f"run {run_id} must be running to be written to, got one that is {row.status}",
            hint="start a new run, or retry the flow run to continue this one",
        )
    if process is not None and process != (row.host, row.pid):
        raise RunRefused(
            f"run {run_id} must be written to by the process that has it, and it was taken over"
            f" by process {row.pid} on {row.host}",
            hint="a retry has continued it; this process can stop",
        )
    return OpenRun(
        run_id=run_id,
        key={name: getattr(row, name) for name in _KEY_COLUMNS},
        scaling_id=row.scaling_id,
        temperature=row.temperature,
        host=row.host,
        pid=row.pid,
        store_text=row.store_text,
        rescore=row.rescore,
    )


def no_such_run(run_id: int) -> RunRefused:
    """Say that a store has no run of this number."""
    return RunRefused(
        f"a run must be one that the store has, and there is no run {run_id}",
        hint="list them with: weighbridge runs",
    )


def begin(connection: Connection, start: RunStart, now: datetime) -> tuple[int, bool]:
    """Insert a run, or continue the one of the same flow run; give its id and which it was.

    Raises:
        RunRefused: The flow run began with another schema, checkpoint, way of asking or
            temperature.
    """
    values = _run_values(connection, start, now)
    if start.flow_run_id is not None:
        found = connection.execute(
            select(_RUN).where(_RUN.c.flow_run_id == start.flow_run_id)
        ).one_or_none()
        if found is not None:
            _require_unchanged(found, values)
            connection.execute(delete(_CLAIM).where(_CLAIM.c.run_id == found.id))
            connection.execute(
                update(_RUN)
                .where(_RUN.c.id == found.id)
                .values(
                    status="running",
                    host=start.host,
                    pid=start.pid,
                    resumed_at=now,
                    finished_at=None,
                    message=None,
                )
            )
            return found.id, True
    counts = dict.fromkeys(("documents", "scored", "reused", "rejected", "wasted"), 0)
    result = connection.execute(
        insert(_RUN).values(status="running", started_at=now, **values, **counts)
    )
    return _new_id(result.inserted_primary_key), False


def close(
    connection: Connection,
    run_ids: Sequence[int],
    status: FinalStatus,
    message: str | None,
    now: datetime,
) -> None:
    """Set the final status of runs and give their claims back."""
    connection.execute(delete(_CLAIM).where(_CLAIM.c.run_id.in_(run_ids)))
    connection.execute(
        update(_RUN)
        .where(_RUN.c.id.in_(run_ids))
        .values(status=status, message=message, finished_at=now)
    )


def sweep(connection: Connection, host: str, now: datetime) -> None:
    """Close the runs of a host whose process is gone, and give their claims back."""
    if gone := abandoned(connection, host):
        close(connection, gone, "crashed", "its process ended without closing the run", now)


def abandoned(connection: Connection, host: str) -> list[int]:
    """List the runs that stand as running, and whose process on this host is gone."""
    running = connection.execute(
        select(_RUN.c.id, _RUN.c.pid, func.coalesce(_RUN.c.resumed_at, _RUN.c.started_at))
        .where(_RUN.c.status == "running", _RUN.c.host == host)
        .order_by(_RUN.c.id)
    ).all()
    return [run_id for run_id, pid, since in running if not process_is_alive(pid, since)]


def count_items(connection: Connection, run_id: int) -> dict[str, int]:
    """Count a run's items by status."""
    rows = connection.execute(
        select(_ITEM.c.status, func.count())
        .where(_ITEM.c.run_id == run_id)
        .group_by(_ITEM.c.status)
    )
    return {str(status): int(count) for status, count in rows}


def decisions(connection: Connection, run: OpenRun, sha256s: Sequence[str]) -> dict[str, int]:
    """Find the decisions a run may reuse, by document.

    These are the newest of its key; for a run that scores anew only those it made itself,
    so that its own retry goes on where it stopped.
    """
    found: dict[str, int] = {}
    for start in range(0, len(sha256s), CHUNK):
        statement = (
            select(_DOCUMENT.c.sha256, _DECISION.c.id)
            .join(_DECISION, _DECISION.c.document_id == _DOCUMENT.c.id)
            .where(_DOCUMENT.c.sha256.in_(sha256s[start : start + CHUNK]), run.same_key(_DECISION))
            .order_by(_DECISION.c.generation)
        )
        if run.rescore:
            statement = statement.where(_DECISION.c.run_id == run.run_id)
        found.update((sha256, decision_id) for sha256, decision_id in connection.execute(statement))
    return found


def _run_values(connection: Connection, start: RunStart, now: datetime) -> dict[str, Any]:
    contract = start.contract or "none"
    schema_version_id = _find_or_insert(
        connection,
        _SCHEMA,
        {"sha256": start.schema.sha256},
        {"canonical": start.schema.canonical, "created_at": now},
    )
    checkpoint = {name: getattr(start.checkpoint, name) for name in _CHECKPOINT_COLUMNS}
    checkpoint_id = _find_or_insert(
        connection,
        _CHECKPOINT,
        {"fingerprint": start.checkpoint.fingerprint},
        {**checkpoint, "created_at": now},
    )
    scaling_id = _find_or_insert(
        connection,
        _SCALING,
        {"temperature": start.temperature},
        {"kind": start.temperature_kind, "source": start.temperature_source, "created_at": now},
    )
    return {
        "flow_run_id": start.flow_run_id,
        "name": start.name,
        "host": start.host,
        "pid": start.pid,
        "schema_version_id": schema_version_id,
        "schema_name": start.schema.name or start.schema.sha256[:12],
        "checkpoint_id": checkpoint_id,
        "scaling_id": scaling_id,
        "temperature": start.temperature,
        "temperature_kind": start.temperature_kind,
        "temperature_source": start.temperature_source,
        "documents_source": start.documents_source,
        "mode": start.mode,
        "layout": start.layout,
        "encoding": start.encoding,
        "contract": contract,
        "dtype": start.dtype,
        # All four, so that no two ways of asking can ever share a decision.
        "prompt_version": "/".join((contract, start.layout, start.encoding, start.prompt_version)),
        "max_input_tokens": start.max_input_tokens,
        "backend": start.backend,
        "versions": dict(start.versions),
        "store_text": start.store_text,
        "rescore": start.rescore,
        "permutations": start.permutations,
        "checkpoint_source": start.checkpoint_source,
        "adapter_source": start.adapter_source,
        "accepted_prompt_sha256": start.accepted_prompt_sha256,
    }


_CHECKPOINT_COLUMNS = (
    "name",
    "model_id",
    "revision",
    "architecture",
    "dtype",
    "quantization",
    "adapter_sha256",
    "contract",
)


def _require_unchanged(found: Any, values: dict[str, Any]) -> None:
    for name in (*_KEY_COLUMNS, "temperature", "documents_source", "rescore"):
        before, now = getattr(found, name), values[name]
        if before != now:
            raise RunRefused(
                f"a retry must continue with what its run began with, and {name} of run"
                f" {found.id} was {before!r} and is now {now!r}",
                hint="start a new flow run",
            )


def _find_or_insert(
    connection: Connection, table: Table, identity: dict[str, Any], rest: dict[str, Any]
) -> int:
    # Looked up first, because "insert or ignore" is spelled differently by every database. On
    # SQLite the write lock is held; on a server a collision fails the transaction.
    same = and_(*(table.c[name] == value for name, value in identity.items()))
    found = connection.execute(select(table.c.id).where(same)).scalar_one_or_none()
    if found is not None:
        return found
    result = connection.execute(insert(table).values(**identity, **rest))
    return _new_id(result.inserted_primary_key)


def _new_id(primary_key: Any) -> int:
    return int(primary_key[0])
