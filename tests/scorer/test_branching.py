"""Packed branches: the same logits as forks, without copies, or not used at all.

`test_exact.py` runs all its checks of float64 with packed branches as well.
"""

import logging
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from weighbridge.scorer import branching
from weighbridge.scorer import engine as engine_module
from weighbridge.scorer.branching import (
    PackedKVCache,
    PackedWindowCache,
    UnmaskedError,
    pack,
    packed_dtype,
    rows_at_once,
)
from weighbridge.scorer.caches import Prefix, fork
from weighbridge.scorer.engine import Engine
from weighbridge.scorer.rows import Mode, Row
from weighbridge.scorer.trie import MASK_LIMIT_BYTES

pytestmark = [pytest.mark.mlx, pytest.mark.usefixtures("cpu")]

EXACT = 1e-12
FAMILIES = ("llama", "qwen3_5", "gemma3_text")


@pytest.fixture
def always(monkeypatch) -> None:
    """Pack behind any prefix, where copies would be as fast."""
    monkeypatch.setattr(branching, "PREFIX_LEAST", 1)
    monkeypatch.setattr(branching, "PREFIX_SHARE", 1000)


def probed(model: Any, **options: Any) -> Engine:
    engine = Engine(model, one_pass=False, **options)
    engine.probe()
    return engine


# --- what is packed, and how much at a time ---


@pytest.mark.parametrize(
    ("held", "width", "rows", "expected"),
    [
        (191, 4, 8, 0),  # a short prefix is copied
        (256, 4, 8, 8),  # 32 tokens of suffixes for 256: within a half
        (256, 4, 33, 17),  # 128 allowed, 32 rows: two even batches of 17 and 16
        (256, 40, 8, 3),  # 128 allowed, 3 rows of 40: 3 + 3 + 2
        (256, 65, 8, 0),  # two rows do not fit into a half
        (2000, 12, 1, 0),  # a row alone: one copy, and no mask
        (2000, 12, 64, 32),  # never more than 32
        (2**15, 16, 32, 5),  # 4 MiB / (16 · 2**15 · 1.5) = 5.3: 7 batches of 5 or fewer
    ],
)
def test_rows_at_once(held, width, rows, expected):
    assert rows_at_once(held, width, rows) == expected


@given(
    held=st.integers(0, 100_000),
    width=st.integers(1, 500),
    rows=st.integers(1, 200),
)
def test_batches_stay_within_all_bounds(held, width, rows):
    size = rows_at_once(held, width, rows)
    assert 0 <= size <= min(rows, branching.PACKED_ROW_LIMIT)
    # The mask as it is made, and the scores of other rows.
    assert size * width * (held + size * width) <= MASK_LIMIT_BYTES or size == 0
    assert size * width <= branching.PREFIX_SHARE * held or size == 0


def test_kinds_that_are_packed():
    keys = mx.zeros((1, 1, 8, 4))
    caches = (
        KVCache.from_state((keys, keys, 8)),
        RotatingKVCache.from_state((keys, keys, 8, 0, 16, 8)),
        RotatingKVCache.from_state((keys, keys, 8, 4, 16, 8)),
        ArraysCache.from_state(([keys, keys], None, None)),
        KVCache(),
    )
    made = pack(Prefix(tuple(range(8)), caches), [1, 2])
    # A window that keeps its first tokens, recurrent states, and layers without keys of
    # their own are forked.
    assert [type(each) for each in made] == [
        PackedKVCache,
        PackedWindowCache,
        RotatingKVCache,
        ArraysCache,
        KVCache,
    ]
    assert packed_dtype(Prefix((1,), caches)) == mx.float32
    assert packed_dtype(Prefix((1,), caches[2:])) is None


# --- masks ---


@settings(max_examples=40)
@given(
    held=st.integers(1, 12),
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    window=st.integers(1, 20),
)
def test_masks_show_the_prefix_and_the_own_suffix(held, lengths, window):
    keys = mx.zeros((1, 1, held, 4))
    prefix = Prefix(tuple(range(held)), (KVCache.from_state((keys, keys, held)),))
    (cache,) = pack(prefix, lengths)
    width = max(lengths)
    mask = np.array(cache.make_mask(width, window_size=window))
    assert mask.shape == (len(lengths), 1, width, held + sum(lengths))
    # mlx-lm's mask of one sequence is the oracle: of each row, as far as it is not padding.
    own = np.array(create_causal_mask(width, held, window_size=window))
    start = held
    for row, length in enumerate(lengths):
        shown = mask[row, 0, :length]
        assert (shown[:, :held] == own[:length, :held]).all()
        assert (shown[:, start : start + length] == own[:length, held : held + length]).all()
        # And nothing of any other row.
        assert shown.sum() == own[:length, : held + length].sum()
        start += length


