"""One row per document, one column per field: for tables, files and the view of each schema."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from sqlalchemy import ColumnElement, Select, func, literal_column, select

from weighbridge.db import tables
from weighbridge.db.fields import RunField

_RUN = tables.table(tables.Run)
_ITEM = tables.table(tables.Item)
_ANSWER = tables.table(tables.Answer)
_ANSWER_P = tables.table(tables.AnswerProbability)
# A name longer than this is of no use as a column, and a statement has a longest length.
_LONGEST = 200

ITEM_TYPES: Final[Mapping[str, type]] = MappingProxyType(
    {"run_id": int, "position": int, "external_id": str}
)
"""The columns that stand before those of the fields, with the type of what is in them."""


@dataclass(frozen=True)
class WideColumns:
    """What the columns of a field are called where each field has its own."""

    field: RunField
    value: str
    probability: str


def wide_columns(fields: Sequence[RunField], *, taken: Sequence[str]) -> list[WideColumns]:
    """Name two columns for each field, `topic` and `topic_probability`.

    Databases hold names equal that differ in case only, so a name that is taken, by a
    column before it or another field, gets a number: `topic_2`.

    Args:
        fields: In the order of the columns.
        taken: Names of the other columns.
    """
    used = {name.casefold() for name in taken}
    found: list[WideColumns] = []
    for field in fields:
        plain = field.name.replace("\0", "\\x00")[:_LONGEST] or "field"
        number, name = 1, plain
        while {name.casefold(), f"{name}_probability".casefold()} & used:
            number += 1
            name = f"{plain}_{number}"
        used |= {name.casefold(), f"{name}_probability".casefold()}
        found.append(WideColumns(field, name, f"{name}_probability"))
    return found


def wide_statement(columns: Sequence[WideColumns]) -> Select[*tuple[Any, ...]]:
    """One row per answered document of a run: value and probability of each field.

    Each cell is looked up by its key, so there may be more fields than a join may have
    tables (64 in SQLite), and a query pays for the columns it names only.
    """
    source = _ITEM.join(_RUN, _RUN.c.id == _ITEM.c.run_id)
    cells: list[ColumnElement[Any]] = [
        _ITEM.c.run_id.label("run_id"),
        _ITEM.c.position.label("position"),
        _ITEM.c.external_id.label("external_id"),
    ]
    for names in columns:
        # Numbers of our own, written out: a view takes no parameters.
        place: ColumnElement[int] = literal_column(str(int(names.field.position)))
        value = select(_ANSWER.c.value).where(
            _ANSWER.c.decision_id == _ITEM.c.decision_id, _ANSWER.c.field_position == place
        )
        probability = select(_ANSWER_P.c.probability).where(
            _ANSWER_P.c.scaling_id == _RUN.c.scaling_id,
            _ANSWER_P.c.decision_id == _ITEM.c.decision_id,
            _ANSWER_P.c.field_position == place,
        )
        cells += [
            value.correlate(_ITEM).scalar_subquery().label(names.value),
            probability.correlate(_ITEM, _RUN).scalar_subquery().label(names.probability),
        ]
    return select(*cells).select_from(source)


def least_probability(positions: Sequence[int]) -> ColumnElement[Any]:
    """Give the least probability among an item's answers to some fields, by their positions."""
    found = select(func.min(_ANSWER_P.c.probability)).where(
        _ANSWER_P.c.scaling_id == _RUN.c.scaling_id,
        _ANSWER_P.c.decision_id == _ITEM.c.decision_id,
        _ANSWER_P.c.field_position.in_(positions),
    )
    return found.correlate(_ITEM, _RUN).scalar_subquery()
