"""Probabilities, derived from the recorded logits and kept per distinct scaling."""

import math
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from sqlalchemy import Connection, select

from weighbridge.db import tables
from weighbridge.db.bulk import insert_rows

_ANSWER = tables.table(tables.Answer)
_CHOICE = tables.table(tables.AnswerChoice)
_ANSWER_P = tables.table(tables.AnswerProbability)
_CHOICE_P = tables.table(tables.ChoiceProbability)
# Below the 999 parameters that older SQLite builds allow in one statement.
CHUNK = 500


def softmax(logits: Sequence[float], temperature: float) -> list[float]:
    """Turn logits, divided by the temperature, into float64 probabilities.

    The largest logit is subtracted first, so no exponential overflows. Written out here,
    in the standard library alone, because the store derives probabilities without a
    scorer; the scorer's own softmax is the same function of the same logits.

    Args:
        logits: Finite logits, at least one.
        temperature: Finite and above 0.
    """
    top = max(logits)
    weights = [math.exp((logit - top) / temperature) for logit in logits]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


class ProbabilityRows:
    """Collects the rows of many answers at one scaling, to write them at once."""

    def __init__(self, scaling_id: int, temperature: float) -> None:
        self._scaling_id = scaling_id
        self._temperature = temperature
        self._answers: list[dict[str, Any]] = []
        self._choices: list[dict[str, Any]] = []

    def add(
        self,
        decision_id: int,
        field_position: int,
        field: str,
        kind: str,
        selected: int,
        logits: Sequence[float],
    ) -> None:
        """Add one answer; score fields also get their expected value, sum of i * p_i from 0."""
        probabilities = softmax(logits, self._temperature)
        expected = (
            math.fsum(i * p for i, p in enumerate(probabilities)) if kind == "score" else None
        )
        key = {
            "scaling_id": self._scaling_id,
            "decision_id": decision_id,
            "field_position": field_position,
        }
        self._answers.append(
            {
                **key,
                "field": field,
                "probability": probabilities[selected],
                "expected_value": expected,
            }
        )
        self._choices += [
            {**key, "choice_position": position, "probability": probability}
            for position, probability in enumerate(probabilities)
        ]

    def write(self, connection: Connection) -> None:
        """Insert what was collected."""
        insert_rows(connection, _ANSWER_P, self._answers)
        insert_rows(connection, _CHOICE_P, self._choices)


def materialise(
    connection: Connection, decision_ids: Iterable[int], scaling_id: int, temperature: float
) -> None:
    """Compute, from the logits, what the decisions lack at a scaling."""
    wanted = sorted(set(decision_ids))
    rows = ProbabilityRows(scaling_id, temperature)
    for start in range(0, len(wanted), CHUNK):
        chunk = wanted[start : start + CHUNK]
        present = connection.execute(
            select(_ANSWER_P.c.decision_id)
            .where(_ANSWER_P.c.scaling_id == scaling_id, _ANSWER_P.c.decision_id.in_(chunk))
            .distinct()
        ).scalars()
        missing = sorted(set(chunk).difference(present))
        if missing:
            _add_from_logits(connection, missing, rows)
    rows.write(connection)


def _add_from_logits(
    connection: Connection, decision_ids: Sequence[int], rows: ProbabilityRows
) -> None:
    key = (_ANSWER.c.decision_id, _ANSWER.c.field_position)
    statement = (
        select(*key, _ANSWER.c.field, _ANSWER.c.kind, _ANSWER.c.selected, _CHOICE.c.logit)
        .join(
            _CHOICE,
            (_CHOICE.c.decision_id == key[0]) & (_CHOICE.c.field_position == key[1]),
        )
        .where(key[0].in_(decision_ids))
        .order_by(*key, _CHOICE.c.choice_position)
    )
    for answer, choices in groupby(connection.execute(statement), key=lambda row: tuple(row)[:5]):
        rows.add(*answer, logits=[choice[5] for choice in choices])
