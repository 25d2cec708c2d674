"""Scores a batch while the one before it is recorded and the one after it is planned.

The model needs the flow's thread for nothing, so another thread waits for it. Two batches
are in flight at most: one is scored, one waits to be scored or to be recorded. They are
recorded in the order they were planned, by the flow's thread.
"""

import contextvars
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from weighbridge.scorer.results import Rejection, ScoreResult
from weighbridge.tasks.planning import Batch
from weighbridge.tasks.stopping import Stopped

OVERLAP = True
"""Whether a batch is scored while another is recorded: for measuring what that brings."""

Results = Sequence[ScoreResult | Rejection]


@dataclass(frozen=True)
class Scored:
    """A scored batch, and when by `time.perf_counter` scoring it began and ended."""

    results: Results = ()
    began: float = 0.0
    ended: float = 0.0


def score_ahead(
    batches: Iterable[Batch],
    score: Callable[[Batch], Results],
    record: Callable[[Batch, Callable[[], Scored]], None],
) -> None:
    """Score batches one after the other, and record each while the next one is scored.

    A run that is stopped records what is in flight first: it has been paid for. When
    something fails it is not recorded, but its scoring has ended before this returns.

    Args:
        batches: As planned with `ahead`; raises `Stopped` where the run should end.
        score: Scores the texts of a batch; called in a thread of its own, in this context.
        record: Called in this thread, in order, with a batch and what waits for its results.
    """
    held: tuple[Batch, Callable[[], Scored]] | None = None
    with _scoring_thread() as start:
        planned = iter(batches)
        while True:
            try:
                batch = next(planned, None)
            except Stopped:
                if held is not None:
                    record(*held)
                raise
            if batch is None:
                break
            coming: Callable[[], Scored] = Scored
            if batch.texts:
                coming = start(batch, score)
            if held is not None:
                record(*held)
            held = (batch, coming) if len(batch) else None
            if held is not None and not OVERLAP:
                record(*held)
                held = None
        if held is not None:
            record(*held)


_Start = Callable[[Batch, Callable[[Batch], Results]], Callable[[], Scored]]


@contextmanager
def _scoring_thread() -> Generator[_Start]:
    thread = ThreadPoolExecutor(1, thread_name_prefix="weighbridge-scoring")

    def start(batch: Batch, score: Callable[[Batch], Results]) -> Callable[[], Scored]:
        def timed() -> Scored:
            began = time.perf_counter()
            results = score(batch)
            return Scored(results, began, time.perf_counter())

        # Prefect knows by the context which flow run a task belongs to.
        coming: Future[Scored] = thread.submit(contextvars.copy_context().run, timed)
        return coming.result

    try:
        yield start
    finally:
        thread.shutdown(wait=True, cancel_futures=True)
