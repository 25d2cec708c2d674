"""One pass over documents, fields and labels: the logits of whole prompts, or not used."""

from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weighbridge.scorer import branching, one_pass
from weighbridge.scorer.branching import UnmaskedError
from weighbridge.scorer.caches import Prefix, arrays
from weighbridge.scorer.engine import Engine
from weighbridge.scorer.heads import relative_difference
from weighbridge.scorer.one_pass import pack_trie, run_trie
from weighbridge.scorer.rows import Row
from weighbridge.scorer.trials import Trial, try_one_pass
from weighbridge.scorer.trie import Trie, grow

pytestmark = [pytest.mark.mlx, pytest.mark.usefixtures("cpu")]

EXACT = 1e-9
UNION = (1, 2, 3, 50, 96)
ATTENDING = ("llama", "qwen2", "qwen3", "gemma3_text", "cohere2")
SHAPES = ("one document", "documents", "labels", "single tokens")


def read(engine: Engine) -> one_pass.Read:
    return partial(engine._head.logits, candidates=UNION)


def text(length: int, seed: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, 97, length).tolist())


def shaped(shape: str) -> list[tuple[int, ...]]:
    """Return what stands behind a prefix, in an order of no meaning."""
    fields = [text(length, 10 + length) for length in (9, 11, 3)]
    if shape == "single tokens":
        return [(5,), (3,), (5,), (1,)]
    if shape == "one document":
        return [(*text(21, 2), *field) for field in fields]
    # Longer than a window of 16, shorter, a single token; the last two begin alike.
    starts = [text(21, 2), text(4, 3), (7,), (*text(4, 3), 96, 5)]
    rows = [(*start, *field) for start in starts for field in fields]
    if shape == "labels":
        labels = [(1,), (2,), (2, 3), (4, 5, 6, 7), (4, 5, 6)]
        # Behind each question, which is read itself; and some rows twice.
        rows += [(*row, *label) for row in rows[::2] for label in labels]
        rows += rows[3:5]
    return [rows[each] for each in np.random.default_rng(0).permutation(len(rows))]


def whole(tiny: Any, model: Any, prefix: Prefix, rows: list[tuple[int, ...]]) -> np.ndarray:
    return np.array(tiny.full(model, [Row((*prefix.tokens, *row), UNION) for row in rows]))


@pytest.mark.parametrize("held", [1, 12, 15, 16, 17, 40])
@pytest.mark.parametrize("architecture", ATTENDING)
def test_one_pass_equals_whole_prompts(tiny, architecture, held):
    model = tiny.model(architecture=architecture)
    engine = Engine(model, chunk=8)
    prefix = engine.prefill(text(held, 1))
    before = [np.array(leaf).tobytes() for leaf in arrays(prefix.caches)]
    for shape in SHAPES:
        rows = shaped(shape)
        reference, trie = whole(tiny, model, prefix, rows), grow(rows)
        for width in (None, 1, 2, 5, 100):
            # Windows of 16 end in the prefix, in a document and in a field; a segment of 100
            # is as wide as the longest stretch.
            apart = relative_difference(run_trie(read(engine), prefix, trie, width), reference)
            assert apart <= EXACT, (shape, width)
    # What is resident serves the next documents.
    assert [np.array(leaf).tobytes() for leaf in arrays(prefix.caches)] == before


@pytest.mark.parametrize("architecture", ATTENDING)
def test_one_pass_of_float32_rounds_no_more_than_others(tiny, architecture):
    model = tiny.model(architecture=architecture, dtype="float32")
    engine = Engine(model)
    prefix = engine.prefill(text(200, 1))
    for shape in SHAPES:
        rows = shaped(shape)
        found = run_trie(read(engine), prefix, grow(rows))
        assert relative_difference(found, whole(tiny, model, prefix, rows)) < 1e-5


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
@settings(max_examples=25)
@given(
    rows=st.lists(
        st.lists(st.integers(0, 2), min_size=1, max_size=20).map(tuple), min_size=1, max_size=8
    ),
    held=st.integers(1, 24),
    width=st.integers(1, 21),
)
def test_any_rows_in_one_pass_equal_whole_prompts(tiny, architecture, rows, held, width):
    with mx.stream(mx.cpu):
        model = tiny.model(architecture=architecture, sliding_window=5)
        engine = Engine(model)
        prefix = engine.prefill(text(held, 1))
        found = run_trie(read(engine), prefix, grow(rows), width)
        assert relative_difference(found, whole(tiny, model, prefix, rows)) <= EXACT


def test_documents_do_not_know_of_each_other(tiny):
    engine = Engine(tiny.model())
    prefix = engine.prefill(text(20, 1))
    rows = shaped("documents")
    together = run_trie(read(engine), prefix, grow(rows), 4)
    alone = [run_trie(read(engine), prefix, grow([row]), 4)[0] for row in rows]
    assert tiny.apart(list(together), alone) <= EXACT


def test_caches_are_used_once(tiny):
    engine = Engine(tiny.model())
    trie = grow([(1, 2), (3, 4)])
    caches = pack_trie(engine.prefill(text(20, 1)), trie, trie.segments(2))
    read(engine)(mx.array([[1, 2], [3, 4]]), caches, [1, 1])
    with pytest.raises(UnmaskedError):
        read(engine)(mx.array([[1, 2], [3, 4]]), caches, [1, 1])


