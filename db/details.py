"""All there is on one run, and on one document in every run it is in."""

from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from operator import attrgetter
from typing import Any

from sqlalchemy import ColumnElement, Connection, Engine, and_, func, select

from weighbridge.db import tables
from weighbridge.db.engine import reading
from weighbridge.db.fields import RunField, fields_of_run
from weighbridge.db.records import RunSummary
from weighbridge.db.run_queries import require_run, summarise
from weighbridge.db.schema_views import SchemaView, view_of_run

_RUN = tables.table(tables.Run)
_ITEM = tables.table(tables.Item)
_BATCH = tables.table(tables.Batch)
_ANSWER = tables.table(tables.Answer)
_CHOICE = tables.table(tables.AnswerChoice)
_CHOICE_P = tables.table(tables.ChoiceProbability)
_ANSWER_P = tables.table(tables.AnswerProbability)
_CHECKPOINT = tables.table(tables.Checkpoint)
_SCHEMA = tables.table(tables.SchemaVersion)
_DOCUMENT = tables.table(tables.Document)
_SUMMED = (
    *("prefill_seconds", "branch_seconds", "total_seconds", "prefix_tokens", "suffix_tokens"),
    *("prefills", "resident_tokens", "resident_hits"),
)


@dataclass(frozen=True)
class RunDetails:
    """A run with what identifies its schema and checkpoint, and what its batches took in all.

    The sums are None where no batch measured it; `peak_bytes` is the greatest of any batch.
    """

    summary: RunSummary
    resumed_at: datetime | None
    schema_sha256: str
    fingerprint: str
    model_id: str | None
    revision: str | None
    architecture: str | None
    quantization: str | None
    adapter_sha256: str | None
    prompt_version: str
    max_input_tokens: int
    store_text: bool
    versions: dict[str, str]
    batches: int
    prefill_seconds: float | None
    branch_seconds: float | None
    total_seconds: float | None
    prefix_tokens: int | None
    suffix_tokens: int | None
    prefills: int | None
    resident_tokens: int | None
    resident_hits: int | None
    peak_bytes: int | None


@dataclass(frozen=True)
class ChoiceDetails:
    """A choice, its logit, and its probability at the run's temperature."""

    choice: str
    logit: float
    probability: float


@dataclass(frozen=True)
class AnswerDetails:
    """An answer with every choice in the order of the schema."""

    field: str
    kind: str
    value: str
    probability: float
    margin: float | None
    expected_value: float | None
    flip_rate: float | None
    choices: tuple[ChoiceDetails, ...]


@dataclass(frozen=True)
class ItemDetails:
    """A document as one run has it; `text` is None where the store keeps none."""

    run_id: int
    position: int
    line: int | None
    external_id: str | None
    metadata: dict[str, Any] | None
    status: str
    code: str | None
    message: str | None
    document_id: int | None
    document_sha256: str | None
    characters: int | None
    text: str | None
    decision_id: int | None
    started_at: datetime
    schema: str
    checkpoint: str
    temperature: float
    permutations: int
    answers: tuple[AnswerDetails, ...]


def run_details(engine: Engine, run_id: int | None = None) -> RunDetails:
    """Give all there is on a run; None is the newest.

    Raises:
        RunRefused: There is no such run.
    """
    with reading(engine) as connection:
        run = require_run(connection, run_id)
        statement = (
            select(
                _RUN.c.resumed_at,
                _SCHEMA.c.sha256.label("schema_sha256"),
                *(_CHECKPOINT.c[name] for name in ("fingerprint", "model_id", "revision")),
                *(_CHECKPOINT.c[name] for name in ("architecture", "quantization")),
                _CHECKPOINT.c.adapter_sha256,
                *(_RUN.c[name] for name in ("prompt_version", "max_input_tokens", "store_text")),
                _RUN.c.versions,
            )
            .join(_SCHEMA, _SCHEMA.c.id == _RUN.c.schema_version_id)
            .join(_CHECKPOINT, _CHECKPOINT.c.id == _RUN.c.checkpoint_id)
            .where(_RUN.c.id == run)
        )
        sums = [func.sum(_BATCH.c[name]).label(name) for name in _SUMMED]
        taken = select(
            func.count().label("batches"), *sums, func.max(_BATCH.c.peak_bytes).label("peak_bytes")
        ).where(_BATCH.c.run_id == run)
        return RunDetails(
            summary=summarise(connection, run),
            **connection.execute(statement).mappings().one(),
            **connection.execute(taken).mappings().one(),
        )


def run_fields(engine: Engine, run_id: int | None = None) -> list[RunField]:
    """Give the fields of a run (None: the newest), in order; none before its first answer.

    Raises:
        RunRefused: There is no such run.
    """
    with reading(engine) as connection:
        return fields_of_run(connection, require_run(connection, run_id))


