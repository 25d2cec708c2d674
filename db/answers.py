"""The answers of a run: filtered, ordered, counted, and streamed however many there are."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal, TypedDict

from sqlalchemy import ColumnElement, Connection, Engine, Select, and_, func, select

from weighbridge.db import tables
from weighbridge.db.engine import reading
from weighbridge.db.errors import QueryRefused
from weighbridge.db.fields import fields_of_run
from weighbridge.db.filters import (
    EVERY_ANSWER,
    AnswerFilter,
    answer_conditions,
    document_conditions,
    require_among,
    require_known,
    same_answer,
)
from weighbridge.db.metadata import METADATA, require_columns, with_columns
from weighbridge.db.run_queries import require_run
from weighbridge.db.views import results_statement, scaling_by_item
from weighbridge.db.wide import (
    ITEM_TYPES,
    WideColumns,
    least_probability,
    wide_columns,
    wide_statement,
)

AnswerOrder = Literal["position", "probability", "margin", "field"]

_RUN = tables.table(tables.Run)
_ITEM = tables.table(tables.Item)
_ANSWER = tables.table(tables.Answer)
_ANSWER_P = tables.table(tables.AnswerProbability)
# Rows fetched at once: large enough to cost nothing, small enough not to be felt in memory.
_FETCHED: Final = 2000


class ResultRow(TypedDict):
    """One answered field of one item, as in the view `results`."""

    run_id: int
    position: int
    external_id: str | None
    document_id: int
    field: str
    kind: str
    value: str
    probability: float
    margin: float | None
    expected_value: float | None
    temperature: float
    checkpoint: str
    schema: str


RESULT_TYPES: Final[Mapping[str, type]] = MappingProxyType(
    {
        **dict.fromkeys(("run_id", "position"), int),
        "external_id": str,
        "document_id": int,
        **dict.fromkeys(("field", "kind", "value"), str),
        **dict.fromkeys(("probability", "margin", "expected_value", "temperature"), float),
        **dict.fromkeys(("checkpoint", "schema"), str),
    }
)
"""The columns of `ResultRow` in order, with the type of what is in them where it is not null."""


@dataclass(frozen=True)
class AnswerPage:
    """In which order, and which part.

    Attributes:
        order: `position` is the order of documents and fields.
        descending: From the greatest; of `position`, from the last document.
        limit: At most so many; None gives all.
        offset: After leaving out so many.
    """

    order: AnswerOrder = "position"
    descending: bool = False
    limit: int | None = None
    offset: int = 0


WHOLE: Final = AnswerPage()


def results(
    engine: Engine,
    run_id: int | None = None,
    *,
    uncertain: bool = False,
    limit: int | None = None,
    only: AnswerFilter = EVERY_ANSWER,
    page: AnswerPage | None = None,
) -> list[ResultRow]:
    """Give answers at once, in the order of documents and fields.

    Args:
        engine: A store.
        run_id: A run; None is the newest.
        uncertain: Order by probability instead, the least certain first.
        limit: At most so many.
        only: Which answers.
        page: Order and part, in place of `uncertain` and `limit`.

    Raises:
        RunRefused: There is no such run.
        QueryRefused: The filter names what the run does not have.
    """
    page = page or AnswerPage("probability" if uncertain else "position", limit=limit)
    names = list(RESULT_TYPES)
    with reading_answers(engine, run_id, only, page) as rows:
        return [ResultRow(**dict(zip(names, row, strict=True))) for row in rows]


@contextmanager
def reading_answers(
    engine: Engine,
    run_id: int | None = None,
    only: AnswerFilter = EVERY_ANSWER,
    page: AnswerPage = WHOLE,
    *,
    columns: Sequence[str] = (),
) -> Generator[Iterator[Sequence[Any]]]:
    """Give answers one by one, as values in the order of `RESULT_TYPES`.

    After them come those of the document's metadata `columns`, None where it has no such.
    They come from one transaction: what is recorded meanwhile is not among them.

    Raises:
        RunRefused: There is no such run.
        QueryRefused: The filter names what the run does not have.
    """
    with reading(engine) as connection:
        run = require_run(connection, run_id)
        require_known(connection, run, only)
        require_columns(connection, run, columns)
        statement = answers_statement(run, only, page)
        if not columns:
            yield streamed(connection, statement)
            return
        yield with_columns(streamed(connection, statement.add_columns(METADATA)), columns)


def count_answers(
    engine: Engine, run_id: int | None = None, only: AnswerFilter = EVERY_ANSWER
) -> int:
    """Count answers.

    Raises:
        RunRefused: There is no such run.
        QueryRefused: The filter names what the run does not have.
    """
    with reading(engine) as connection:
        run = require_run(connection, run_id)
        require_known(connection, run, only)
        return connection.execute(count_statement(run, only)).scalar_one()


@contextmanager
def reading_wide(
    engine: Engine,
    run_id: int | None = None,
    only: AnswerFilter = EVERY_ANSWER,
    page: AnswerPage = WHOLE,
    *,
    columns: Sequence[str] = (),
) -> Generator[tuple[list[WideColumns], Iterator[Sequence[Any]]]]:
    """Give documents one by one with a value and a probability for each field.

    `fields` of the filter says which fields have columns. Its values and bounds hold of a
    document when one of these fields is answered so; `where` names fields of its own. The
    order `probability` is that of the least probable answer among the columns.

    Yields:
        What the fields' columns are called, and the rows: the values of `ITEM_TYPES`, then
        value and probability of each field, then those of the metadata `columns`.

    Raises:
        RunRefused: There is no such run.
        QueryRefused: The filter names what the run does not have, or the order is by
            something that a document has many of.
    """
    if page.order not in {"position", "probability"}:
        raise QueryRefused(
            "a row that is a document must be ordered by position or by its least probability, "
            f"got the order {page.order}",
            hint="leave out the order, or ask for an answer a row",
        )
    with reading(engine) as connection:
        run = require_run(connection, run_id)
        fields = fields_of_run(connection, run)
        require_among(only, fields)
        require_columns(connection, run, columns)
        if only.fields:
            fields = [field for field in fields if field.name in only.fields]
        named = wide_columns(fields, taken=list(ITEM_TYPES))
        statement = wide_statement(named).where(*document_conditions(run, only))
        position = _ITEM.c.position
        by: ColumnElement[Any] = position
        if page.order == "probability":
            by = least_probability([field.position for field in fields])
        # As with answers: equals stay in the order of the documents.
        statement = statement.order_by(by.desc() if page.descending else by, position)
        statement = statement.limit(page.limit).offset(page.offset)
        if columns:
            statement = statement.add_columns(METADATA)
            yield named, with_columns(streamed(connection, statement), columns)
        else:
            yield named, streamed(connection, statement)


def count_wide(engine: Engine, run_id: int | None = None, only: AnswerFilter = EVERY_ANSWER) -> int:
    """Count the documents that `reading_wide` gives.

    Raises:
        RunRefused: There is no such run.
        QueryRefused: The filter names what the run does not have.
    """
    with reading(engine) as connection:
        run = require_run(connection, run_id)
        require_known(connection, run, only)
        source = _ITEM.join(_RUN, _RUN.c.id == _ITEM.c.run_id)
        statement = select(func.count()).select_from(source).where(*document_conditions(run, only))
        return connection.execute(statement).scalar_one()


def answers_statement(
    run_id: int, only: AnswerFilter, page: AnswerPage
) -> Select[*tuple[Any, ...]]:
    """Select the answers of a run, with the columns of `ResultRow`."""
    place = (_ITEM.c.position, _ANSWER_P.c.field_position)
    by: dict[AnswerOrder, tuple[ColumnElement[Any], ...]] = {
        "position": place,
        "probability": (_ANSWER_P.c.probability, *place),
        "margin": (_ANSWER.c.margin, *place),
        "field": (_ANSWER_P.c.field_position, _ITEM.c.position),
    }
    first, *rest = by[page.order]
    indexed = page.order == "probability" and len(only.fields) == 1
    statement = results_statement(by_item=not indexed)
    statement = statement.where(*answer_conditions(run_id, only, indexed=indexed))
    # Only what was asked for is turned round: equals stay in the order of the documents.
    statement = statement.order_by(first.desc() if page.descending else first, *rest)
    return statement.limit(page.limit).offset(page.offset)


def count_statement(run_id: int, only: AnswerFilter) -> Select[*tuple[Any, ...]]:
    """Count the answers of a run."""
    # One field is found in the index on probabilities; else see `scaling_by_item`.
    indexed = len(only.fields) == 1
    source = _ITEM.join(_RUN, _RUN.c.id == _ITEM.c.run_id).join(
        _ANSWER_P,
        and_(
            _ANSWER_P.c.scaling_id == (_RUN.c.scaling_id if indexed else scaling_by_item()),
            _ANSWER_P.c.decision_id == _ITEM.c.decision_id,
        ),
    )
    if only.values or len(only.fields) > 1:
        # Joined only where it is asked for: it doubles the work.
        source = source.join(_ANSWER, same_answer())
    wanted = answer_conditions(run_id, only, indexed=indexed)
    return select(func.count()).select_from(source).where(*wanted)


def streamed(
    connection: Connection, statement: Select[*tuple[Any, ...]]
) -> Iterator[Sequence[Any]]:
    """Give rows one by one, in bounded memory."""
    found = connection.execution_options(yield_per=_FETCHED).execute(statement)
    for part in found.partitions():
        yield from part
