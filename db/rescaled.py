"""Answers at another temperature than their run's, from the recorded logits."""

import math
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, Final

from sqlalchemy import Connection, Engine, select

from weighbridge.db import tables
from weighbridge.db.answers import (
    RESULT_TYPES,
    WHOLE,
    AnswerPage,
    answers_statement,
    streamed,
)
from weighbridge.db.engine import reading
from weighbridge.db.errors import QueryRefused
from weighbridge.db.filters import EVERY_ANSWER, AnswerFilter, require_known
from weighbridge.db.metadata import METADATA, require_columns, with_columns
from weighbridge.db.probabilities import CHUNK, softmax
from weighbridge.db.run_queries import require_run

_ANSWER = tables.table(tables.Answer)
_CHOICE = tables.table(tables.AnswerChoice)
_PLACES: Final = {
    name: list(RESULT_TYPES).index(name)
    for name in ("kind", "probability", "expected_value", "temperature")
}


@contextmanager
def reading_rescaled(
    engine: Engine,
    run_id: int | None = None,
    only: AnswerFilter = EVERY_ANSWER,
    page: AnswerPage = WHOLE,
    *,
    temperature: float,
    columns: Sequence[str] = (),
) -> Generator[Iterator[Sequence[Any]]]:
    """Give answers as `reading_answers` does, with probabilities at another temperature.

    A temperature changes no answer and no margin, so both may be filtered and ordered by.

    Raises:
        RunRefused: There is no such run.
        QueryRefused: The temperature is not one, or the filter or order is by probability.
    """
    if not (math.isfinite(temperature) and temperature > 0):
        raise QueryRefused(
            f"a temperature must be finite and above 0, got {temperature}",
            hint="1.0 leaves the logits as they are",
        )
    bounds = (only.min_probability, only.max_probability)
    if page.order == "probability" or any(bound is not None for bound in bounds):
        raise QueryRefused(
            "answers at another temperature must be neither chosen nor sorted by probability: "
            "what is kept is the probability at the run's own temperature",
            hint="sort by margin, which no temperature changes; or filter the file",
        )
    with reading(engine) as connection:
        run = require_run(connection, run_id)
        require_known(connection, run, only)
        require_columns(connection, run, columns)
        key = (METADATA, _ANSWER.c.decision_id, _ANSWER.c.field_position, _ANSWER.c.selected)
        statement = answers_statement(run, only, page).add_columns(*key)
        rows = streamed(connection, statement)
        # The logits are read on a connection of their own while the rows come.
        with reading(engine) as logits:
            yield with_columns(_rescaled(logits, rows, temperature), columns)


def _rescaled(
    connection: Connection, rows: Iterator[Sequence[Any]], temperature: float
) -> Iterator[Sequence[Any]]:
    while part := list(islice(rows, CHUNK)):
        logits: dict[tuple[int, int], list[float]] = {}
        statement = (
            select(_CHOICE.c.decision_id, _CHOICE.c.field_position, _CHOICE.c.logit)
            .where(_CHOICE.c.decision_id.in_({row[-3] for row in part}))
            .order_by(_CHOICE.c.decision_id, _CHOICE.c.field_position, _CHOICE.c.choice_position)
        )
        for decision_id, field_position, logit in connection.execute(statement):
            logits.setdefault((decision_id, field_position), []).append(logit)
        for row in part:
            *values, metadata, decision_id, field_position, selected = row
            kept = logits.get((decision_id, field_position))
            if kept is None:
                raise QueryRefused(
                    "answers must stay while they are read, and some were removed meanwhile",
                    hint="ask again",
                )
            found = softmax(kept, temperature)
            values[_PLACES["probability"]] = found[selected]
            values[_PLACES["temperature"]] = temperature
            if values[_PLACES["kind"]] == "score":
                expected = math.fsum(place * each for place, each in enumerate(found))
                values[_PLACES["expected_value"]] = expected
            yield [*values, metadata]
