"""Contests of ways to score: everyone takes turns, medians, ratios, and equal answers.

A contest is decided on process CPU seconds, since machines are shared; wall seconds stand
beside them. In each round every contender has its turn once, and the first one is another
each time, so that a slow minute hits all of them.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from weighbridge.scorer.rows import Row, Timings

LIMITS = {"float64": 1e-4, "float32": 1e-4, "float16": 0.03, "bfloat16": 0.03}
"""Most that a probability may differ, by compute dtype."""


@dataclass(frozen=True, slots=True)
class Document:
    """The prompts of one document.

    Attributes:
        rows: One for each field.
        resident_tokens: Leading tokens that it shares with the other documents.
    """

    rows: "tuple[Row, ...]"
    resident_tokens: int = 0


Score = Callable[[Sequence[Document]], "list[tuple[list[Any], Timings]]"]
"""Scores documents: for each the logits of its rows, and what it took."""


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to score.

    Attributes:
        name: What it is called in the contest.
        score: How it scores.
        documents: What it scores in one turn. The answers of two contenders to documents at
            the same place are compared, as far as both have them.
        over: Contenders over which its ratio is told.
        like: Contender whose answers its own must equal.
        one_field: Score one field of each document, another one each round, and count it for
            all fields: what fields on their own take is just the sum.
        warm: Score the first document once before the clock runs.
        prefix_tokens: Tokens that its prompts share, where not those of the contest.
    """

    name: str
    score: Score
    documents: Sequence[Document]
    over: tuple[str, ...]
    like: str
    one_field: bool = False
    warm: bool = False
    prefix_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Contest:
    """What contenders do, by turns.

    Attributes:
        name: Of the contest.
        prefix_tokens: Tokens that the prompts of a document share.
        contenders: In the order of their rows.
    """

    name: str
    prefix_tokens: int
    contenders: tuple[Contender, ...]


@dataclass(slots=True)
class _Taken:
    """What a contender took, by turn, for one document."""

    cpu: list[float] = field(default_factory=list[float])
    wall: list[float] = field(default_factory=list[float])
    peak_bytes: int = 0
    extra_bytes: int = 0
    answers: dict[tuple[int, int], Any] = field(default_factory=dict[tuple[int, int], Any])


def measure(
    contest: Contest, *, model: str, repeats: int, limit: float, seconds: float = math.inf
) -> list[dict[str, Any]]:
    """Hold a contest. Call on the MLX thread.

    Args:
        contest: Who scores what.
        model: Name of the model, for the rows.
        repeats: Rounds, at most.
        limit: Most that a probability may differ from the contender's `like`. Two choices
            closer than that may change places.
        seconds: Once its rounds have taken as long, no further one begins.

    Returns:
        A row for each contender and each of those it is compared with in `over`: see
        `weighbridge bench --json`.
    """
    taken = {each.name: _Taken() for each in contest.contenders}
    for each in contest.contenders:
        if each.warm:
            each.score(each.documents[:1])
    start, runs = time.perf_counter(), 0
    while not runs or (runs < repeats and time.perf_counter() - start < seconds):
        turn, runs = runs, runs + 1
        first = turn % len(contest.contenders)
        for each in (*contest.contenders[first:], *contest.contenders[:first]):
            _take_turn(each, turn, taken[each.name])
    rows: list[dict[str, Any]] = []
    for each in contest.contenders:
        own = taken[each.name]
        differs, apart = compare(taken[each.like].answers, own.answers, limit)
        row: dict[str, Any] = {
            "name": f"{model} {contest.name} {each.name}",
            "seconds": statistics.median(own.cpu),
            "wall_seconds": statistics.median(own.wall),
            "runs": runs,
            "prefix_tokens": each.prefix_tokens or contest.prefix_tokens,
            "peak_bytes": own.peak_bytes,
            "labels_match": not differs,
            "max_probability_difference": apart,
            "model": model,
            "scenario": contest.name,
            "contender": each.name,
            "like": each.like,
            "extra_bytes": own.extra_bytes,
        }
        # Of the medians: what a reader gets who divides one row by another.
        rows += [
            {
                **row,
                "baseline": other,
                "ratio": statistics.median(taken[other].cpu) / row["seconds"],
            }
            for other in each.over
        ]
    return rows


def _take_turn(contender: Contender, turn: int, taken: _Taken) -> None:
    documents, places = list(contender.documents), range(len(contender.documents[0].rows))
    if contender.one_field:
        places = [turn % len(documents[0].rows)]
        documents = [Document((each.rows[places[0]],), each.resident_tokens) for each in documents]
    fields = len(contender.documents[0].rows) / len(places)
    wall, cpu = time.perf_counter(), time.process_time()
    found = contender.score(documents)
    taken.cpu.append((time.process_time() - cpu) / len(documents) * fields)
    taken.wall.append((time.perf_counter() - wall) / len(documents) * fields)
    for number, (logits, timings) in enumerate(found):
        taken.peak_bytes = max(taken.peak_bytes, timings.peak_bytes)
        taken.extra_bytes = max(taken.extra_bytes, timings.peak_bytes - timings.start_bytes)
        for place, each in zip(places, logits, strict=True):
            taken.answers[number, place] = probabilities(each)


def probabilities(logits: Any) -> Any:
    """Return softmax of the logits of a row, (K,), in float64."""
    exact = np.asarray(logits, np.float64)
    weights = np.exp(exact - exact.max())
    return weights / weights.sum()


def compare(
    reference: dict[tuple[int, int], Any], own: dict[tuple[int, int], Any], limit: float
) -> tuple[bool, float | None]:
    """Compare the answers that two contenders both have.

    Returns:
        Whether they differ, and the largest difference of a probability; None where some
        are not numbers, or nothing can be compared.
    """
    both = reference.keys() & own.keys()
    if not both:
        return True, None
    differs, worst = False, 0.0
    for key in both:
        one, other = reference[key], own[key]
        apart = float(np.abs(one - other).max())
        if not np.isfinite(apart):
            return True, None
        worst = max(worst, apart)
        # Its choice must be the reference's, or as good as that.
        differs |= bool(one.max() - one[int(other.argmax())] > limit)
    return differs, worst


def passes(row: dict[str, Any], limit: float) -> bool:
    """Whether a row's answers are those they must be."""
    apart = row["max_probability_difference"]
    return row["labels_match"] and apart is not None and apart <= limit
