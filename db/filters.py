"""Which answers of a run are meant, as conditions of a statement."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, and_, exists

from weighbridge.db import tables
from weighbridge.db.errors import QueryRefused
from weighbridge.db.fields import RunField, fields_of_run

_RUN = tables.table(tables.Run)
_ITEM = tables.table(tables.Item)
_ANSWER = tables.table(tables.Answer)
_ANSWER_P = tables.table(tables.AnswerProbability)


@dataclass(frozen=True)
class AnswerFilter:
    """Which answers of a run are meant; what is empty or None is not asked for.

    Attributes:
        fields: Names of fields.
        values: The answer is one of these, as the store keeps it (`true`, a level, a choice).
        min_probability: Least probability of the answer at the run's temperature.
        max_probability: Greatest, likewise.
        external_id: The document's own id.
        where: Fields and values that the document must be answered with, all of them.
            Without `fields` the bounds of the probability are those of these answers.
    """

    fields: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    min_probability: float | None = None
    max_probability: float | None = None
    external_id: str | None = None
    where: tuple[tuple[str, str], ...] = ()

    @property
    def bounds_where(self) -> bool:
        """Whether the bounds are those of the answers that `where` names."""
        return bool(self.where) and not self.fields


EVERY_ANSWER: Final = AnswerFilter()


def answer_conditions(
    run_id: int, only: AnswerFilter, *, indexed: bool
) -> list[ColumnElement[bool]]:
    """Give the conditions on an answer.

    Args:
        run_id: A run.
        only: Which answers.
        indexed: Find the field in the index on probabilities.
    """
    answered = _answered(only, _ANSWER_P.c.field if indexed else _ANSWER.c.field)
    return [*_of_run(run_id, only), *answered]


def document_conditions(run_id: int, only: AnswerFilter) -> list[ColumnElement[bool]]:
    """Give the conditions on a document, of whose answers one must be such."""
    found = [*_of_run(run_id, only), _ITEM.c.decision_id.is_not(None)]
    bounds = () if only.bounds_where else (only.min_probability, only.max_probability)
    if only.values or any(bound is not None for bound in bounds):
        found.append(_has_answer(_answered(only, _ANSWER.c.field)))
    return found


def same_answer() -> ColumnElement[bool]:
    """Join an answer with its probability."""
    return and_(
        _ANSWER.c.decision_id == _ANSWER_P.c.decision_id,
        _ANSWER.c.field_position == _ANSWER_P.c.field_position,
    )


def require_known(connection: Connection, run_id: int, only: AnswerFilter) -> None:
    """Refuse a name that would only ever give nothing; a run without answers knows none.

    Raises:
        QueryRefused: The run has no such field, or the fields no such choice.
    """
    require_among(only, fields_of_run(connection, run_id))


def require_among(only: AnswerFilter, fields: Sequence[RunField]) -> None:
    """Do as `require_known` does, with the fields of the run at hand."""
    if not fields:
        return
    names = [field.name for field in fields]
    for name in (*only.fields, *(field for field, _ in only.where)):
        if name not in names:
            raise QueryRefused(
                f"a field must be one that the run answered, got {name!r:.80}",
                hint=_which_field(name, names),
            )
    asked = [field for field in fields if not only.fields or field.name in only.fields]
    choices = list(dict.fromkeys(choice for field in asked for choice in field.choices))
    for value in only.values:
        if value not in choices:
            raise QueryRefused(
                f"a value must be a choice of the fields asked for, got {value!r:.80}",
                hint=f"the choices are: {listed(choices)}",
            )
    for name, value in only.where:
        choices = fields[names.index(name)].choices
        if value not in choices:
            raise QueryRefused(
                f"a value of {name:.80} must be one of its choices, got {value!r:.80}",
                hint=f"the choices are: {listed(choices)}",
            )


def listed(names: Sequence[str], most: int = 20) -> str:
    """Name some of them for a hint, and how many more there are."""
    shown = ", ".join(f"{name:.80}" for name in names[:most])
    return shown if len(names) <= most else f"{shown}, and {len(names) - most} more"


def _which_field(name: str, names: Sequence[str]) -> str:
    parts = [part.strip() for part in name.split(",")]
    if len(parts) > 1 and all(part in names for part in parts):
        return f"name each on its own: {' '.join(f'--field {part}' for part in parts)}"
    return f"the fields are: {listed(names)}"


def _of_run(run_id: int, only: AnswerFilter) -> list[ColumnElement[bool]]:
    found: list[ColumnElement[bool]] = [_ITEM.c.run_id == run_id]
    if only.external_id is not None:
        found.append(_ITEM.c.external_id == only.external_id)
    for field, value in only.where:
        wanted = [_ANSWER.c.field == field, _ANSWER.c.value == value]
        found.append(_has_answer(wanted + (_bounds(only) if only.bounds_where else [])))
    return found


def _has_answer(conditions: Sequence[ColumnElement[bool]]) -> ColumnElement[bool]:
    """Say that one of an item's answers is such; each is found by its key."""
    found: Any = exists().select_from(_ANSWER_P.join(_ANSWER, same_answer()))
    scaling = _ANSWER_P.c.scaling_id == _RUN.c.scaling_id
    decision = _ANSWER_P.c.decision_id == _ITEM.c.decision_id
    return found.where(scaling, decision, *conditions).correlate(_ITEM, _RUN)


def _answered(only: AnswerFilter, field: ColumnElement[str]) -> list[ColumnElement[bool]]:
    """Say how an answer must be.

    The field's name stands twice, with the answer and with its probability. Only the latter
    has an index, which must not be searched anew for each item: all of a run's answers to
    the field have the same key there.
    """
    found: list[ColumnElement[bool]] = []
    if len(only.fields) == 1:
        found.append(field == only.fields[0])
    elif only.fields:
        found.append(field.in_(only.fields))
    if len(only.values) == 1:
        found.append(_ANSWER.c.value == only.values[0])
    elif only.values:
        found.append(_ANSWER.c.value.in_(only.values))
    return found if only.bounds_where else found + _bounds(only)


def _bounds(only: AnswerFilter) -> list[ColumnElement[bool]]:
    found: list[ColumnElement[bool]] = []
    if only.min_probability is not None:
        found.append(_ANSWER_P.c.probability >= only.min_probability)
    if only.max_probability is not None:
        found.append(_ANSWER_P.c.probability <= only.max_probability)
    return found
