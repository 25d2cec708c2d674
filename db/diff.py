"""Two runs side by side: which answers to the same documents are the same.

Documents are paired by content, whatever their ids and positions; a document that is in a
run several times counts once, at its first position. What is paired is counted by the
database; no answer of a large run passes through Python, except to be shown.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, Literal, TypedDict

from sqlalchemy import (
    ColumnElement,
    Connection,
    Engine,
    Select,
    Subquery,
    and_,
    case,
    func,
    select,
)

from weighbridge.db import tables
from weighbridge.db.answers import streamed
from weighbridge.db.engine import reading
from weighbridge.db.errors import QueryRefused
from weighbridge.db.fields import RunField, fields_of_run
from weighbridge.db.run_queries import require_run

Side = Literal["first", "second"]

_RUN = tables.table(tables.Run)
_ITEM = tables.table(tables.Item)
_ANSWER = tables.table(tables.Answer)
_ANSWER_P = tables.table(tables.AnswerProbability)
_CHOICE_P = tables.table(tables.ChoiceProbability)


@dataclass(frozen=True)
class PairedField:
    """A field that both runs answered with the same choices, however ordered."""

    first: RunField
    second: RunField

    @property
    def name(self) -> str:
        """Give its name, which is the same in both."""
        return self.first.name


@dataclass(frozen=True)
class FieldPairs:
    """The answers to one field, counted by pair of values.

    Attributes:
        field: The field, with the choices of the first run.
        counts: How many documents, by the value in the first run and in the second.
        probability_change: Mean over documents of how far the probability of the first
            run's answer is from what the second run gives the same choice; None without any.
    """

    field: RunField
    counts: Mapping[tuple[str, str], int]
    probability_change: float | None

    @property
    def paired(self) -> int:
        """Count the documents."""
        return sum(self.counts.values())

    @property
    def same(self) -> int:
        """Count the documents with the same answer in both."""
        return sum(count for (first, second), count in self.counts.items() if first == second)


@dataclass(frozen=True)
class Pairing:
    """How two runs can be compared.

    Attributes:
        first: Number of the first run.
        second: Number of the second.
        paired: Documents that both answered.
        only_first: Documents that only the first run answered; the second may not have had
            them, or may have rejected them.
        only_second: Likewise.
        fields: What both answered with the same choices.
        left_out: Other fields, and why.
    """

    first: int
    second: int
    paired: int
    only_first: int
    only_second: int
    fields: tuple[PairedField, ...]
    left_out: Mapping[str, str]


class ChangedAnswer(TypedDict):
    """A document's answer to one field in both runs, each at its own temperature."""

    external_id: str | None
    document_id: int
    first_position: int
    second_position: int
    field: str
    first_value: str
    first_probability: float
    second_value: str
    second_probability: float


class UnpairedDocument(TypedDict):
    """A document that one of the runs did not answer, where the other has it."""

    position: int
    external_id: str | None
    document_id: int


def pair_runs(engine: Engine, first: int, second: int, *, fields: Sequence[str] = ()) -> Pairing:
    """Find what two runs have in common.

    Args:
        engine: A store.
        first: A run.
        second: Another one, or the same.
        fields: Only these fields; all if empty.

    Raises:
        RunRefused: There is no such run.
        QueryRefused: A field is asked for that cannot be compared.
    """
    with reading(engine) as connection:
        runs = (require_run(connection, first), require_run(connection, second))
        mine, theirs = (
            {field.name: field for field in fields_of_run(connection, run)} for run in runs
        )
        shared: list[PairedField] = []
        left_out: dict[str, str] = {}
        for name in dict.fromkeys((*mine, *theirs)):
            if name not in mine or name not in theirs:
                left_out[name] = f"only run {first if name in mine else second} has it"
            elif set(mine[name].choices) != set(theirs[name].choices):
                left_out[name] = "its choices differ"
            else:
                shared.append(PairedField(mine[name], theirs[name]))
        for name in fields:
            if name not in {field.name for field in shared}:
                raise QueryRefused(
                    "a field must be one that both runs answered with the same choices, got "
                    f"{name!r:.80}: {left_out.get(name, 'neither has it')}",
                    hint=f"such fields are: {', '.join(field.name for field in shared) or 'none'}",
                )
        if fields:
            shared = [field for field in shared if field.name in fields]
            left_out = {}
        counts = {side: _count_unpaired(connection, runs, side) for side in _SIDES}
        pairs = _pairs(*runs)
        paired = connection.execute(select(func.count()).select_from(pairs)).scalar_one()
    return Pairing(*runs, paired, counts["first"], counts["second"], tuple(shared), left_out)


