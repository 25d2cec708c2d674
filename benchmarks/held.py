"""What a process holds while it scores documents of every length, and whether that grows."""

import math
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from weighbridge.scorer.backend import on_mlx_thread
from weighbridge.scorer.parallel_scorer import ParallelScorer
from weighbridge.scorer.results import Rejection, ScoreResult

MIB = 2**20
BATCH, SAMPLES = 10, 40
BOUNDS = {"rest": 4 * MIB, "active": MIB}
"""Growth that is called none. Of `rest` it is some 1 KiB for each of 4,000 documents: less
than a prompt or a result that is kept."""

_WORDS = (
    *("the", "invoice", "parcel", "server", "was", "charged", "twice", "late", "down", "again"),
    *("please", "refund", "my", "account", "login", "urgent", "Straße", "naïve", "日本", "42"),
)


class Sample(NamedTuple):
    """What a process held at some point, in bytes.

    Attributes:
        documents: Documents scored by then.
        resident: Resident set of the process.
        active: What MLX had in use, weights and resident prefixes included.
        cached: Freed buffers that MLX kept for later arrays: bounded, and may fill for long.
        peak: Most that MLX had in use at once since the last sample.
    """

    documents: int
    resident: int
    active: int
    cached: int
    peak: int = 0

    @property
    def rest(self) -> int:
        """What is not MLX's: Python's objects, the tokenizer, and what allocators keep."""
        return self.resident - self.active - self.cached


class Verdict(NamedTuple):
    """Whether a figure stays as it is behind the first quarter of a run.

    Attributes:
        trend: Bytes that the steady line through the rest gains from its begin to its end.
        step: Bytes from the median of the second quarter to that of the last one.
        bound: The most that each of them may be.
    """

    trend: float
    step: float
    bound: int

    @property
    def flat(self) -> bool:
        """Whether nothing grows beyond the bound."""
        return max(self.trend, self.step) <= self.bound


def resident_bytes() -> int:
    """Return the resident set of this process."""
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    told = subprocess.run(
        ["ps", "-o", "rss=", "-p", str(os.getpid())], capture_output=True, text=True, check=True
    )
    return int(told.stdout) * 1024


def sample(documents: int, peak: int = 0) -> Sample:
    """Look at this process. Call on the MLX thread."""
    import mlx.core as mx  # noqa: PLC0415 - BLAS comes first

    held = mx.get_active_memory(), mx.get_cache_memory()
    return Sample(documents, resident_bytes(), *held, peak)


def texts(count: int, shortest: int, longest: int) -> Iterator[str]:
    """Make up distinct documents of log-uniform length, in words: about as many tokens."""
    chance = random.Random(11)
    for number in range(count):
        words = round(math.exp(chance.uniform(math.log(shortest), math.log(longest))))
        yield " ".join([*chance.choices(_WORDS, k=words - 1), str(number)])


class Watch:
    """Looks at this process now and then while documents are scored.

    Args:
        count: How many documents there are.

    Attributes:
        samples: What it saw, some 40 samples in all.
    """

    def __init__(self, count: int) -> None:
        self.samples: list[Sample] = []
        self._count = count
        self._done = self._peak = 0

    def scored(self, results: Iterable[ScoreResult | Rejection]) -> None:
        """Take note of the results of a batch, which may be empty."""
        for result in results:
            self._done += 1
            if isinstance(result, ScoreResult):
                self._peak = max(self._peak, result.timings.peak_bytes)
        if self._done * SAMPLES >= self._count * (len(self.samples) + 1):
            self.samples.append(on_mlx_thread(sample, self._done, self._peak))
            self._peak = 0


@contextmanager
def watching(count: int) -> Iterator[list[Sample]]:
    """Look at this process while anything in it scores documents; for use in one thread.

    Yields:
        The samples, which come in by and by.
    """
    plain, watch = ParallelScorer.score_prepared, Watch(count)

    def score_prepared(
        self: ParallelScorer, *given: Any, **named: Any
    ) -> list[ScoreResult | Rejection]:
        results = plain(self, *given, **named)
        watch.scored(results)
        return results

    setattr(ParallelScorer, "score_prepared", score_prepared)  # noqa: B010 - or its type would not fit
    try:
        yield watch.samples
    finally:
        setattr(ParallelScorer, "score_prepared", plain)  # noqa: B010


def watched(
    score: Callable[[list[str]], Iterable[ScoreResult | Rejection]],
    documents: Iterator[str],
    count: int,
) -> list[Sample]:
    """Score documents, a batch after the other, and look at this process now and then.

    Args:
        score: `score_batch` of a scorer.
        documents: What is scored.
        count: How many there are.
    """
    watch = Watch(count)
    while batch := list(islice(documents, BATCH)):
        results = list(score(batch))
        for result in results:
            if isinstance(result, Rejection):
                raise SystemExit(f"every document must be scored, got {result.message}")
        watch.scored(results)
    return watch.samples


def verdict(samples: Sequence[Sample], figure: str, bound: int) -> Verdict:
    """Judge one figure of samples that are evenly spread over a run.

    The first quarter is for warming up: buffers, caches and pools fill.

    Args:
        samples: At least 8, in their order.
        figure: An attribute of `Sample`.
        bound: Most bytes of growth that are called none.
    """
    if len(samples) < 8:
        raise ValueError(f"at least 8 samples are needed, got {len(samples)}")
    values = [getattr(each, figure) for each in samples]
    quarter = len(values) // 4
    rest = values[quarter:]
    slope = statistics.linear_regression(range(len(rest)), rest).slope
    second, last = values[quarter : 2 * quarter], values[-quarter:]
    return Verdict(
        slope * (len(rest) - 1), statistics.median(last) - statistics.median(second), bound
    )


def judged(samples: Sequence[Sample], bounds: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    """Judge the figures that have a bound; in MiB, for people and JSON."""
    found: dict[str, dict[str, Any]] = {}
    for figure, bound in bounds.items():
        told = verdict(samples, figure, bound)
        values = [getattr(each, figure) for each in samples]
        found[figure] = {
            "first_mib": round(values[0] / MIB, 2),
            "last_mib": round(values[-1] / MIB, 2),
            "most_mib": round(max(values) / MIB, 2),
            "trend_mib": round(told.trend / MIB, 2),
            "step_mib": round(told.step / MIB, 2),
            "bound_mib": round(bound / MIB, 2),
            "flat": told.flat,
        }
    return found
