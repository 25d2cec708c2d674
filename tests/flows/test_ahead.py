"""A batch is scored while the one before it is recorded, in order, and errors come out."""

import threading
from collections.abc import Callable, Iterator

import pytest

from weighbridge.flows import ahead
from weighbridge.flows.ahead import Scored, score_ahead
from weighbridge.scorer.results import Rejection
from weighbridge.tasks.planning import Batch
from weighbridge.tasks.sources import BadRecord, Document
from weighbridge.tasks.stopping import Stopped

WAIT = 20.0


def batch(*texts: str) -> Batch:
    return Batch(tuple(Document(number, None, None, text, {}) for number, text in enumerate(texts)))


def answer(batch: Batch, _: object = None) -> list[Rejection]:
    return [Rejection(code="document.not_finite", message=text) for text in batch.texts]


def unprepared(_: Batch) -> None:
    """Make nothing ready."""


def said(scored: Scored) -> list[str]:
    return [each.message for each in scored.results if isinstance(each, Rejection)]


@pytest.mark.parametrize("overlap", [True, False])
def test_one_is_scored_while_the_other_is_recorded(monkeypatch: pytest.MonkeyPatch, overlap: bool):
    monkeypatch.setattr(ahead, "OVERLAP", overlap)
    second_began = threading.Event()
    met: list[bool] = []
    order: list[list[str]] = []

    def score(batch: Batch, _: object) -> list[Rejection]:
        if batch.texts == ("b",):
            second_began.set()
        return answer(batch)

    def record(batch: Batch, coming: Callable[[], Scored]) -> None:
        scored = coming()
        assert scored.began <= scored.ended
        if batch.texts == ("a",):
            met.append(second_began.wait(WAIT if overlap else 0.2))
        order.append(said(scored))

    score_ahead(iter([batch("a"), batch("b"), batch("c")]), unprepared, score, record)
    assert met == [overlap]
    assert order == [["a"], ["b"], ["c"]]


def test_an_empty_batch_asks_for_what_is_before_it_and_is_not_recorded():
    recorded: list[int] = []

    def batches() -> Iterator[Batch]:
        yield batch("a", "b")
        assert recorded == []
        yield Batch(())
        assert recorded == [2]
        yield Batch((), bad=(BadRecord(2, None, None, "document.empty", "blank"),))
        assert recorded == [2]

    score_ahead(batches(), unprepared, answer, lambda given, _: recorded.append(len(given)))
    assert recorded == [2, 1]


def test_scoring_that_fails_ends_it_before_anything_later_is_recorded():
    recorded: list[tuple[str, ...]] = []

    def score(batch: Batch, _: object) -> list[Rejection]:
        if batch.texts == ("b",):
            raise ZeroDivisionError
        return answer(batch)

    def record(batch: Batch, coming: Callable[[], Scored]) -> None:
        coming()
        recorded.append(batch.texts)

    with pytest.raises(ZeroDivisionError):
        score_ahead(
            iter([batch("a"), batch("b"), batch("c"), batch("d")]), unprepared, score, record
        )
    assert recorded == [("a",)]


def test_a_run_that_is_stopped_records_what_is_in_flight():
    recorded: list[tuple[str, ...]] = []

    def batches() -> Iterator[Batch]:
        yield batch("a")
        yield batch("b")
        raise Stopped("enough")

    def record(batch: Batch, coming: Callable[[], Scored]) -> None:
        assert said(coming()) == list(batch.texts)
        recorded.append(batch.texts)

    with pytest.raises(Stopped):
        score_ahead(batches(), unprepared, answer, record)
    assert recorded == [("a",), ("b",)]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_nothing_is_scored_any_more_when_it_is_over(error: type[BaseException]):
    begun, at_work = threading.Event(), threading.Event()

    def score(batch: Batch, _: object) -> list[Rejection]:
        at_work.set()
        begun.set()
        threading.Event().wait(0.2)
        at_work.clear()
        return answer(batch)

    def batches() -> Iterator[Batch]:
        yield batch("a")
        assert begun.wait(WAIT)
        raise error

    with pytest.raises(error):
        score_ahead(batches(), unprepared, score, lambda *_: None)
    assert not at_work.is_set()
    assert not [each for each in threading.enumerate() if "weighbridge-scoring" in each.name]


@pytest.mark.parametrize("prepared", [True, False])
def test_a_batch_that_waits_is_made_ready_while_another_is_scored(
    monkeypatch: pytest.MonkeyPatch, prepared: bool
):
    monkeypatch.setattr(ahead, "PREPARED", prepared)
    second_ready = threading.Event()
    met: list[bool] = []

    def prepare(batch: Batch) -> tuple[str, ...]:
        if batch.texts == ("b",):
            second_ready.set()
        return batch.texts

    def score(batch: Batch, ready: tuple[str, ...] | None) -> list[Rejection]:
        assert ready == (batch.texts if prepared else None)
        if batch.texts == ("a",):  # the next one is made ready while it is scored
            met.append(second_ready.wait(WAIT if prepared else 0.2))
        return answer(batch)

    def record(_: Batch, coming: Callable[[], Scored]) -> None:
        coming()

    score_ahead(iter([batch("a"), batch("b")]), prepare, score, record)
    assert met == [prepared]


def test_a_batch_that_cannot_be_made_ready_fails_where_it_is_scored():
    def prepare(batch: Batch) -> None:
        if batch.texts == ("b",):
            raise RuntimeError("no room")

    recorded: list[list[str]] = []

    def record(_: Batch, coming: Callable[[], Scored]) -> None:
        recorded.append(said(coming()))

    with pytest.raises(RuntimeError, match="no room"):
        score_ahead(iter([batch("a"), batch("b"), batch("c")]), prepare, answer, record)
    # What was scored before it is kept.
    assert recorded == [["a"]]