def test_keys_are_held_once_whatever_the_rows(tiny):
    engine = Engine(tiny.model(dtype="float32"))
    tokens = tiny.rows(600, [1])[0].tokens[:600]
    prefix = engine.prefill(tokens)
    extra: dict[str, int] = {}
    for name, caches in (("fork", fork(prefix, 32)), ("pack", pack(prefix, [4] * 32))):
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        engine._run(caches, [(number, 1, 2, 3) for number in range(32)], (1, 2))
        extra[name] = mx.get_peak_memory() - before
    # 2 layers × (keys, values) × 2 heads × 16 numbers × 4 bytes for each of 604 or more tokens
    # and 32 rows; packed, for 600 + 128 tokens once, and scores and mask beside it.
    assert extra["fork"] > 32 * 604 * 512
    assert extra["pack"] < extra["fork"] / 2


# --- the same logits ---


@pytest.mark.parametrize("lengths", [[1, 1], [1, 1, 1], [3, 1, 7, 2], [20, 1, 18]], ids=str)
@pytest.mark.parametrize("prefix", [1, 14, 15, 16, 17, 40])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_packed_equals_forked(tiny, architecture, prefix, lengths):
    engine = Engine(tiny.model(architecture=architecture), chunk=8)
    rows = tiny.rows(prefix, lengths)
    parent = engine.prefill(rows[0].tokens[:prefix])
    suffixes = [row.tokens[prefix:] for row in rows]
    forked = engine._run(fork(parent, len(rows)), suffixes, (1, 2, 3))
    packed = engine._run(pack(parent, lengths), suffixes, (1, 2, 3))
    # Windows of 16 not full, just full, passed, and crossed by a suffix of 20.
    assert tiny.apart(forked, packed) <= EXACT


@pytest.mark.parametrize("architecture", FAMILIES)
def test_long_prefixes_are_packed_by_themselves(tiny, architecture, monkeypatch):
    made: list[int] = []

    def counted(prefix: Prefix, lengths: Any) -> list[Any]:
        made.append(len(lengths))
        return pack(prefix, lengths)

    engine = probed(tiny.model(architecture=architecture, dtype="float32"), chunk=64)
    monkeypatch.setattr(engine_module, "pack", counted)
    rows = tiny.rows(300, [3, 1, 7, 2] * 9)
    whole, _ = engine.score(rows, mode=Mode.INDEPENDENT)
    found, _ = engine.score(rows)
    # 150 tokens may be packed, 21 rows of 7: 36 rows make two batches of 18.
    assert made == [18, 18]
    # Float32: rounding, in another order.
    assert tiny.apart(whole, found) < 1e-4
    made.clear()
    engine.score(tiny.rows(150, [3, 1, 7]))
    engine.score(rows, mode=Mode.CACHED_SERIAL)
    # Short prefixes and single rows are copied.
    assert made == []
    forks = probed(tiny.model(architecture=architecture, dtype="float32"), packed=False)
    assert tiny.apart(forks.score(rows)[0], found) < 1e-4
    assert (made, forks.packs) == ([], False)


# --- what cannot be packed is noticed ---


@pytest.mark.parametrize(("architecture", "packs"), [("llama", True), ("gemma2", False)])
def test_the_probe_decides(tiny, architecture, packs, caplog):
    engine = Engine(tiny.model(architecture=architecture))
    # Never before the probe.
    assert not engine.packs
    with caplog.at_level(logging.DEBUG, logger="weighbridge"):
        # Forks are right either way.
        assert engine.probe() <= EXACT
    # Gemma 2 adds the mask to scores of five axes, where one for each row does not fit.
    assert engine.packs is packs
    assert ("branches are not packed" in caplog.text) is not packs


def masked_by_itself(tiny: Any, least: int) -> Any:
    """Return a llama that makes the mask itself when its cache holds some tokens."""
    from mlx_lm.models import llama

    class Own(llama.LlamaModel):
        def __call__(self, inputs: Any, cache: Any = None, *more: Any) -> Any:
            if cache is None or cache[0].offset < least:
                return super().__call__(inputs, cache, *more)
            hidden = self.embed_tokens(inputs)
            mask: Any = "causal"
            for layer, each in zip(self.layers, cache, strict=True):
                hidden = layer(hidden, mask, cache=each)
            return self.norm(hidden)

    model = tiny.model()
    model.model.__class__ = Own
    return model


