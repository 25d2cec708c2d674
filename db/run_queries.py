"""What a store says of its runs: which there are, how they stand, what they rejected."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypedDict

from sqlalchemy import ColumnElement, Connection, Engine, func, or_, select

from weighbridge.db import tables
from weighbridge.db.engine import reading
from weighbridge.db.errors import RunRefused
from weighbridge.db.records import RunSummary
from weighbridge.db.run_rows import no_such_run
from weighbridge.db.views import results_statement

_RUN = tables.table(tables.Run)
_ITEM = tables.table(tables.Item)
_BATCH = tables.table(tables.Batch)
_ANSWER = tables.table(tables.Answer)
_ANSWER_P = tables.table(tables.AnswerProbability)
_CHECKPOINT = tables.table(tables.Checkpoint)
_SCHEMA = tables.table(tables.SchemaVersion)
_COPIED = (
    *("flow_run_id", "name", "status", "message", "host", "pid", "started_at", "finished_at"),
    *("documents", "scored", "reused", "rejected", "wasted"),
    *("temperature", "temperature_kind", "temperature_source", "documents_source"),
    *("mode", "layout", "encoding", "contract", "dtype", "backend", "rescore", "permutations"),
    *("checkpoint_source", "adapter_source", "accepted_prompt_sha256"),
)


class RejectedRow(TypedDict):
    """One record that was not scored, and why."""

    position: int
    line: int | None
    external_id: str | None
    code: str
    message: str


@dataclass(frozen=True)
class FieldValue:
    """How often a field had a value in a run, and its mean probability there."""

    field: str
    kind: str
    value: str
    count: int
    mean_probability: float


@dataclass(frozen=True)
class RunFilter:
    """Which runs are meant; what is None is not asked for.

    Attributes:
        status: `running`, `completed`, `failed`, `cancelled` or `crashed`.
        schema: The name a run calls its schema, or the start of the schema's hash.
        checkpoint: Name or model id of the checkpoint, or the start of its fingerprint.
        since: Runs that began then or later; aware.
    """

    status: str | None = None
    schema: str | None = None
    checkpoint: str | None = None
    since: datetime | None = None


EVERY_RUN = RunFilter()


def runs(
    engine: Engine, limit: int | None = None, *, offset: int = 0, only: RunFilter = EVERY_RUN
) -> list[RunSummary]:
    """List runs, the newest first."""
    statement = _summaries().where(*_conditions(only)).order_by(_RUN.c.id.desc())
    with reading(engine) as connection:
        rows = connection.execute(statement.limit(limit).offset(offset))
        return [_summary(row) for row in rows]


def count_runs(engine: Engine, only: RunFilter = EVERY_RUN) -> int:
    """Count runs."""
    statement = _summaries().with_only_columns(func.count()).where(*_conditions(only))
    with reading(engine) as connection:
        return connection.execute(statement).scalar_one()


def run_summary(engine: Engine, run_id: int) -> RunSummary:
    """Give a run as it stands.

    Raises:
        RunRefused: There is no such run.
    """
    with reading(engine) as connection:
        return summarise(connection, run_id)


def run_sources(engine: Engine, flow_run_id: str) -> tuple[str | None, str | None] | None:
    """Give where the checkpoint and adapter of a flow run's run came from.

    Returns:
        None where the flow run has no run yet.
    """
    statement = select(_RUN.c.checkpoint_source, _RUN.c.adapter_source)
    with reading(engine) as connection:
        row = connection.execute(statement.where(_RUN.c.flow_run_id == flow_run_id)).one_or_none()
    return None if row is None else (row.checkpoint_source, row.adapter_source)


def summarise(connection: Connection, run_id: int) -> RunSummary:
    """Give a run as it stands, within a transaction.

    Raises:
        RunRefused: There is no such run.
    """
    row = connection.execute(_summaries().where(_RUN.c.id == run_id)).one_or_none()
    if row is None:
        raise no_such_run(run_id)
    return _summary(row)


def latest_run_id(engine: Engine) -> int | None:
    """Give the newest run; None when there is none."""
    with reading(engine) as connection:
        return connection.execute(select(func.max(_RUN.c.id))).scalar_one()


def existing_run(engine: Engine, run_id: int | None = None) -> int:
    """Give the id of a run that is there; None asks for the newest.

    Raises:
        RunRefused: There is no such run, or none at all.
    """
    with reading(engine) as connection:
        return require_run(connection, run_id)


def rejected(engine: Engine, run_id: int | None = None) -> list[RejectedRow]:
    """Give what a run (None: the newest) rejected, in the order of the source.

    Raises:
        RunRefused: There is no such run.
    """
    with reading(engine) as connection:
        run = require_run(connection, run_id)
        columns = (_ITEM.c[name] for name in RejectedRow.__annotations__)
        statement = select(*columns).where(_ITEM.c.run_id == run, _ITEM.c.status == "rejected")
        rows = connection.execute(statement.order_by(_ITEM.c.position)).mappings()
        return [RejectedRow(**row) for row in rows]


def rejected_codes(engine: Engine, run_id: int | None = None) -> dict[str, int]:
    """Count a run's rejections by code, the most frequent first.

    Raises:
        RunRefused: There is no such run.
    """
    with reading(engine) as connection:
        run = require_run(connection, run_id)
        rows = connection.execute(
            select(_ITEM.c.code, func.count())
            .where(_ITEM.c.run_id == run, _ITEM.c.status == "rejected")
            .group_by(_ITEM.c.code)
            .order_by(func.count().desc(), _ITEM.c.code)
        )
        return {str(code): int(count) for code, count in rows}


def answer_distribution(engine: Engine, run_id: int | None = None) -> list[FieldValue]:
    """Count a run's answers by field and value, fields in order, frequent values first.

    Raises:
        RunRefused: There is no such run.
    """
    with reading(engine) as connection:
        run = require_run(connection, run_id)
        key = (_ANSWER_P.c.field, _ANSWER.c.kind, _ANSWER.c.value)
        statement = (
            results_statement()
            .with_only_columns(
                *key,
                func.count().label("count"),
                func.avg(_ANSWER_P.c.probability).label("mean_probability"),
            )
            .where(_ITEM.c.run_id == run)
            .group_by(*key)
            .order_by(func.min(_ANSWER_P.c.field_position), func.count().desc(), _ANSWER.c.value)
        )
        return [FieldValue(**row) for row in connection.execute(statement).mappings()]


def mean_flip_rate(engine: Engine, run_id: int | None = None) -> float | None:
    """Give the mean flip rate of a run's answers, None when none of them has one.

    Raises:
        RunRefused: There is no such run.
    """
    with reading(engine) as connection:
        run = require_run(connection, run_id)
        statement = (
            select(func.avg(_ANSWER.c.flip_rate))
            .join(_ITEM, _ITEM.c.decision_id == _ANSWER.c.decision_id)
            .where(_ITEM.c.run_id == run)
        )
        return connection.execute(statement).scalar_one()


def batches(engine: Engine, run_id: int | None = None) -> list[dict[str, Any]]:
    """Give a run's batches with their counts and timings, in the order they were recorded.

    Raises:
        RunRefused: There is no such run.
    """
    with reading(engine) as connection:
        run = require_run(connection, run_id)
        statement = select(_BATCH).where(_BATCH.c.run_id == run).order_by(_BATCH.c.id)
        return [dict(row) for row in connection.execute(statement).mappings()]


def require_run(connection: Connection, run_id: int | None) -> int:
    """Give the id of a run that is there, within a transaction; None asks for the newest.

    Raises:
        RunRefused: There is no such run, or none at all.
    """
    statement = select(func.max(_RUN.c.id))
    if run_id is not None:
        statement = statement.where(_RUN.c.id == run_id)
    found = connection.execute(statement).scalar_one()
    if found is not None:
        return int(found)
    if run_id is not None:
        raise no_such_run(run_id)
    raise RunRefused(
        "a store must have a run before it can be asked about one, and there is no run yet",
        hint="weighbridge score makes one",
    )


def _summaries() -> Any:
    columns = [_RUN.c[name] for name in _COPIED]
    names = (_RUN.c.schema_name.label("schema"), _CHECKPOINT.c.name.label("checkpoint"))
    return (
        select(_RUN.c.id.label("run_id"), *columns, *names)
        .join(_CHECKPOINT, _CHECKPOINT.c.id == _RUN.c.checkpoint_id)
        .join(_SCHEMA, _SCHEMA.c.id == _RUN.c.schema_version_id)
    )


def _conditions(only: RunFilter) -> list[ColumnElement[bool]]:
    found: list[ColumnElement[bool]] = []
    if only.status is not None:
        found.append(_RUN.c.status == only.status)
    if only.schema is not None:
        start = _SCHEMA.c.sha256.startswith(only.schema, autoescape=True)
        found.append(or_(_RUN.c.schema_name == only.schema, start))
    if only.checkpoint is not None:
        named = (_CHECKPOINT.c[name] == only.checkpoint for name in ("name", "model_id"))
        start = _CHECKPOINT.c.fingerprint.startswith(only.checkpoint, autoescape=True)
        found.append(or_(*named, start))
    if only.since is not None:
        found.append(_RUN.c.started_at >= only.since)
    return found


def _summary(row: Any) -> RunSummary:
    values = dict(row._mapping)
    end = values["finished_at"] or datetime.now(UTC)
    return RunSummary(seconds=(end - values["started_at"]).total_seconds(), **values)
