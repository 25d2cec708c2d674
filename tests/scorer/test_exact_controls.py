"""Planted faults: each must fail the check of `test_exact.py` that is there for it.

`test_engine.py` and `test_caches.py` plant some in llama; these need recurrence or windows,
or show that a fault of one kind shows in every architecture.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache

from weighbridge.scorer import engine as engine_module
from weighbridge.scorer import passes as passes_module
from weighbridge.scorer.caches import Prefix, arrays, fork
from weighbridge.scorer.engine import Engine
from weighbridge.scorer.rows import Mode, Row

pytestmark = [pytest.mark.mlx, pytest.mark.usefixtures("cpu")]

EXACT = 1e-12
PLAIN = 1e-3
FAMILIES = ("llama", "qwen3_5", "gemma3_text")


@pytest.fixture(params=FAMILIES)
def architecture(request) -> str:
    return request.param


# --- rows must not see each other ---


@pytest.mark.parametrize("layer", [0, 1])
def test_a_leak_between_rows_shows(tiny, architecture, layer):
    model = tiny.model(architecture=architecture)
    whole = type(model.layers[layer])

    class Leaky(whole):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            out = super().__call__(*args, **kwargs)
            return out + 1e-9 * mx.roll(out, 1, 0)

    model.layers[layer].__class__ = Leaky
    rows = tiny.rows(20, [4, 6, 1])
    reference, _ = Engine(model).score(rows, mode=Mode.INDEPENDENT)
    found, _ = Engine(model).score(rows, mode=Mode.PARALLEL)
    serial, _ = Engine(model).score(rows, mode=Mode.CACHED_SERIAL)
    # A billionth of the row above in one layer: a thousand times the bound, and more.
    assert tiny.apart(reference, found) > 1000 * EXACT
    # A row without company has no row above it but itself, so serial rows stay right.
    assert tiny.apart(reference, serial) <= EXACT


def sharing(prefix: Prefix, rows: int = 1) -> list[Any]:
    """Fork without new arrays or lists: what a branch writes, it writes into its parent."""
    return [type(cache).from_state(cache.state) for cache in prefix.caches]


@pytest.mark.parametrize("family", ["qwen3_5", "gemma3_text"])
def test_a_fork_that_is_no_copy_changes_the_next_document(tiny, monkeypatch, family):
    engine = Engine(tiny.model(architecture=family), chunk=1)
    schema = tuple(range(16))  # a window that is just full
    documents = [[Row((*schema, each, 50, 51, 52), (1, 2, 3))] for each in (40, 41)]
    reference = [engine.score(rows, mode=Mode.INDEPENDENT)[0] for rows in documents]
    for module in (engine_module, passes_module):
        monkeypatch.setattr(module, "fork", sharing)
    first, second = [engine.score(rows, resident_tokens=16)[0] for rows in documents]
    # The first document still finds the resident prefix; the second one finds the first one
    # as well, in the recurrent state or rotated into the window.
    assert tiny.apart(reference[0], first) <= EXACT
    assert tiny.apart(reference[1], second) > PLAIN


# --- every position counts ---


def test_reading_one_position_late_shows(tiny, architecture):
    class Late(Engine):
        def _branch(self, prefix: Any, suffixes: Any, union: Any) -> np.ndarray:
            return super()._branch(prefix, [(*suffix, 0) for suffix in suffixes], union)

    # The next position is another prediction altogether.
    assert tiny.worst(Late(tiny.model(architecture=architecture)), tiny.rows(20, [4, 6])) > PLAIN


@pytest.mark.parametrize("by", [-1, 1])
def test_branches_at_shifted_positions_show(tiny, architecture, monkeypatch, by):
    model = tiny.model(architecture=architecture)
    rows = tiny.rows(12, [4, 6, 1])

    def shifted(prefix: Prefix, number: int = 1) -> list[Any]:
        caches = fork(prefix, number)
        for cache in caches:
            if isinstance(cache, KVCache) and prefix.tokens:
                cache.offset += by
        return caches

    monkeypatch.setattr(engine_module, "fork", shifted)
    # Suffixes off by one where all tokens are attended to: each family has such layers.
    assert tiny.worst(Engine(model), rows) > PLAIN


# --- padding must not enter a state ---


class PaddedPrefill(Engine):
    """Pads the prefix to whole chunks, and takes the padding back from the attention caches."""

    repaired: tuple[int, ...] = ()

    def prefill(self, tokens: tuple[int, ...], base: Prefix | None = None) -> Prefix:
        surplus = -len(tokens) % self._chunk
        made = super().prefill((*tokens, *[self.PAD] * surplus), base)
        sound = super().prefill(tokens, base)
        for padded, right in zip(made.caches, sound.caches, strict=True):
            if isinstance(padded, KVCache):
                padded.trim(surplus)
            else:
                for index in self.repaired:
                    padded[index] = right[index]
        return Prefix(tokens=tokens, caches=made.caches)


@pytest.mark.parametrize(
    ("repaired", "fault"),
    [((), "both"), ((0,), "state"), ((1,), "convolution"), ((0, 1), "none")],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_padding_in_a_recurrent_state_shows(tiny, repaired, fault):
    engine = PaddedPrefill(tiny.model(architecture="qwen3_5"), chunk=16)
    engine.repaired = repaired
    worst = tiny.worst(engine, tiny.rows(20, [4, 6, 1]))
    # 12 padding tokens went through the convolution's last 3 inputs and the gated delta
    # state: either alone is seen, and with both put right nothing else was wrong.
    assert worst <= EXACT if fault == "none" else worst > PLAIN


def test_padding_a_prefill_does_no_harm_to_attention(tiny):
    engine = PaddedPrefill(tiny.model(), chunk=16)
    # Keys behind the offset are never read, so llama alone could not have shown the fault.
    assert tiny.worst(engine, tiny.rows(20, [4, 6, 1])) <= EXACT


@pytest.mark.parametrize("family", ["qwen3_5", "gemma3_text"])
def test_padding_before_the_suffix_shows(tiny, family):
    class LeftPadded(Engine):
        def _branch(self, prefix: Any, suffixes: Any, union: Any) -> np.ndarray:
            width = max(map(len, suffixes))
            rows = [(self.PAD,) * (width - len(suffix)) + suffix for suffix in suffixes]
            return super()._branch(prefix, rows, union)

    engine = LeftPadded(tiny.model(architecture=family))
    # It enters states, shifts positions and pushes tokens out of the window.
    assert tiny.worst(engine, tiny.rows(20, [4, 6, 1])) > PLAIN
    # Rows of one length need no padding, and the same engine is right.
    assert tiny.worst(engine, tiny.rows(20, [4, 4, 4])) <= EXACT


def test_padding_read_as_part_of_the_row_shows(tiny, architecture, monkeypatch):
    class LastColumn(Engine):
        def _branch(self, prefix: Any, suffixes: Any, union: Any) -> np.ndarray:
            width = max(map(len, suffixes))
            rows = [suffix + (self.PAD,) * (width - len(suffix)) for suffix in suffixes]
            return super()._branch(prefix, rows, union)

    engine = LastColumn(tiny.model(architecture=architecture))
    rows = tiny.rows(20, [2, 6])
    found: list[Sequence[np.ndarray]] = []
    for pad in (0, 50):
        monkeypatch.setattr(Engine, "PAD", pad)
        found.append(engine.score(rows)[0])
    # Reading a batch at its last column: then the token used for padding does matter, which
    # is what the test over pad tokens looks for.
    assert tiny.apart(found[0][:1], found[1][:1]) > PLAIN


# --- windows are exactly as wide as they are ---


@pytest.mark.parametrize("by", [-1, 1])
def test_a_window_mask_off_by_one_shows(tiny, monkeypatch, by):
    engine = Engine(tiny.model(architecture="gemma3_text"), chunk=8)
    make_mask = RotatingKVCache.make_mask

    def wrong(self: Any, n: int, window_size: int | None = None, **options: Any) -> Any:
        return make_mask(self, n, window_size and window_size + by, **options)

    monkeypatch.setattr(RotatingKVCache, "make_mask", wrong)
    # Past the window one key too many, or too few, is attended to.
    assert tiny.worst(engine, tiny.rows(16, [3, 2, 7])) > PLAIN
    # 8 + 7 tokens fit into 15, 16 or 17: short prompts alone would not have shown it.
    assert tiny.worst(engine, tiny.rows(8, [3, 2, 7])) <= EXACT


@pytest.mark.parametrize("prefix", [15, 16, 32])
def test_a_window_cache_one_too_short_shows(tiny, prefix):
    sound = tiny.model(architecture="gemma3_text")

    class Short(type(sound)):
        def make_cache(self) -> list[Any]:
            caches = super().make_cache()
            for cache in caches:
                if isinstance(cache, RotatingKVCache):
                    cache.max_size -= 1
            return caches

    short = tiny.model(architecture="gemma3_text")
    short.__class__ = Short
    rows = tiny.rows(prefix, [1, 1, 1])
    # The token 15 back is gone when one token is added in place, already at 15 + 1.
    assert tiny.worst(Engine(short, chunk=8), rows) > PLAIN
    # The very rows that a cache of the right size gets right.
    assert tiny.worst(Engine(sound, chunk=8), rows) <= EXACT


# --- and the checks look at what they mean to ---


@pytest.mark.parametrize("index", [0, 1])
def test_a_lost_recurrent_state_shows(tiny, index, monkeypatch):
    engine = Engine(tiny.model(architecture="qwen3_5"))

    def forgetful(prefix: Prefix, rows: int = 1) -> list[Any]:
        caches = fork(prefix, rows)
        for cache in caches:
            if prefix.tokens and not isinstance(cache, KVCache):
                cache[index] = mx.zeros_like(cache[index])
        return caches

    monkeypatch.setattr(engine_module, "fork", forgetful)
    # Convolution inputs or state of the prefix forgotten: weights are such that both carry
    # what was read, so that agreement in `test_exact.py` includes them.
    assert tiny.worst(engine, tiny.rows(20, [4, 6, 1])) > PLAIN


def test_recurrent_states_neither_vanish_nor_blow_up(tiny):
    engine = Engine(tiny.model(architecture="qwen3_5"))
    for length in (16, 250):
        prefix = engine.prefill(tiny.rows(length, [1])[0].tokens[:length])
        states = [cache[1] for cache in prefix.caches if not isinstance(cache, KVCache)]
        # They begin as float32 zeros in mlx-lm, and the first token makes them float64.
        assert {state.dtype for state in states} == {mx.float64}
        sizes = [float(np.abs(np.array(state)).max()) for state in states]
        # Of the order of the values that went in, after few and after many tokens.
        assert all(0.05 < size < 20 for size in sizes)
        # Four layers of two arrays each: keys and values, or convolution inputs and state.
        assert (len(states), len(arrays(prefix.caches))) == (2, 8)
