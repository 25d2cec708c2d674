"""Plans on a real store: every record once, every text scored once, whatever comes."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine
from tests.tasks.planned_runs import (
    a_key,
    as_records,
    begin,
    decide,
    document,
    positions,
    record,
)

from weighbridge.db import (
    RecordRefused,
    Store,
    open_engine,
    run_summary,
    sqlite_url,
)
from weighbridge.tasks import planning
from weighbridge.tasks.planning import Batch, BatchSizer, plan_batches, text_sha256
from weighbridge.tasks.sources import Document


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    texts=st.lists(st.none() | st.sampled_from("abcdefgh"), max_size=40),
    decided=st.sets(st.sampled_from("abcdefgh")),
    size=st.integers(1, 6),
    window=st.integers(1, 9),
    most_free=st.integers(1, 12),
    interrupted_after=st.integers(0, 4),
)
def test_every_record_once_and_every_text_scored_once(
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    texts: list[str | None],
    decided: set[str],
    size: int,
    window: int,
    most_free: int,
    interrupted_after: int,
):
    monkeypatch.setattr(planning, "WINDOW", window)
    monkeypatch.setattr(planning, "MAX_FREE", most_free)
    key = a_key()
    decide(store, key, sorted(decided))
    run_id = begin(store, key, flow_run_id=key)
    records = as_records(texts)

    batches: list[Batch] = []
    for batch in plan_batches(store, run_id, records, BatchSizer(size)):
        if len(batches) == interrupted_after:
            break  # this batch is planned and claimed, and never recorded
        batches.append(batch)
        record(store, run_id, batch)
    # A retry of the same flow run goes on where it stopped.
    assert begin(store, key, flow_run_id=key) == run_id
    for batch in plan_batches(store, run_id, records, BatchSizer(size)):
        batches.append(batch)
        record(store, run_id, batch)

    assert sorted(positions(batches)) == list(range(len(texts)))
    scored = [each.text for batch in batches for each in batch.to_score]
    assert sorted(scored) == sorted({text for text in texts if text} - decided)
    assert all(len(batch.to_score) <= size for batch in batches)
    # What waits without need of the model is bounded: a window may come on top.
    assert all(len(batch.decided) + len(batch.bad) <= most_free + window for batch in batches)
    summary = store.finish_run(run_id, "completed", documents=len(texts))
    assert (summary.scored, summary.rejected) == (len(scored), texts.count(None))
    assert summary.wasted == 0


def interrupted(store: Store, texts: Sequence[str | None]) -> int:
    """Record all texts in a run that is not finished; return it as its retry continues it."""
    key = a_key()
    run_id = begin(store, key, flow_run_id=key)
    for batch in plan_batches(store, run_id, as_records(texts), BatchSizer(8)):
        record(store, run_id, batch)
    assert begin(store, key, flow_run_id=key) == run_id
    return run_id


@pytest.mark.parametrize(
    ("edited", "position"),
    [
        (["a", "X", None, "a"], 1),
        (["new", "a", "b", None, "a"], 0),  # a line put before the others
        (["b", None, "a"], 0),  # the first line removed
        (["a", "b", "c", "a"], 2),  # a bad record mended
        ([None, "b", None, "a"], 0),  # a document broken
        (["a", "b", None, "b"], 3),  # another text that the store knows well
    ],
)
def test_a_retry_notices_that_its_source_was_edited(
    store: Store, edited: list[str | None], position: int
):
    run_id = interrupted(store, ["a", "b", None, "a"])
    # Skipped by its position alone, the new text would never be scored, and nobody would know.
    with pytest.raises(RecordRefused, match=f"at position {position}, got another") as caught:
        list(plan_batches(store, run_id, as_records(edited), BatchSizer(8)))
    assert "new run" in (caught.value.hint or "")
    assert "X" not in caught.value.message


def test_a_retry_goes_on_with_what_was_added_at_the_end(store: Store):
    # Nothing that is recorded has changed, so nothing is lost; the same holds for a retry
    # whose run had not come to the end.
    run_id = interrupted(store, ["a", None])
    records = as_records(["a", None, "b"])
    (batch,) = plan_batches(store, run_id, records, BatchSizer(8))
    assert batch.texts == ("b",)
    record(store, run_id, batch)
    assert store.finish_run(run_id, "completed", documents=3).documents == 3


def test_a_retry_of_a_file_that_was_edited(store: Store, tmp_path: Path):
    from weighbridge.tasks.sources import read_documents

    path = tmp_path / "tickets.jsonl"
    path.write_text('{"text": "one"}\n{"text": " "}\n{"text": "two"}\n')
    key = a_key()
    run_id = begin(store, key, flow_run_id=key)
    first = next(plan_batches(store, run_id, read_documents(path), BatchSizer(1)))
    record(store, run_id, first)
    assert begin(store, key, flow_run_id=key) == run_id
    # As it was, it goes on; only "one" and the blank record are there.
    assert store.recorded_positions(run_id) == {0: text_sha256("one"), 1: None}
    path.write_text('{"text": "One"}\n{"text": " "}\n{"text": "two"}\n')
    with pytest.raises(RecordRefused, match="line 1 of the source"):
        list(plan_batches(store, run_id, read_documents(path), BatchSizer(1)))
    path.write_text('{"text": "one"}\n{"text": " "}\n{"text": "two"}\n')
    (rest,) = plan_batches(store, run_id, read_documents(path), BatchSizer(1))
    assert rest.texts == ("two",)


def test_a_text_already_waiting_does_not_pile_up(store: Store):
    # One text 5,000 times: held back until its batch is full, it would fill the memory.
    run_id = begin(store, a_key())
    records = (document(position, "same") for position in range(5000))
    batches: list[Batch] = []
    for batch in plan_batches(store, run_id, records, BatchSizer(8)):
        batches.append(batch)
        record(store, run_id, batch)
    assert [each.text for batch in batches for each in batch.to_score] == ["same"]
    assert max(map(len, batches)) <= planning.MAX_FREE + planning.WINDOW
    assert store.finish_run(run_id, "completed", documents=5000).reused == 4999


def test_what_another_run_is_scoring_is_waited_for_and_reused(
    store: Store, waits: list[Callable[[], None]], caplog: pytest.LogCaptureFixture
):
    caplog.set_level("INFO")
    key = a_key()
    other, run_id = begin(store, key), begin(store, key)
    assert store.claim(other, [text_sha256("b")])
    waits += [
        lambda: None,  # the other run is still at it
        lambda: None,
        lambda: record(store, other, Batch((document(0, "b"),))),
    ]
    batches: list[Batch] = []
    for batch in plan_batches(store, run_id, as_records(["a", "b", "b", "c"]), BatchSizer(8)):
        batches.append(batch)
        record(store, run_id, batch)
    assert [[each.text for each in batch.to_score] for batch in batches] == [["a", "c"], []]
    assert [[each.position for each in batch.decided] for batch in batches] == [[], [1, 2]]
    assert waits == []
    # Three looks, told once, and no text of a document.
    assert caplog.messages == ["waiting for 2 documents that another run is scoring"]
    store.finish_run(other, "completed")
    summary = store.finish_run(run_id, "completed", documents=4)
    assert (summary.scored, summary.reused, summary.wasted) == (2, 2, 0)


def test_the_next_wait_is_told_again(
    store: Store,
    waits: list[Callable[[], None]],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
):
    caplog.set_level("INFO")
    key = a_key()
    other, run_id = begin(store, key), begin(store, key)
    assert store.claim(other, [text_sha256("a")])

    waits += [
        lambda: record(store, other, Batch((document(0, "a"),))),
        lambda: record(store, other, Batch((document(1, "b"),))),
    ]

    def records() -> Iterator[Document]:
        yield document(0, "a")
        # By the time the plan asks for more it has waited for "a".
        assert len(waits) == 1
        assert store.claim(other, [text_sha256("b")])
        yield document(1, "b")

    monkeypatch.setattr(planning, "WINDOW", 1)
    for batch in plan_batches(store, run_id, records(), BatchSizer(1)):
        record(store, run_id, batch)
    assert caplog.messages == ["waiting for 1 documents that another run is scoring"] * 2


def test_what_another_run_lets_go_of_is_scored_after_all(
    store: Store, waits: list[Callable[[], None]]
):
    key = a_key()
    other, run_id = begin(store, key), begin(store, key)
    assert store.claim(other, [text_sha256("b")])
    waits += [lambda: None, lambda: None, lambda: store.finish_run(other, "failed") and None]
    batches: list[Batch] = []
    for batch in plan_batches(store, run_id, as_records(["b", None, "b"]), BatchSizer(8)):
        batches.append(batch)
        record(store, run_id, batch)
    assert [[each.text for each in batch.to_score] for batch in batches] == [[], ["b"]]
    assert store.finish_run(run_id, "completed", documents=3).scored == 1


def test_two_runs_by_turns_score_each_text_once(engine: Engine, waits: list[Callable[[], None]]):
    # Two runs over the same records; each batch of one is recorded while the other has one out.
    key = a_key()
    stores = [Store(engine), Store(engine)]
    runs = [begin(store, key) for store in stores]
    texts = [text for text in "abcdefghij" for _ in range(2)]
    plans = [
        plan_batches(store, run_id, as_records(texts), BatchSizer(2))
        for store, run_id in zip(stores, runs, strict=True)
    ]
    scored: list[str] = []
    out: list[Batch | None] = [None, None]

    def settle(turn: int) -> None:
        held, out[turn] = out[turn], None
        if held is not None:
            record(stores[turn], runs[turn], held)

    def take(turn: int) -> None:
        settle(turn)
        batch = out[turn] = next(plans[turn], None)
        scored.extend(batch.texts if batch else ())

    # While one waits, the other records what it has out.
    waits += [lambda: settle(1), lambda: settle(0)] * 20
    take(0)
    while any(out):
        take(1)
        take(0)
    assert sorted(scored) == sorted(set(texts))
    assert len(waits) < 40  # they did get into each other's way
    for run_id, store in zip(runs, stores, strict=True):
        assert store.finish_run(run_id, "completed", documents=len(texts)).wasted == 0
    assert sum(run_summary(engine, run_id).scored for run_id in runs) == 10


def test_a_claim_that_ran_out_is_taken_over(tmp_path: Path, waits: list[Callable[[], None]]):
    engine = open_engine(sqlite_url(tmp_path / "store.db"))
    now = [datetime.now(UTC)]
    store = Store(engine, claim_seconds=900, clock=lambda: now[0])
    key = a_key()
    other, run_id = begin(store, key), begin(store, key)
    assert store.claim(other, [text_sha256("b")])

    def a_quarter_of_an_hour() -> None:
        now[0] += timedelta(seconds=901)

    waits += [a_quarter_of_an_hour]
    (batch,) = plan_batches(store, run_id, as_records(["b"]), BatchSizer(8))
    assert batch.texts == ("b",)
    engine.dispose()


def test_a_plan_adapts_to_how_long_its_batches_take(store: Store, monkeypatch: pytest.MonkeyPatch):
    clock = itertools.count()  # each look at the clock is a second later than the last
    monkeypatch.setattr(planning.time, "perf_counter", lambda: float(next(clock)))
    run_id = begin(store, a_key())
    sizes: list[int] = []
    texts = [f"text {number}" for number in range(60)]
    for batch in plan_batches(store, run_id, as_records(texts), BatchSizer()):
        sizes.append(len(batch.texts))
        record(store, run_id, batch)
    # Each batch takes one second, so two seconds hold twice as many.
    assert sizes == [2, 4, 8, 16, 30]
    store.finish_run(run_id, "completed", documents=60)