# --- where it is used, and where not ---


def tried(tiny: Any, **options: Any) -> Trial:
    engine = Engine(tiny.model(**options))
    return try_one_pass(read(engine), engine.prefill(text(32, 1)), engine.probe())


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ATTENDING)
def test_the_probe_lets_right_models_pass(tiny, architecture, dtype):
    trial = tried(tiny, architecture=architecture, dtype=dtype)
    assert (trial.passes, trial.reason) == (True, "")
    assert trial.difference <= {"float64": EXACT, "float32": 1e-5, "bfloat16": 5e-2}[dtype]


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("qwen3_5", "all layers must keep keys and values by token"),
        ("gemma2", "Cannot reshape"),  # adds the mask to scores of five axes
    ],
)
def test_the_probe_says_why_others_do_not(tiny, architecture, reason):
    trial = tried(tiny, architecture=architecture)
    assert not trial.passes
    assert reason in trial.reason


def derived(tiny: Any, call: Any) -> Any:
    """Return a llama whose layers are called in another way."""
    from mlx_lm.models import llama

    model = tiny.model()
    model.model.__class__ = type("Own", (llama.LlamaModel,), {"__call__": call})
    return model


def test_a_model_with_a_mask_of_its_own_is_found_out(tiny):
    def own_mask(self: Any, inputs: Any, cache: Any = None, *_: Any) -> Any:
        hidden = self.embed_tokens(inputs)
        for layer, each in zip(self.layers, cache or [None] * len(self.layers), strict=True):
            hidden = layer(hidden, "causal", cache=each)
        return self.norm(hidden)

    engine = Engine(derived(tiny, own_mask))
    trial = try_one_pass(read(engine), engine.prefill(text(32, 1)), engine.probe())
    assert not trial.passes
    assert "must attend to packed keys with their mask" in trial.reason


def test_a_model_with_one_position_for_all_rows_is_found_out(tiny):
    from mlx_lm.models import llama

    def learned(self: Any, inputs: Any, cache: Any = None, *_: Any) -> Any:
        start = int(cache[0].offset) if cache else 0
        seen = self.embed_tokens(inputs)
        places = mx.arange(start, start + inputs.shape[1])[:, None] / 50
        return llama.LlamaModel.__call__(self, inputs, cache, seen + places)

    engine = Engine(derived(tiny, learned))
    # Packed branches start at one position, and are right.
    forked = engine.probe()
    assert engine.packs
    trial = try_one_pass(read(engine), engine.prefill(text(32, 1)), forked)
    assert not trial.passes


def test_forks_that_are_off_prove_nothing(tiny):
    engine = Engine(tiny.model())
    trial = try_one_pass(read(engine), engine.prefill(text(32, 1)), 0.5)
    assert not trial.passes
    assert "forked branches differ" in trial.reason


# --- negative controls: each planted fault is larger than what is allowed ---


def sees_all(mask: Any, rows: Any, held: int, window: int) -> list[np.ndarray]:
    before, own = mask(rows, held, window)
    return [before, np.ones_like(own)]


def sees_a_later_field(mask: Any, rows: Any, held: int, window: int) -> list[np.ndarray]:
    before, own = mask(rows, held, window)
    own[..., -1] = True
    return [before, own]


def misses_the_first(mask: Any, rows: Any, held: int, window: int) -> list[np.ndarray]:
    before, own = mask(rows, held, window)
    own[1:, :, 0] = False
    return [before, own]


def misses_the_prefix(mask: Any, rows: Any, held: int, window: int) -> list[np.ndarray]:
    before, own = mask(rows, held, window)
    before = before.copy()
    before[..., 0] = False
    return [np.broadcast_to(before, (*own.shape[:2], held)), own]


@pytest.mark.parametrize(
    "fault", [sees_all, sees_a_later_field, misses_the_first, misses_the_prefix]
)
def test_control_a_wrong_mask_shows(tiny, monkeypatch, fault):
    right = one_pass._Segments._visible
    monkeypatch.setattr(
        one_pass._Segments,
        "_visible",
        lambda rows, held, window: fault(right, rows, held, window),
    )
    trial = tried(tiny)
    assert not trial.passes
    assert "one pass differs by" in trial.reason


def test_control_shifted_positions_show(tiny, monkeypatch):
    def shifted(prefix: Prefix, trie: Trie, segments: Any) -> list[Any]:
        caches = pack_trie(prefix, trie, segments)
        for cache in caches:
            cache.offset = mx.maximum(cache.offset, cache.offset.min() + 1)
        return caches

    monkeypatch.setattr(one_pass, "pack_trie", shifted)
    # Only what starts at the first position is off, by one.
    assert not tried(tiny).passes


@pytest.mark.parametrize("by", [-1, 1])
def test_control_a_window_off_by_one_shows(tiny, monkeypatch, by):
    model = tiny.model(architecture="gemma3_text")
    engine = Engine(model)
    prefix, rows = engine.prefill(text(20, 1)), shaped("documents")
    reference = whole(tiny, model, prefix, rows)
    right = branching.PackedRows.mask
    monkeypatch.setattr(
        branching.PackedRows,
        "mask",
        lambda self, kind, held, window: right(self, kind, held, window + by * (window == 16)),
    )
    assert relative_difference(run_trie(read(engine), prefix, grow(rows)), reference) > 1e-4
