"""The fields that a run answered, as its answers tell them: the store reads no schema."""

from dataclasses import dataclass

from sqlalchemy import Connection, select

from weighbridge.db import tables

_ITEM = tables.table(tables.Item)
_ANSWER = tables.table(tables.Answer)
_CHOICE = tables.table(tables.AnswerChoice)


@dataclass(frozen=True)
class RunField:
    """A field with its choices in their order; of a score the levels, low to high."""

    position: int
    name: str
    kind: str
    choices: tuple[str, ...]


def fields_of_run(connection: Connection, run_id: int) -> list[RunField]:
    """Give the fields of a run, in order; none before its first answer."""
    statement = select(_ITEM.c.decision_id).where(
        _ITEM.c.run_id == run_id, _ITEM.c.decision_id.is_not(None)
    )
    decision_id = connection.scalar(statement.limit(1))
    return [] if decision_id is None else _fields_of_decision(connection, decision_id)


def _fields_of_decision(connection: Connection, decision_id: int) -> list[RunField]:
    choices: dict[int, list[str]] = {}
    rows = connection.execute(
        select(_CHOICE.c.field_position, _CHOICE.c.choice)
        .where(_CHOICE.c.decision_id == decision_id)
        .order_by(_CHOICE.c.field_position, _CHOICE.c.choice_position)
    )
    for position, choice in rows:
        choices.setdefault(position, []).append(choice)
    answers = connection.execute(
        select(_ANSWER.c.field_position, _ANSWER.c.field, _ANSWER.c.kind)
        .where(_ANSWER.c.decision_id == decision_id)
        .order_by(_ANSWER.c.field_position)
    )
    return [
        RunField(position, name, kind, tuple(choices.get(position, ())))
        for position, name, kind in answers
    ]