def count_pairs(engine: Engine, pairing: Pairing) -> list[FieldPairs]:
    """Count the answers to each field of a pairing by the pair of their values."""
    with reading(engine) as connection:
        return [_count_field(connection, pairing, field) for field in pairing.fields]


@contextmanager
def reading_pairs(
    engine: Engine, pairing: Pairing, *, changed: bool = True, limit: int | None = None
) -> Generator[Iterator[ChangedAnswer]]:
    """Give answers of both runs one by one, by field and then in the order of the first run.

    Args:
        engine: A store.
        pairing: What to compare.
        changed: Only those whose value differs.
        limit: At most so many of each field.
    """
    with reading(engine) as connection:
        yield chain.from_iterable(
            _field_answers(connection, pairing, field, changed=changed, limit=limit)
            for field in pairing.fields
        )


def unpaired_documents(
    engine: Engine, pairing: Pairing, side: Side, limit: int | None = None
) -> list[UnpairedDocument]:
    """Give the documents that only one run answered, in its order."""
    with reading(engine) as connection:
        statement = _unpaired((pairing.first, pairing.second), side)
        rows = connection.execute(statement.order_by("position").limit(limit)).mappings()
        return [UnpairedDocument(**row) for row in rows]


@contextmanager
def reading_expected(
    engine: Engine, pairing: Pairing, field: PairedField, column: str
) -> Generator[Iterator[tuple[str, str, Any]]]:
    """Give both values of each document and what a metadata column says; None if nothing.

    The column is looked for in the first run's metadata, then in the second's.
    """
    with reading(engine) as connection:
        rows = streamed(connection, _expected_statement(pairing, field))

        def values() -> Iterator[tuple[str, str, Any]]:
            for first, second, *columns in rows:
                found = next((each[column] for each in columns if each and column in each), None)
                yield first, second, found

        yield values()


_SIDES: Final[tuple[Side, Side]] = ("first", "second")


def _documents(run_id: int, name: str) -> Subquery:
    """Select the answered documents of a run, each once."""
    first = [func.min(_ITEM.c[name]).label(name) for name in ("position", "decision_id")]
    return (
        select(_ITEM.c.document_id, *first)
        .where(_ITEM.c.run_id == run_id, _ITEM.c.decision_id.is_not(None))
        .group_by(_ITEM.c.document_id)
        .subquery(name)
    )


def _pairs(first: int, second: int) -> Subquery:
    """Select the documents of both runs.

    Nothing of the items is joined: SQLite would try every item of the other run for each.
    """
    mine, theirs = _documents(first, "mine"), _documents(second, "theirs")
    return (
        select(
            mine.c.document_id,
            *(mine.c[name].label(f"first_{name}") for name in ("position", "decision_id")),
            *(theirs.c[name].label(f"second_{name}") for name in ("position", "decision_id")),
        )
        .select_from(mine.join(theirs, theirs.c.document_id == mine.c.document_id))
        .subquery("pairs")
    )


def _of_item(run_id: int, position: ColumnElement[int], name: str) -> ColumnElement[Any]:
    item = _ITEM.alias()
    found = select(item.c[name]).where(item.c.run_id == run_id, item.c.position == position)
    return found.scalar_subquery()


def _unpaired(runs: tuple[int, int], side: Side) -> Select[*tuple[Any, ...]]:
    run, against = runs if side == "first" else reversed(runs)
    mine, theirs = _documents(run, "mine"), _documents(against, "theirs")
    return (
        select(_ITEM.c.position, _ITEM.c.external_id, _ITEM.c.document_id)
        .select_from(mine)
        .join(_ITEM, and_(_ITEM.c.run_id == run, _ITEM.c.position == mine.c.position))
        .outerjoin(theirs, theirs.c.document_id == mine.c.document_id)
        .where(theirs.c.document_id.is_(None))
    )


