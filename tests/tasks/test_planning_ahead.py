"""Plans that run one batch ahead of what is recorded, on a real store."""

import itertools
import os
import platform
from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine

from weighbridge.db import (
    AnswerRecord,
    BatchRecord,
    CheckpointRow,
    ChoiceRecord,
    DocumentRecord,
    ItemRecord,
    RunStart,
    SchemaRow,
    Store,
    open_engine,
    sqlite_url,
)
from weighbridge.tasks import planning
from weighbridge.tasks.planning import Batch, BatchSizer, plan_batches, text_sha256
from weighbridge.tasks.sources import BadRecord, Document

ANSWER = AnswerRecord("q", "enum", (ChoiceRecord("a", 1.0), ChoiceRecord("b", 0.0)), 0, 1.0)
_numbers = itertools.count()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = open_engine(sqlite_url(tmp_path_factory.mktemp("planning") / "store.db"))
    yield engine
    engine.dispose()


@pytest.fixture(scope="module")
def store(engine: Engine) -> Store:
    return Store(engine)


def a_key() -> str:
    """Return a schema hash of its own, so that examples share no decisions."""
    return f"{next(_numbers):064x}"


def begin(store: Store, key: str, flow_run_id: str | None = None) -> int:
    start = RunStart(
        flow_run_id=flow_run_id,
        name="test",
        host=platform.node(),
        pid=os.getpid(),
        schema=SchemaRow(key, "test", "{}"),
        checkpoint=CheckpointRow("c" * 64, "tiny"),
        temperature=1.0,
        temperature_kind="default",
        temperature_source="default",
        documents_source="memory",
        mode="auto",
        layout="schema-first",
        encoding="labels",
        contract=None,
        dtype="float32",
        prompt_version="1",
        max_input_tokens=4096,
        backend="cpu",
    )
    return store.begin_run(start).run_id


def document(position: int, text: str) -> Document:
    return Document(position, position + 1, f"id-{position}", text, {})


def bad(position: int) -> BadRecord:
    return BadRecord(position, position + 1, None, "document.empty", "must not be blank")


def record(store: Store, run_id: int, batch: Batch) -> None:
    def item(of: Document | BadRecord, status: str) -> ItemRecord:
        text = of.text if isinstance(of, Document) else None
        return ItemRecord(
            position=of.position,
            document=DocumentRecord(text_sha256(text), text, len(text)) if text else None,
            status=status,  # type: ignore[arg-type]
            code=of.code if isinstance(of, BadRecord) else None,
            message=of.message if isinstance(of, BadRecord) else None,
            answers=(ANSWER,) if status == "scored" else (),
        )

    items = (
        *(item(each, "scored") for each in batch.to_score),
        *(item(each, "reused") for each in batch.decided),
        *(item(each, "rejected") for each in batch.bad),
    )
    store.record_batch(run_id, BatchRecord(batch.began_at, None, "auto", "cpu", items))


def decide(store: Store, key: str, texts: Sequence[str]) -> None:
    """Let an earlier run decide some texts."""
    run_id = begin(store, key)
    if texts:
        record(store, run_id, Batch(tuple(document(i, text) for i, text in enumerate(texts))))
    store.finish_run(run_id, "completed")


def as_records(texts: Sequence[str | None]) -> list[Document | BadRecord]:
    return [bad(i) if text is None else document(i, text) for i, text in enumerate(texts)]


def positions(batches: Sequence[Batch]) -> list[int]:
    return [
        record.position
        for batch in batches
        for record in (*batch.to_score, *batch.decided, *batch.bad)
    ]


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """What happens in the world during each wait of a plan, instead of time going by."""
    happenings: list[Callable[[], None]] = []
    monkeypatch.setattr(planning.time, "sleep", lambda _: happenings.pop(0)())
    return happenings


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