def schema_view(engine: Engine, run_id: int | None = None) -> SchemaView:
    """Give the view that a run's answers are in, a row for each document.

    Raises:
        RunRefused: There is no such run.
    """
    with reading(engine) as connection:
        return view_of_run(connection, require_run(connection, run_id))


def document_items(
    engine: Engine, external_id: str, *, run_id: int | None = None, limit: int | None = None
) -> list[ItemDetails]:
    """Give the documents with this id, in every run or in one, the newest run first.

    Two documents may have one id: in two sources, or because its text has changed.
    """
    wanted = [_ITEM.c.external_id == external_id]
    if run_id is not None:
        wanted.append(_ITEM.c.run_id == run_id)
    with reading(engine) as connection:
        return _items(connection, and_(*wanted), limit)


def item_details(engine: Engine, run_id: int, position: int) -> ItemDetails | None:
    """Give the document at a position of a run; None when there is none."""
    with reading(engine) as connection:
        found = _items(connection, and_(_ITEM.c.run_id == run_id, _ITEM.c.position == position), 1)
    return found[0] if found else None


def count_items(engine: Engine, external_id: str, *, run_id: int | None = None) -> int:
    """Count what `document_items` gives without a limit."""
    statement = select(func.count()).where(_ITEM.c.external_id == external_id)
    if run_id is not None:
        statement = statement.where(_ITEM.c.run_id == run_id)
    with reading(engine) as connection:
        return connection.execute(statement).scalar_one()


def _items(
    connection: Connection, wanted: ColumnElement[bool], limit: int | None
) -> list[ItemDetails]:
    named = ("run_id", "position", "line", "external_id", "metadata", "status", "code", "message")
    statement = (
        select(
            *(_ITEM.c[name] for name in named),
            _ITEM.c.document_id,
            _DOCUMENT.c.sha256.label("document_sha256"),
            _DOCUMENT.c.characters,
            _DOCUMENT.c.text,
            _ITEM.c.decision_id,
            _RUN.c.started_at,
            _RUN.c.schema_name.label("schema"),
            _CHECKPOINT.c.name.label("checkpoint"),
            *(_RUN.c[name] for name in ("temperature", "permutations", "scaling_id")),
        )
        .join(_RUN, _RUN.c.id == _ITEM.c.run_id)
        .join(_CHECKPOINT, _CHECKPOINT.c.id == _RUN.c.checkpoint_id)
        .outerjoin(_DOCUMENT, _DOCUMENT.c.id == _ITEM.c.document_id)
        .where(wanted)
        .order_by(_ITEM.c.run_id.desc(), _ITEM.c.position)
        .limit(limit)
    )
    found: list[ItemDetails] = []
    for row in connection.execute(statement).mappings().all():
        values = dict(row)
        scaling_id = values.pop("scaling_id")
        decision_id = values["decision_id"]
        answers = () if decision_id is None else _answers(connection, decision_id, scaling_id)
        found.append(ItemDetails(answers=answers, **values))
    return found


def _answers(
    connection: Connection, decision_id: int, scaling_id: int
) -> tuple[AnswerDetails, ...]:
    place = ("decision_id", "field_position")
    statement = (
        select(
            _ANSWER.c.field_position,
            *(_ANSWER.c[name] for name in ("field", "kind", "value", "margin", "flip_rate")),
            _ANSWER_P.c.probability.label("answer_probability"),
            _ANSWER_P.c.expected_value,
            _CHOICE.c.choice,
            _CHOICE.c.logit,
            _CHOICE_P.c.probability,
        )
        .join(
            _ANSWER_P,
            and_(
                _ANSWER_P.c.scaling_id == scaling_id,
                *(_ANSWER_P.c[name] == _ANSWER.c[name] for name in place),
            ),
        )
        .join(_CHOICE, and_(*(_CHOICE.c[name] == _ANSWER.c[name] for name in place)))
        .join(
            _CHOICE_P,
            and_(
                _CHOICE_P.c.scaling_id == scaling_id,
                *(_CHOICE_P.c[name] == _CHOICE.c[name] for name in (*place, "choice_position")),
            ),
        )
        .where(_ANSWER.c.decision_id == decision_id)
        .order_by(_ANSWER.c.field_position, _CHOICE.c.choice_position)
    )
    answers: list[AnswerDetails] = []
    rows = connection.execute(statement).all()
    for _, group in groupby(rows, key=attrgetter("field_position")):
        choices = list(group)
        first = choices[0]
        answers.append(
            AnswerDetails(
                field=first.field,
                kind=first.kind,
                value=first.value,
                probability=first.answer_probability,
                margin=first.margin,
                expected_value=first.expected_value,
                flip_rate=first.flip_rate,
                choices=tuple(
                    ChoiceDetails(each.choice, each.logit, each.probability) for each in choices
                ),
            )
        )
    return tuple(answers)
