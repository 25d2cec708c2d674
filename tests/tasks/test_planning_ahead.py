"""Plans that run one batch ahead of what is recorded, on a real store."""

from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.tasks.planned_runs import a_key, as_records, begin, decide, positions, record

from weighbridge.db import (
    Store,
)
from weighbridge.tasks import planning
from weighbridge.tasks.planning import Batch, BatchSizer, plan_batches


def recorded_one_behind(store: Store, run_id: int, batches: Iterator[Batch]) -> list[Batch]:
    """Record each batch when the next one has been given, as a flow that scores ahead does."""
    given: list[Batch] = []
    held: Batch | None = None
    for batch in batches:
        if held is not None:
            record(store, run_id, held)
        held = batch
        given.append(batch)
    if held is not None:
        record(store, run_id, held)
    return given


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    texts=st.lists(st.none() | st.sampled_from("abcdefgh"), max_size=40),
    decided=st.sets(st.sampled_from("abcdefgh")),
    size=st.integers(1, 6),
    window=st.integers(1, 9),
    most_free=st.integers(1, 12),
)
def test_a_batch_ahead_scores_no_text_twice(
    store: Store,
    texts: list[str | None],
    decided: set[str],
    size: int,
    window: int,
    most_free: int,
):
    key = a_key()
    decide(store, key, sorted(decided))
    run_id = begin(store, key)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "WINDOW", window)
        patch.setattr(planning, "MAX_FREE", most_free)
        plan = plan_batches(store, run_id, as_records(texts), BatchSizer(size), ahead=True)
        batches = recorded_one_behind(store, run_id, plan)
    assert sorted(positions(batches)) == list(range(len(texts)))
    scored = [each.text for batch in batches for each in batch.to_score]
    assert sorted(scored) == sorted({text for text in texts if text} - decided)
    summary = store.finish_run(run_id, "completed", documents=len(texts))
    assert (summary.scored, summary.wasted) == (len(scored), 0)


def test_two_runs_that_score_ahead_do_not_wait_for_each_other_for_ever(
    store: Store, waits: list[Callable[[], None]]
):
    key = a_key()
    one, two = begin(store, key), begin(store, key)
    first = plan_batches(store, one, as_records(["a", "b"]), BatchSizer(1), ahead=True)
    second = plan_batches(store, two, as_records(["b", "a"]), BatchSizer(1), ahead=True)
    mine, theirs = next(first), next(second)
    # Each now wants the text that the other has in flight: it asks to record its own first.
    assert (len(next(first)), len(next(second))) == (0, 0)
    record(store, one, mine)
    record(store, two, theirs)
    waits += [lambda: None, lambda: None]
    for run_id, plan in ((one, first), (two, second)):
        (rest,) = recorded_one_behind(store, run_id, plan)
        assert (rest.to_score, len(rest.decided)) == ((), 1)
        assert store.finish_run(run_id, "completed", documents=2).wasted == 0