@pytest.mark.parametrize(("least", "seen_at_load"), [(0, True), (100, False)])
def test_a_model_with_a_mask_of_its_own_forks(tiny, always, least, seen_at_load, caplog):
    engine = Engine(masked_by_itself(tiny, least))
    assert engine.probe() <= EXACT
    # A mask that only long prompts have cannot be met by a short one.
    assert engine.packs is not seen_at_load
    rows = tiny.rows(120, [3, 1, 7])
    with caplog.at_level(logging.DEBUG, logger="weighbridge"):
        assert tiny.worst(engine, rows) <= EXACT
    assert not engine.packs
    assert ("must attend to packed keys with their mask" in caplog.text) is not seen_at_load


def test_control_packed_keys_with_another_mask_are_wrong(tiny, always, monkeypatch):
    engine = probed(masked_by_itself(tiny, 100))
    monkeypatch.setattr(branching.PackedRows, "check_asked", lambda *_: None)
    # What the check keeps from happening.
    assert tiny.worst(engine, tiny.rows(120, [3, 1, 7])) > 1e-3


def test_caches_are_used_once(tiny):
    engine = Engine(tiny.model())
    prefix = engine.prefill(tuple(range(20)))
    caches = pack(prefix, [2, 2])
    engine._run(caches, [(1, 2), (3, 4)], (1, 2))
    for rows in ([(1, 2), (3, 4)], [(1, 2, 3), (3, 4, 5)]):
        # A second time would need masks for what the first one appended.
        with pytest.raises(UnmaskedError):
            engine._run(caches, rows, (1, 2))


# --- negative controls: each planted fault is larger than what is allowed ---


def faulty(monkeypatch: Any, change: Any) -> None:
    mask = branching.PackedRows.mask

    def wrong(self: Any, kind: Any, held: int, window: int) -> mx.array:
        return change(mask, self, kind, held, window)

    monkeypatch.setattr(branching.PackedRows, "mask", wrong)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_control_a_row_that_sees_another_one_shows(tiny, always, monkeypatch, architecture):
    engine = probed(tiny.model(architecture=architecture))

    def leak(mask: Any, rows: Any, kind: Any, held: int, window: int) -> mx.array:
        right = mask(rows, kind, held, window)
        return right | (mx.arange(right.shape[-1]) == right.shape[-1] - 1)

    rows = tiny.rows(20, [4, 6, 1])
    assert tiny.worst(engine, rows) <= EXACT
    faulty(monkeypatch, leak)
    # One token of the last row, seen by all.
    assert tiny.worst(engine, rows) > 1e-3
    # And the probe would not have let it pass.
    engine.probe()
    assert not engine.packs


@pytest.mark.parametrize("by", [-1, 1])
def test_control_a_window_off_by_one_shows(tiny, always, monkeypatch, by):
    engine = probed(tiny.model(architecture="gemma3_text"), chunk=8)
    faulty(
        monkeypatch,
        lambda mask, rows, kind, held, window: mask(rows, kind, held, window + by * (window == 16)),
    )
    assert tiny.worst(engine, tiny.rows(20, [3, 2, 7])) > 1e-3
    # 8 + 7 tokens fit into any of these windows.
    assert tiny.worst(engine, tiny.rows(8, [3, 2, 7])) <= EXACT


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("by", [-1, 1])
def test_control_shifted_positions_show(tiny, always, monkeypatch, architecture, by):
    engine = probed(tiny.model(architecture=architecture))

    def shifted(prefix: Prefix, lengths: Any) -> list[Any]:
        caches = pack(prefix, lengths)
        for cache in caches:
            if isinstance(cache, KVCache):
                cache.offset += by
        return caches

    monkeypatch.setattr(engine_module, "pack", shifted)
    assert tiny.worst(engine, tiny.rows(12, [4, 6, 1])) > 1e-3


def test_control_a_lost_recurrent_state_shows(tiny, always, monkeypatch):
    engine = probed(tiny.model(architecture="qwen3_5"))

    def forgetful(prefix: Prefix, rows: int = 1) -> list[Any]:
        caches = fork(prefix, rows)
        for cache in caches:
            if isinstance(cache, ArraysCache):
                cache[1] = mx.zeros_like(cache[1])
        return caches

    monkeypatch.setattr(branching, "fork", forgetful)
    # Beside packed attention, recurrent layers still fork.
    assert tiny.worst(engine, tiny.rows(20, [4, 6, 1])) > 1e-3


@pytest.mark.parametrize("architecture", FAMILIES)
def test_equal_rows_get_equal_logits(tiny, always, architecture):
    engine = probed(tiny.model(architecture=architecture))
    (first, second) = tiny.rows(20, [4, 6])
    rows = [first, second, Row(first.tokens, first.candidates), first]
    found, _ = engine.score(rows)
    # A row's place among the packed ones must not matter.
    assert tiny.apart([found[0]] * 2, found[2:]) <= EXACT
