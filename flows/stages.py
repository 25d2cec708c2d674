"""Where the time of a run goes: stages that add up to all of it."""

import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Literal, TypeVar

from weighbridge.scorer.results import Rejection, ScoreResult

Stage = Literal[
    "preparing",
    "reading",
    "planning",
    "loading",
    "prefill",
    "branch",
    "other scoring",
    "recording",
    "telling",
    "finishing",
]

STAGES: dict[Stage, str] = {
    "preparing": "preparing: schema, checkpoint, store",
    "reading": "reading documents",
    "planning": "planning: what is decided already, claims",
    "loading": "loading the model",
    "prefill": "prefill: reading questions and documents",
    "branch": "branch: weighing the choices",
    "other scoring": "the rest of scoring: label prior, tokens",
    "recording": "recording",
    "telling": "telling Prefect how far it is",
    "finishing": "finishing: closing the run, output",
}
"""The stages in the order in which a run comes to them, and what people call them."""

READ_TOGETHER = 64
"""Records that are read between two looks at the clock."""

T = TypeVar("T")
_Span = tuple[float, float, Stage]


class Stages:
    """Counts the seconds of a run by stage, from the moment this is made.

    The flow's thread is in one stage at a time, and while a batch is scored by another
    thread that is what the run's time goes into: what the flow does meanwhile is hidden
    behind it and costs nothing. So the stages always add up to the time that has gone by.

    Args:
        clock: Seconds that never go back.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._stage: Stage = "preparing"
        self._since = clock()
        # What may yet turn out to have been hidden behind scoring.
        self._spans: list[_Span] = []
        self._seconds: dict[Stage, float] = dict.fromkeys(STAGES, 0.0)
        self.hidden: dict[Stage, float] = dict.fromkeys(STAGES, 0.0)

    def enter(self, stage: Stage) -> Stage:
        """Let the flow's thread be in a stage from now on; return the one it leaves."""
        left, now = self._stage, self._clock()
        self._seconds[left] += now - self._since
        self._spans.append((self._since, now, left))
        self._stage, self._since = stage, now
        return left

    @contextmanager
    def at(self, stage: Stage) -> Generator[None]:
        """Be in a stage within this block."""
        left = self.enter(stage)
        try:
            yield
        finally:
            self.enter(left)

    def each(self, stage: Stage, values: Iterable[T], together: int = 1) -> Iterator[T]:
        """Give one value after the other; getting at them is of a stage.

        Args:
            stage: The stage.
            values: What to give.
            together: How many are taken before the first of them is given.
        """
        source = iter(values)
        while True:
            with self.at(stage):
                taken = list(islice(source, together))
            if not taken:
                return
            yield from taken

    def scored(
        self,
        began: float,
        ended: float,
        results: Iterable[ScoreResult | Rejection],
        loading: float = 0.0,
    ) -> None:
        """Take note of a batch that was scored, after those before it.

        Args:
            began: When its scoring began, by the clock.
            ended: When it ended, not later than now.
            results: What came out of it.
            loading: Seconds of it that loading the model took.
        """
        self.enter(self._stage)
        for start, end, stage in self._spans:
            overlap = min(end, ended) - max(start, began)
            if overlap > 0:
                self._seconds[stage] -= overlap
                if stage != "other scoring":
                    self.hidden[stage] += overlap
        # Batches are scored in turn: nothing of the next one lies before the end of this.
        self._spans = [span for span in self._spans if span[1] > ended]
        timings = [each.timings for each in results if isinstance(each, ScoreResult)]
        parts: dict[Stage, float] = {
            "loading": loading,
            "prefill": sum(each.prefill_seconds for each in timings),
            "branch": sum(each.branch_seconds for each in timings),
        }
        for stage, seconds in parts.items():
            self._seconds[stage] += seconds
        self._seconds["other scoring"] += ended - began - sum(parts.values())

    def seconds(self) -> dict[Stage, float]:
        """Return the seconds of each stage until now; they add up to all that has gone by."""
        self.enter(self._stage)
        return dict(self._seconds)

    def __str__(self) -> str:
        """Return the stages that took any time, in a line."""
        parts = [
            f"{stage} {seconds:,.2f} s"
            + (f" (and {hidden:,.2f} s while scoring)" if hidden >= 0.005 else "")
            for stage, seconds in self.seconds().items()
            if seconds >= 0.005 or self.hidden[stage] >= 0.005
            for hidden in (self.hidden[stage],)
        ]
        return ", ".join(parts)
