"""Writes one batch, inside the caller's transaction."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, TypeVar, cast

from sqlalchemy import Connection, bindparam, func, insert, select, update

from weighbridge.db import tables
from weighbridge.db.bulk import insert_rows
from weighbridge.db.claims import release
from weighbridge.db.errors import RecordRefused
from weighbridge.db.probabilities import CHUNK, ProbabilityRows, materialise
from weighbridge.db.records import AnswerRecord, BatchOutcome, BatchRecord, ItemRecord
from weighbridge.db.run_rows import OpenRun, decisions

_RUN = tables.table(tables.Run)
_BATCH = tables.table(tables.Batch)
_ITEM = tables.table(tables.Item)
_DOCUMENT = tables.table(tables.Document)
_DECISION = tables.table(tables.Decision)
_ANSWER = tables.table(tables.Answer)
_CHOICE = tables.table(tables.AnswerChoice)
_T = TypeVar("_T")


@dataclass(frozen=True)
class _Standing:
    """An item, and how it comes to stand now that it is being recorded."""

    item: ItemRecord
    sha256: str | None
    status: str
    wasted: bool = False


def record(connection: Connection, run: OpenRun, batch: BatchRecord, now: datetime) -> BatchOutcome:
    """Write a checked batch and give its claims back.

    Items that the run has already are left as they are: a retried task records nothing twice.

    Raises:
        RecordRefused: A reused item has no decision, or a recorded position comes again
            with another document.
    """
    items = _not_yet_recorded(connection, run, batch.items)
    sha256s = list({item.document.sha256: None for item in batch.items if item.document})
    release(connection, run, sha256s)
    if not items:
        return BatchOutcome()
    decided = decisions(connection, run, sha256s)
    standings = _standings(items, decided)
    outcome = _outcome(standings)
    batch_id = _write_batch(connection, run, batch, outcome, now)
    documents = _write_documents(connection, run, items)
    new = {s.sha256: s.item for s in standings if s.status == "scored" and s.sha256}
    made = _write_decisions(connection, run, batch_id, new, documents)
    reused = (decided[s.sha256] for s in standings if s.sha256 in decided)
    materialise(connection, reused, run.scaling_id, run.temperature)
    _write_items(connection, run, batch_id, standings, documents, {**decided, **made})
    counts = {name: _RUN.c[name] + count for name, count in asdict(outcome).items()}
    connection.execute(
        update(_RUN)
        .where(_RUN.c.id == run.run_id)
        .values(documents=_RUN.c.documents + outcome.documents, **counts)
    )
    return outcome


def _not_yet_recorded(
    connection: Connection, run: OpenRun, items: Sequence[ItemRecord]
) -> list[ItemRecord]:
    recorded: dict[int, str | None] = {}
    for chunk in _chunks([item.position for item in items]):
        rows = connection.execute(
            select(_ITEM.c.position, _DOCUMENT.c.sha256)
            .outerjoin(_DOCUMENT, _DOCUMENT.c.id == _ITEM.c.document_id)
            .where(_ITEM.c.run_id == run.run_id, _ITEM.c.position.in_(chunk))
        )
        recorded.update((position, sha256) for position, sha256 in rows)
    for item in items:
        sha256 = item.document.sha256 if item.document else None
        if item.position in recorded and recorded[item.position] != sha256:
            raise RecordRefused(
                f"position {item.position} of run {run.run_id} is recorded with another document",
                hint="the source has changed since the run began: start a new run",
            )
    return [item for item in items if item.position not in recorded]


def _standings(items: Sequence[ItemRecord], decided: Mapping[str, int]) -> list[_Standing]:
    known = set(decided)
    standings: list[_Standing] = []
    for item in items:
        sha256 = item.document.sha256 if item.document else None
        if item.status == "rejected" or sha256 is None:
            standings.append(_Standing(item, None, "rejected"))
        elif item.status == "scored":
            # Decided meanwhile, by another run or earlier in this batch: work done in vain.
            wasted = sha256 in known
            standings.append(_Standing(item, sha256, "reused" if wasted else "scored", wasted))
            known.add(sha256)
        elif sha256 in known:
            standings.append(_Standing(item, sha256, "reused"))
        else:
            raise RecordRefused(
                f"item {item.position}: a reused item must have a decision, and there is none",
                hint="score the document, or put the item after the one that is scored",
            )
    return standings


def _outcome(standings: Sequence[_Standing]) -> BatchOutcome:
    statuses = [standing.status for standing in standings]
    return BatchOutcome(
        scored=statuses.count("scored"),
        reused=statuses.count("reused"),
        rejected=statuses.count("rejected"),
        wasted=sum(standing.wasted for standing in standings),
    )


def _write_batch(
    connection: Connection, run: OpenRun, batch: BatchRecord, outcome: BatchOutcome, now: datetime
) -> int:
    result = connection.execute(
        insert(_BATCH).values(
            run_id=run.run_id,
            started_at=batch.started_at,
            recorded_at=now,
            mode=batch.mode,
            backend=batch.backend,
            **asdict(outcome),
            **(asdict(batch.timings) if batch.timings else {}),
        )
    )
    return int(cast("Any", result.inserted_primary_key)[0])


def _write_documents(
    connection: Connection, run: OpenRun, items: Sequence[ItemRecord]
) -> dict[str, int]:
    records = {item.document.sha256: item.document for item in items if item.document}
    texts = {
        sha256: record.text if run.store_text and _is_storable(record.text) else None
        for sha256, record in records.items()
    }
    ids: dict[str, int] = {}
    without_text: list[str] = []
    for chunk in _chunks(list(records)):
        rows = connection.execute(
            select(_DOCUMENT.c.sha256, _DOCUMENT.c.id, _DOCUMENT.c.text.is_(None)).where(
                _DOCUMENT.c.sha256.in_(chunk)
            )
        )
        for sha256, document_id, textless in rows:
            ids[sha256] = document_id
            if textless:
                without_text.append(sha256)
    # Known only from a run that kept no text; this run may keep it.
    late = [{"sha": sha, "late_text": texts[sha]} for sha in without_text if texts[sha] is not None]
    if late:
        connection.execute(
            update(_DOCUMENT)
            .where(_DOCUMENT.c.sha256 == bindparam("sha"))
            .values(text=bindparam("late_text")),
            late,
        )
    rows = [
        {"sha256": sha256, "characters": record.characters, "text": texts[sha256]}
        for sha256, record in records.items()
        if sha256 not in ids
    ]
    if rows:
        statement = insert(_DOCUMENT).returning(_DOCUMENT.c.id, sort_by_parameter_order=True)
        new_ids = connection.execute(statement, rows).scalars()
        ids.update(zip((str(row["sha256"]) for row in rows), new_ids, strict=True))
    return ids


def _write_decisions(
    connection: Connection,
    run: OpenRun,
    batch_id: int,
    new: Mapping[str, ItemRecord],
    documents: Mapping[str, int],
) -> dict[str, int]:
    if not new:
        return {}
    generations = _next_generations(connection, run, [documents[sha256] for sha256 in new])
    rows = [
        {
            **run.key,
            "document_id": documents[sha256],
            "generation": generations.get(documents[sha256], 0),
            "run_id": run.run_id,
            "batch_id": batch_id,
        }
        for sha256 in new
    ]
    statement = insert(_DECISION).returning(_DECISION.c.id, sort_by_parameter_order=True)
    ids = list(connection.execute(statement, rows).scalars())
    answered = list(zip(ids, new.values(), strict=True))
    answers: list[dict[str, Any]] = []
    choices: list[dict[str, Any]] = []
    probabilities = ProbabilityRows(run.scaling_id, run.temperature)
    for decision_id, item in answered:
        for position, answer in enumerate(item.answers):
            answers.append(_answer_row(decision_id, position, answer))
            choices += _choice_rows(decision_id, position, answer)
            logits = [choice.logit for choice in answer.choices]
            probabilities.add(
                decision_id, position, answer.field, answer.kind, answer.selected, logits
            )
    insert_rows(connection, _ANSWER, answers)
    insert_rows(connection, _CHOICE, choices)
    probabilities.write(connection)
    return dict(zip(new, ids, strict=True))


def _next_generations(
    connection: Connection, run: OpenRun, document_ids: Sequence[int]
) -> dict[int, int]:
    generations: dict[int, int] = {}
    for chunk in _chunks(document_ids):
        rows = connection.execute(
            select(_DECISION.c.document_id, func.max(_DECISION.c.generation) + 1)
            .where(_DECISION.c.document_id.in_(chunk), run.same_key(_DECISION))
            .group_by(_DECISION.c.document_id)
        )
        generations.update((document_id, generation) for document_id, generation in rows)
    return generations


def _answer_row(decision_id: int, position: int, answer: AnswerRecord) -> dict[str, Any]:
    return {
        "decision_id": decision_id,
        "field_position": position,
        "field": answer.field,
        "kind": answer.kind,
        "selected": answer.selected,
        "value": answer.choices[answer.selected].choice,
        "margin": answer.margin,
        "flip_rate": answer.flip_rate,
    }


def _choice_rows(decision_id: int, position: int, answer: AnswerRecord) -> list[dict[str, Any]]:
    return [
        {
            "decision_id": decision_id,
            "field_position": position,
            "choice_position": choice_position,
            "choice": choice.choice,
            "logit": choice.logit,
        }
        for choice_position, choice in enumerate(answer.choices)
    ]


def _write_items(
    connection: Connection,
    run: OpenRun,
    batch_id: int,
    standings: Sequence[_Standing],
    documents: Mapping[str, int],
    decided: Mapping[str, int],
) -> None:
    rows = [
        {
            "run_id": run.run_id,
            "position": item.position,
            "batch_id": batch_id,
            "line": item.line,
            "external_id": storable(item.external_id),
            "metadata": None if item.metadata is None else _plain(item.metadata),
            "document_id": documents[item.document.sha256] if item.document else None,
            "status": standing.status,
            "wasted": standing.wasted,
            "code": item.code,
            "message": storable(item.message),
            "decision_id": decided[standing.sha256] if standing.sha256 else None,
        }
        for standing in standings
        for item in (standing.item,)
    ]
    insert_rows(connection, _ITEM, rows)


def _is_storable(text: str | None) -> bool:
    return text is not None and storable(text) == text


def storable(text: str | None) -> str | None:
    """Spell out what a database cannot hold (lone surrogates, NUL), so that rejections keep."""
    if text is None:
        return None
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


def _plain(value: Any) -> Any:
    """Give metadata as strict JSON values: NaN and what JSON has no word for become text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        pairs = cast("Mapping[Any, Any]", value).items()
        return {str(storable(str(key))): _plain(entry) for key, entry in pairs}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in cast("Sequence[Any]", value)]
    return storable(str(value))


def _chunks(values: Sequence[_T]) -> list[Sequence[_T]]:
    return [values[start : start + CHUNK] for start in range(0, len(values), CHUNK)]