def _count_unpaired(connection: Connection, runs: tuple[int, int], side: Side) -> int:
    found = _unpaired(runs, side).subquery()
    return connection.execute(select(func.count()).select_from(found)).scalar_one()


def _answered(pairing: Pairing, field: PairedField) -> tuple[Any, ...]:
    """Join the pairs with both answers to a field and both probabilities.

    Every table is looked up by its whole key. The scalings are made to depend on the pair,
    as `scaling_by_item` says, so that no probability is looked for before it.
    """
    pairs = _pairs(pairing.first, pairing.second)
    one, other = _ANSWER.alias("one_answer"), _ANSWER.alias("other_answer")
    own, selected = _ANSWER_P.alias("own_p"), _ANSWER_P.alias("other_p")
    source = (
        pairs.join(one, _of(one, pairs.c.first_decision_id, field.first))
        .join(other, _of(other, pairs.c.second_decision_id, field.second))
        .join(
            own,
            and_(
                own.c.scaling_id == _scaling(pairing.first, pairs.c.first_position),
                _of(own, pairs.c.first_decision_id, field.first),
            ),
        )
    )
    theirs = and_(
        selected.c.scaling_id == _scaling(pairing.second, pairs.c.second_position),
        _of(selected, pairs.c.second_decision_id, field.second),
    )
    return pairs, source, one, other, own, selected, theirs


def _of(table: Any, decision: ColumnElement[int], field: RunField) -> ColumnElement[bool]:
    return and_(table.c.decision_id == decision, table.c.field_position == field.position)


def _scaling(run_id: int, position: ColumnElement[int]) -> ColumnElement[int]:
    scaling = select(_RUN.c.scaling_id).where(_RUN.c.id == run_id).scalar_subquery()
    return scaling + 0 * position


def _count_field(connection: Connection, pairing: Pairing, field: PairedField) -> FieldPairs:
    pairs, source, one, other, own, *_ = _answered(pairing, field)
    places = {choice: place for place, choice in enumerate(field.second.choices)}
    moved = {place: places[choice] for place, choice in enumerate(field.first.choices)}
    chosen = _CHOICE_P.alias("chosen_p")
    source = source.join(
        chosen,
        and_(
            chosen.c.scaling_id == _scaling(pairing.second, pairs.c.second_position),
            _of(chosen, pairs.c.second_decision_id, field.second),
            chosen.c.choice_position == case(moved, value=one.c.selected),
        ),
    )
    change = func.sum(func.abs(own.c.probability - chosen.c.probability))
    statement = (
        select(one.c.value, other.c.value, func.count(), change)
        .select_from(source)
        .group_by(one.c.value, other.c.value)
    )
    rows = connection.execute(statement).all()
    counts = {(first, second): int(count) for first, second, count, _ in rows}
    documents = sum(counts.values())
    mean = sum(row[3] for row in rows) / documents if documents else None
    return FieldPairs(field.first, counts, mean)


def _field_answers(
    connection: Connection,
    pairing: Pairing,
    field: PairedField,
    *,
    changed: bool,
    limit: int | None,
) -> Iterator[ChangedAnswer]:
    pairs, source, one, other, own, selected, theirs = _answered(pairing, field)
    statement = (
        select(
            func.coalesce(
                _of_item(pairing.first, pairs.c.first_position, "external_id"),
                _of_item(pairing.second, pairs.c.second_position, "external_id"),
            ),
            *(pairs.c[name] for name in ("document_id", "first_position", "second_position")),
            one.c.field,
            *(one.c.value, own.c.probability, other.c.value, selected.c.probability),
        )
        .select_from(source.join(selected, theirs))
        .order_by(pairs.c.first_position)
        .limit(limit)
    )
    if changed:
        statement = statement.where(one.c.value != other.c.value)
    names = list(ChangedAnswer.__annotations__)
    for row in streamed(connection, statement):
        yield ChangedAnswer(**dict(zip(names, row, strict=True)))


def _expected_statement(pairing: Pairing, field: PairedField) -> Select[*tuple[Any, ...]]:
    pairs, source, one, other, *_ = _answered(pairing, field)
    mine = _of_item(pairing.first, pairs.c.first_position, "metadata")
    theirs = _of_item(pairing.second, pairs.c.second_position, "metadata")
    return select(one.c.value, other.c.value, mine, theirs).select_from(source)
