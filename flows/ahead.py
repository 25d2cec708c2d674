"""Scores a batch while the one before it is recorded and the one after it is planned.

The model needs the flow's thread for nothing, so another thread waits for it. Two batches
are in flight at most: one is scored, one waits to be scored or to be recorded. They are
recorded in the order they were planned, by the flow's thread. The texts of the one that waits
are made ready by a third thread, so that the model does not wait for tokens.
"""

import contextvars
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from weighbridge.scorer.results import Rejection, ScoreResult
from weighbridge.tasks.planning import Batch
from weighbridge.tasks.stopping import Stopped

OVERLAP = True
"""Whether a batch is scored while another is recorded: for measuring what that brings."""

PREPARED = True
"""Whether a batch that waits is made ready meanwhile: for measuring what that brings."""

Results = Sequence[ScoreResult | Rejection]

T = TypeVar("T")
"""What making a batch ready gives."""


@dataclass(frozen=True)
class Scored:
    """A scored batch, and when by `time.perf_counter` scoring it began and ended."""

    results: Results = ()
    began: float = 0.0
    ended: float = 0.0


def score_ahead(
    batches: Iterable[Batch],
    prepare: Callable[[Batch], T],
    score: Callable[[Batch, T | None], Results],
    record: Callable[[Batch, Callable[[], Scored]], None],
) -> None:
    """Score batches one after the other, and record each while the next one is scored.

    A run that is stopped records what is in flight first: it has been paid for. When
    something fails it is not recorded, but its scoring has ended before this returns.

    Args:
        batches: As planned with `ahead`; raises `Stopped` where the run should end.
        prepare: Makes a batch ready to be scored; called in a thread of its own, and has ended
            before its scoring begins.
        score: Scores the texts of a batch, given what `prepare` returned, or None where that is
            switched off; called in another thread of its own, in this context.
        record: Called in this thread, in order, with a batch and what waits for its results.
    """
    held: tuple[Batch, Callable[[], Scored]] | None = None
    with _threads(prepare, score) as start:
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
                coming = start(batch)
            if held is not None:
                record(*held)
            held = (batch, coming) if len(batch) else None
            if held is not None and not OVERLAP:
                record(*held)
                held = None
        if held is not None:
            record(*held)


@contextmanager
def _threads(
    prepare: Callable[[Batch], T], score: Callable[[Batch, T | None], Results]
) -> Generator[Callable[[Batch], Callable[[], Scored]]]:
    scoring = ThreadPoolExecutor(1, thread_name_prefix="weighbridge-scoring")
    preparing = ThreadPoolExecutor(1, thread_name_prefix="weighbridge-preparing")

    def start(batch: Batch) -> Callable[[], Scored]:
        ready = preparing.submit(prepare, batch) if OVERLAP and PREPARED else None

        def timed() -> Scored:
            began = time.perf_counter()
            results = score(batch, None if ready is None else ready.result())
            return Scored(results, began, time.perf_counter())

        # Prefect knows by the context which flow run a task belongs to.
        coming: Future[Scored] = scoring.submit(contextvars.copy_context().run, timed)
        return coming.result

    try:
        yield start
    finally:
        # In this order: what is scored may still wait for what is prepared.
        scoring.shutdown(wait=True, cancel_futures=True)
        preparing.shutdown(wait=True, cancel_futures=True)
