"""Levels of rows: documents, their fields, labels of these; as exact as whole prompts.

Recurrent layers are the hard part: rows are padded, and what goes on from one needs its state
at its own end.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import ArraysCache

from weighbridge.scorer import branching
from weighbridge.scorer.branching import UnmaskedError, pack, pack_twigs
from weighbridge.scorer.caches import Prefix, arrays
from weighbridge.scorer.engine import Engine
from weighbridge.scorer.heads import relative_difference
from weighbridge.scorer.rows import Row, common_prefix
from weighbridge.scorer.trees import Level, at_once, mask_bytes, plant, run_levels

pytestmark = [pytest.mark.mlx, pytest.mark.usefixtures("cpu")]

EXACT = 1e-9
CANDIDATES = (1, 2, 3, 50, 60)
FAMILIES = ("llama", "qwen3_5", "gemma3_text")


@pytest.fixture(scope="module")
def engines(tiny) -> Callable[[str], Engine]:
    """Return an engine of float64, one for each architecture."""
    made: dict[str, Engine] = {}

    def get(architecture: str) -> Engine:
        if architecture not in made:
            made[architecture] = Engine(tiny.model(architecture=architecture), chunk=8)
        return made[architecture]

    return get


def drawn(lengths: Sequence[int], seed: int = 2) -> tuple[tuple[int, ...], ...]:
    draw = np.random.default_rng(seed)
    return tuple(tuple(draw.integers(0, 97, length).tolist()) for length in lengths)


def three_levels(
    first: Sequence[int], second: Sequence[int], third: Sequence[int], seed: int = 0
) -> list[Level]:
    """Return rows of some lengths, each of which goes on from any row of the level before."""
    draw = np.random.default_rng(seed)
    levels = [Level(drawn(first, 2), (), (None,) * len(first))]
    place = 0
    for number, lengths in enumerate((second, third)):
        owners = draw.integers(0, len(levels[-1].rows), len(lengths)).tolist()
        places = tuple(range(place, place + len(lengths)))
        levels.append(Level(drawn(lengths, 3 + number), tuple(owners), places))
        place += len(lengths)
    return levels


def whole(levels: Sequence[Level]) -> list[tuple[int, ...]]:
    """Return the tokens of all rows that are read, by place."""
    found: dict[int, tuple[int, ...]] = {}
    before: list[tuple[int, ...]] = [()]
    for level in levels:
        owners = level.owners or (0,) * len(level.rows)
        before = [before[owner] + row for owner, row in zip(owners, level.rows, strict=True)]
        found |= {
            place: row for place, row in zip(level.places, before, strict=True) if place is not None
        }
    return [found[place] for place in sorted(found)]


def run_with(engine: Engine) -> Any:
    return partial(engine._run, union=CANDIDATES)


def advance_with(engine: Engine) -> Any:
    def advance(caches: list[Any], rows: Sequence[tuple[int, ...]]) -> None:
        width = max(map(len, rows))
        padded = [row + (engine.PAD,) * (width - len(row)) for row in rows]
        engine._head.advance(mx.array(padded), caches)

    return advance


def off(tiny: Any, engine: Engine, prefix: Prefix, levels: Sequence[Level]) -> float:
    """Return how far levels are from whole prompts computed without caches or the engine."""
    found = run_levels(run_with(engine), prefix, levels, advance_with(engine))
    rows = [Row((*prefix.tokens, *each), CANDIDATES) for each in whole(levels)]
    return relative_difference(found, np.array(tiny.full(engine._model, rows)))


LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=4)


@pytest.mark.parametrize("architecture", FAMILIES)
@settings(max_examples=25)
@given(
    prefix=st.integers(1, 20),
    first=LENGTHS,
    second=LENGTHS,
    third=LENGTHS,
    seed=st.integers(0, 99),
)
def test_levels_of_any_lengths_equal_whole_prompts(
    tiny, engines, architecture, prefix, first, second, third, seed
):
    engine = engines(architecture)
    parent = engine.prefill(drawn([prefix])[0])
    # Windows of 16 end in any level; convolutions of 4 reach over two levels.
    assert off(tiny, engine, parent, three_levels(first, second, third, seed)) <= EXACT


@pytest.mark.parametrize(
    "first",
    [[1, 1, 1], [1, 4, 1], [2, 3, 1], [3, 9], [40, 1, 39], [33, 64, 65]],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_states_at_the_end_of_padded_rows(tiny, dtype, first):
    engine = Engine(tiny.model(architecture="qwen3_5", dtype=dtype))
    parent = engine.prefill(drawn([20])[0])
    # Rows of one token, shorter than the convolution, and of more than one chunk of 32.
    levels = three_levels(first, [1, 2, 1, 5], [1, 1, 1])
    assert off(tiny, engine, parent, levels) <= (EXACT if dtype == "float64" else 1e-4)


def test_levels_leave_the_prefix_bit_identical(tiny, engines):
    for architecture in FAMILIES:
        engine = engines(architecture)
        parent = engine.prefill(drawn([20])[0])
        before = [np.array(leaf).tobytes() for leaf in arrays(parent.caches)]
        run_levels(run_with(engine), parent, three_levels([3, 1], [2, 5], [1]))
        assert [np.array(leaf).tobytes() for leaf in arrays(parent.caches)] == before


def test_documents_nobody_reads_run_no_head(tiny, engines):
    engine = engines("qwen3_5")
    parent = engine.prefill(drawn([20])[0])
    levels = three_levels([3, 5], [2, 5], [1])
    passes: list[int] = []

    def run(caches: list[Any], rows: Sequence[tuple[int, ...]]) -> np.ndarray:
        passes.append(len(rows))
        return run_with(engine)(caches, rows)

    found = run_levels(run, parent, levels, advance_with(engine))
    assert passes == [2, 1]
    # Without a way to leave the head out, the logits of documents are computed and dropped.
    assert np.array_equal(run_levels(run, parent, levels), found)
    assert passes == [2, 1, 2, 2, 1]


# --- negative controls ---


def test_control_states_behind_the_padding_show(tiny, engines, monkeypatch):
    monkeypatch.setattr(branching, "_keep_ends", lambda *_: None)
    engine = engines("qwen3_5")
    parent = engine.prefill(drawn([20])[0])
    assert off(tiny, engine, parent, three_levels([9, 2, 5], [3, 1, 2, 4], [1])) > 1e-3
    # Rows of one length have no padding, and their states are those at their ends.
    assert off(tiny, engine, parent, three_levels([5, 5, 5], [3, 3], [1])) <= EXACT
    # And the probe does not let it pass.
    engine.probe()
    assert (engine.packs, engine.trees) == (True, False)


def test_control_states_of_another_row_show(tiny, engines, monkeypatch):
    take = branching._taken_over
    monkeypatch.setattr(
        branching, "_taken_over", lambda cache, owners: take(cache, (owners + 1) % 3)
    )
    engine = engines("qwen3_5")
    parent = engine.prefill(drawn([20])[0])
    assert off(tiny, engine, parent, three_levels([9, 2, 5], [3, 1, 2], [1])) > 1e-3


def test_control_lengths_that_layers_share_show(tiny, engines, monkeypatch):
    def shared(caches: Sequence[Any], lengths: Sequence[int]) -> None:
        once = mx.array(list(lengths))
        for cache in caches:
            if isinstance(cache, ArraysCache):
                cache.lengths = once

    monkeypatch.setattr(branching, "_keep_ends", shared)
    engine = engines("qwen3_5")
    parent = engine.prefill(drawn([20])[0])
    # mlx-lm counts lengths down in place: the next layer would find rows that have ended.
    assert off(tiny, engine, parent, three_levels([9, 2, 5], [3, 1, 2, 4], [1])) > 1e-3


# --- what cannot be gone on from ---


def test_other_caches_are_refused():
    keys = mx.zeros((1, 1, 8, 4))
    kept = branching.RotatingKVCache.from_state((keys, keys, 8, 4, 16, 8))
    caches = pack(Prefix(tuple(range(8)), (kept,)), [2, 2], ends=True)
    with pytest.raises(UnmaskedError, match="cannot go on from a RotatingKVCache"):
        pack_twigs(caches, [1], [0])


def test_an_architecture_without_lengths_is_found_out(tiny, monkeypatch):
    from mlx_lm.models import qwen3_5

    attend = qwen3_5.GatedDeltaNet.__call__

    class Deaf(qwen3_5.GatedDeltaNet):
        """As the recurrent layers of OLMo Hybrid and Jamba are."""

        def __call__(self, inputs: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
            if cache is not None:
                cache.lengths = None
            return attend(self, inputs, None, cache)

    model = tiny.model(architecture="qwen3_5")
    for layer in model.layers:
        if layer.is_linear:
            layer.linear_attn.__class__ = Deaf
    engine = Engine(model)
    assert engine.probe() <= EXACT
    assert (engine.packs, engine.trees) == (True, False)


# --- several documents ---


def documents(lengths: Sequence[int], fields: int) -> list[list[tuple[int, ...]]]:
    """Return rows of documents of some lengths, each field with two labels going on from it."""
    questions = drawn([3, 1, 7, 2][:fields], 5)
    return [
        [
            (number, *text, index, *question, *label)
            for index, question in enumerate(questions)
            for label in ((), (5,), (6, 7))
        ]
        for number, text in enumerate(drawn(lengths, 6))
    ]


@pytest.mark.parametrize("twigs", [False, True])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_documents_together_equal_whole_prompts(tiny, engines, architecture, twigs):
    engine = engines(architecture)
    parent = engine.prefill(drawn([20])[0])
    asked = documents([1, 30, 4, 11], 4)
    levels = plant(asked, twigs=twigs)
    assert levels is not None
    # A pass for documents and one for rows, or one each for documents, fields, and labels.
    rows = [len(level.rows) for level in levels]
    assert rows == ([4, 16, 32] if twigs else [4, 48])
    # Places are those of all rows, document by document.
    assert whole(levels) == [row for document in asked for row in document]
    assert off(tiny, engine, parent, levels) <= EXACT


@given(
    documents=st.lists(
        st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple), min_size=1),
        min_size=1,
        max_size=4,
    ),
    twigs=st.booleans(),
)
def test_levels_hold_every_row(documents, twigs):
    levels = plant(documents, twigs=twigs)
    if levels is None:
        # A document of which the rows share nothing has no stem.
        assert any(common_prefix(rows) == 0 for rows in documents)
        return
    assert whole(levels) == [row for rows in documents for row in rows]
    assert all(row for level in levels for row in level.rows)
    # The mask as it is made, without padding, is no larger than what is counted.
    held, keys = 7, 0
    for level in levels:
        keys += sum(map(len, level.rows))
        assert level.packed * (held + keys) <= mask_bytes(held, levels)


def test_how_many_documents_at_once():
    # 31 tokens and three fields of 4, 2 and 8, padded: 31 + 3 · 8 = 55 for each document.
    asked = [rows[::3] for rows in documents([30] * 9, 3)]
    # 5 · 55 = 275 of 320 tokens.
    assert at_once(asked, 200) == 5
    # Few enough are all taken; a long one stands alone; nothing shared, nothing together.
    assert at_once(asked[:2], 200) == 2
    assert at_once(documents([400, 1], 2), 200) == 1
    assert at_once([[(1,), (2,)], [(1,), (2,)]], 200) == 1
    # Behind a prefix this long the mask alone is too much.
    assert at_once(asked, 2**17) == 1
