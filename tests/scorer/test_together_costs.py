"""What documents computed together take: their tokens and seconds, and its bounds."""

import time
from collections.abc import Callable, Sequence

import mlx.core as mx
import pytest
from tests.scorer.documents_together import (
    RESIDENT,
    TOGETHER,
    alike,
    asked,
    make,
    mixed,
    one_by_one,
    shared_passes,
    text,
)

from weighbridge.scorer import backend
from weighbridge.scorer.engine import Engine
from weighbridge.scorer.rows import Mode, Scored, Timings
from weighbridge.scorer.together import Tail, tails, within
from weighbridge.scorer.trees import at_once, plant
from weighbridge.scorer.trie import MASK_LIMIT_BYTES

pytestmark = [pytest.mark.mlx, pytest.mark.usefixtures("cpu")]

Make = Callable[[str], Engine]


@pytest.fixture(scope="module")
def fresh(tiny, table) -> Make:
    """Return a way to make an engine that holds no prefix."""
    return lambda way: make(tiny, table, way)


def added(found: Sequence[Scored]) -> Timings:
    return sum((timings for _, timings in found), Timings())


@pytest.mark.parametrize("way", TOGETHER)
@pytest.mark.parametrize("again", [False, True])
def test_tokens_and_prefixes_add_up_to_those_one_by_one(fresh, way, again):
    together, alone, documents = fresh(way), fresh(way), mixed()
    if again:  # prefixes are there by now
        together.score_documents(documents)
        one_by_one(alone, documents)
    began = time.perf_counter()
    found = together.score_documents(documents)
    wall = time.perf_counter() - began
    whole, each = added(found), added(one_by_one(alone, documents))
    # The tokens of a single row may count as either.
    assert whole.prefix_tokens + whole.suffix_tokens == each.prefix_tokens + each.suffix_tokens
    assert whole.resident_tokens == each.resident_tokens
    assert whole.resident_hits == each.resident_hits
    assert 0 < whole.prefills <= each.prefills
    assert 0 < whole.prefill_seconds + whole.branch_seconds <= wall
    for (_, timings), document in zip(found, documents, strict=True):
        assert min(timings.prefill_seconds, timings.branch_seconds) >= 0
        assert timings.total_seconds == 0
        assert timings.mode is (Mode.PARALLEL if document.rows else Mode.AUTO)
        assert timings.peak_bytes >= timings.start_bytes
        taken = timings.prefix_tokens + timings.suffix_tokens + timings.resident_tokens
        # What its rows are made of, with what all of them share once.
        lengths = [len(row.tokens) for row in document.rows]
        assert max(lengths, default=0) <= taken <= sum(lengths)
        assert timings.resident_hits == int(timings.resident_tokens > 0)


@pytest.mark.parametrize("way", ["llama", "qwen3_5"])
def test_documents_of_one_row_take_one_pass(fresh, way):
    engine = fresh(way)
    documents = [asked(RESIDENT[0], text(5, each), [(1,)], 40) for each in range(4)]
    assert shared_passes(engine, documents) == [4]
    # The prefix once, and no pass for what only stands before other rows.
    assert added(engine.score_documents(documents)).prefills == 1
    assert added(engine.score_documents(documents)).prefills == 0


# --- bounds ---


def test_masks_of_a_shared_pass_are_bounded():
    fields = [text(4, each) for each in range(8)]
    documents = [asked((), text(20_000, 1) + text(30, each), fields, 20_000) for each in range(9)]
    (some,) = tails(documents)
    count = within(some, 512)
    tokens = sum(tail.size for tail in some[:count])
    # 207 tokens can see 20,000 keys in 4 MiB, and 512 could not.
    assert (some[0].size, count) == (62, 3)
    assert tokens * (20_000 + tokens) <= MASK_LIMIT_BYTES


def test_rows_of_shared_levels_are_bounded():
    # A recurrent layer keeps a state for each row.
    documents = [[(each, field) for field in range(8)] for each in range(64)]
    count = at_once(documents, 200)
    levels = plant(documents[:count])
    assert levels is not None
    assert (count, max(len(level.rows) for level in levels)) == (8, 64)


def test_a_mac_computes_documents_together(monkeypatch):
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    assert backend.describe_backend().pass_tokens == 512
    # Float64 is for the CPU, there too.
    assert backend.describe_backend("float64").pass_tokens == 128


# --- negative control ---


def test_control_tokens_counted_twice_show(fresh, monkeypatch):
    together, alone, documents = fresh("llama"), fresh("llama"), alike()
    monkeypatch.setattr(Tail, "behind", property(lambda tail: sum(map(len, tail.rows))))
    whole = added(together.score_documents(documents))
    assert whole.suffix_tokens > added(one_by_one(alone, documents)).suffix_tokens
