"""Forks never write into their prefix, and kept prefixes stay within their bound."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten

from weighbridge.scorer import engine as engine_module
from weighbridge.scorer import passes as passes_module
from weighbridge.scorer.caches import Prefix, PrefixStore, empty_prefix, fork
from weighbridge.scorer.engine import Engine
from weighbridge.scorer.rows import Mode

pytestmark = [pytest.mark.mlx, pytest.mark.usefixtures("cpu")]


def contents(prefix: Prefix) -> list[Any]:
    """Return all that the caches hold, arrays as bytes, slack behind the offset included."""
    leaves = tree_flatten([cache.state for cache in prefix.caches])
    return [
        (name, leaf.shape, np.array(leaf).tobytes()) if isinstance(leaf, mx.array) else (name, leaf)
        for name, leaf in leaves
    ]


@pytest.fixture(params=["full attention", "sliding window", "sliding window passed"])
def prefix_engine(request, tiny) -> tuple[Engine, Prefix]:
    changes = {
        "full attention": {},
        "sliding window": {"sliding_window": 64},
        "sliding window passed": {"sliding_window": 8},
    }[request.param]
    if changes:
        changes["layer_types"] = ["sliding_attention", "full_attention"]
    engine = Engine(tiny.model(**changes), chunk=16)
    return engine, engine.prefill(tiny.rows(20, [1])[0].tokens[:20])


def test_branches_leave_the_prefix_bit_identical(prefix_engine, tiny):
    engine, prefix = prefix_engine
    before = contents(prefix)
    rows = tiny.rows(0, [3, 1, 7])
    for size in (1, 2, 3):
        # Both a batch and, with one row, a fork of the parent's own shape.
        engine._branch(prefix, [row.tokens for row in rows[:size]], (1, 2))
    engine.prefill((*prefix.tokens, *range(30)), base=prefix)
    # A cache of mlx-lm writes into its arrays in place, so a fork that shared them would
    # leave traces, were it only in the slack behind the offset.
    assert contents(prefix) == before


@pytest.mark.parametrize("mode", [Mode.PARALLEL, Mode.CACHED_SERIAL])
def test_a_whole_score_leaves_the_resident_prefix_bit_identical(tiny, mode):
    engine = Engine(tiny.model())
    rows = tiny.rows(40, [3, 1, 7])
    engine.score(rows, mode=mode, resident_tokens=20)
    resident = engine.resident.get(rows[0].tokens[:20])
    assert resident is not None
    before = contents(resident)
    engine.score(rows, mode=mode, resident_tokens=20)
    # The second score prefilled 20 more tokens and three branches from it.
    assert contents(resident) == before


def sharing_fork(prefix: Prefix, rows: int = 1) -> list[Any]:
    """Fork without new array objects: the planted fault."""
    return [type(cache).from_state(cache.state) for cache in prefix.caches]


def test_control_a_fork_that_shares_arrays_is_seen(tiny, monkeypatch):
    engine = Engine(tiny.model())
    prefix = engine.prefill(tiny.rows(20, [1])[0].tokens[:20])
    before = contents(prefix)
    for module in (engine_module, passes_module):
        monkeypatch.setattr(module, "fork", sharing_fork)
    engine._branch(prefix, [(1, 2, 3)], (1, 2))
    # The three tokens now stand in the parent's arrays.
    assert contents(prefix) != before


def test_fork_holds_the_prefix_once_per_row(prefix_engine):
    _, prefix = prefix_engine
    for parent, child in zip(prefix.caches, fork(prefix, 3), strict=True):
        assert type(child) is type(parent)
        for one, three in zip(parent.state, child.state, strict=True):
            if isinstance(one, mx.array):
                # The same keys and values for each of the three rows.
                assert three.shape == (3, *one.shape[1:])
                assert all(mx.array_equal(three[row], one[0]) for row in range(3))
            else:
                # Offsets and window sizes go over as they are.
                assert three == one


def test_fork_of_an_empty_prefix_shares_no_container(tiny):
    from mlx_lm.models.cache import ArraysCache, KVCache

    prefix = Prefix(tokens=(), caches=(KVCache(), ArraysCache(2)))
    _, child = fork(prefix, 2)
    child[0] = mx.zeros((2, 3))
    # A recurrent cache keeps its arrays in a list, which the fork must not share.
    assert prefix.caches[1][0] is None
    # Nothing was computed yet, so nothing is held.
    assert (prefix.nbytes, empty_prefix(tiny.model()).nbytes) == (0, 0)


def held(token: int, size: int) -> Prefix:
    """Return a prefix of one token whose cache holds `size` bytes."""
    from mlx_lm.models.cache import KVCache

    half = mx.zeros((1, 1, 1, size // 2), mx.uint8)
    return Prefix(tokens=(token,), caches=(KVCache.from_state((half, half, 1)),))


def kept(store: PrefixStore) -> list[int]:
    """Return which of the tokens 0 to 9 the store holds, without touching their order."""
    return [tokens[0] for tokens in store._kept]


def test_store_drops_the_least_recently_used_first():
    store = PrefixStore(limit_bytes=300)
    for token in (1, 2, 3):
        store.put(held(token, 100))
    store.get((1,))
    store.put(held(4, 100))
    # 2 is the one not used since; 1 was asked for after 3 came.
    assert kept(store) == [3, 1, 4]
    assert store.get((2,)) is None
    store.put(held(5, 200))
    # 200 more bytes push out two of 100.
    assert kept(store) == [4, 5]


def test_store_replaces_a_prefix_of_the_same_tokens():
    store = PrefixStore(limit_bytes=300)
    store.put(held(1, 100))
    store.put(held(1, 250))
    # Kept twice, they would be 350 bytes.
    assert (len(store), store.nbytes) == (1, 250)
    store.clear()
    assert (len(store), store.nbytes) == (0, 0)


def test_too_large_a_prefix_pushes_nothing_out():
    store = PrefixStore(limit_bytes=300)
    store.put(held(1, 100))
    store.put(held(2, 302))
    # It could not stay anyway, so what is kept must not go for it.
    assert kept(store) == [1]


def test_unequal_tokens_are_unequal_prefixes():
    store = PrefixStore(limit_bytes=300)
    store.put(Prefix(tokens=(1, 2, 3), caches=()))
    # A prefix of a prefix, or a longer one, holds another state.
    assert store.get((1, 2)) is None
    assert store.get((1, 2, 3, 4)) is None
    assert store.get((1, 2, 3)) is not None


@given(
    limit=st.integers(0, 60),
    steps=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40)), max_size=30),
)
def test_store_never_holds_more_than_its_limit(limit, steps):
    store = PrefixStore(limit_bytes=2 * limit)
    for token, size in steps:
        store.put(held(token, 2 * size))
        # Bytes of all kept, whatever came and went.
        assert store.nbytes <= 2 * limit
        # The newest stays whenever it fits at all.
        if size <= limit:
            assert kept(store)[-1] == token


def test_prefill_computes_the_caches_of_all_its_tokens(tiny):
    engine = Engine(tiny.model(), chunk=16)
    tokens = tiny.rows(40, [1])[0].tokens[:40]
    once, half = engine.prefill(tokens), engine.prefill(tokens[:23])
    extended = engine.prefill(tokens, base=half)
    for one, two in zip(once.caches, extended.caches, strict=True):
        # The same 40 positions, whether from nothing or from a prefix of 23.
        assert one.offset == two.offset == 40
        for left, right in zip(one.keys_and_values(), two.keys_and_values(), strict=True):
            np.testing.assert_allclose(np.array(left), np.array(right), rtol=0, atol=1e-12)
    # 2 layers × (keys, values) × 2 heads × 256 positions × 16 numbers × 8 bytes.
    assert once.nbytes == 2 * 2 * 2 * 256 * 16 * 8
