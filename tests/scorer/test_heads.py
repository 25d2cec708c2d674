"""Candidate logits are those of the full head, which is never computed."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn

from weighbridge.scorer.engine import Engine, Mode
from weighbridge.scorer.errors import CheckpointError
from weighbridge.scorer.heads import ROW_SETS, CandidateHead, candidate_rows
from weighbridge.scorer.resident import HEAD_TOLERANCE

pytestmark = [pytest.mark.mlx, pytest.mark.usefixtures("cpu")]

CANDIDATES = (5, 96, 0, 41, 17)
TOKENS = ((3, 1, 4, 1, 5), (9, 2, 6, 5, 3))
LAST = [4, 2]
PLAIN = [("affine", bits, 32) for bits in (2, 3, 4, 5, 6, 8)]
FLOATS = [("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)]


def full_head(model: Any, candidates: tuple[int, ...] = CANDIDATES) -> np.ndarray:
    """Return the definition: all logits at all positions, then the ones asked for."""
    logits = model(mx.array(TOKENS))[mx.arange(len(LAST)), mx.array(LAST)]
    wide = logits if logits.dtype == mx.float64 else logits.astype(mx.float32)
    return np.array(wide[:, mx.array(candidates)])


def through_both(model: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the logits of the full head, gathered, and those of the candidate rows."""
    full = full_head(model)
    return full, CandidateHead(model).logits(mx.array(TOKENS), None, LAST, CANDIDATES)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_candidates_equal_the_full_head_and_gather(tiny, tied):
    full, some = through_both(tiny.model(dtype="float32", tie_word_embeddings=tied))
    # The definition of candidate logits; summed in another order, so not bitwise.
    np.testing.assert_allclose(some, full, rtol=0, atol=1e-5)
    # Columns in another order would be this far away.
    assert np.abs(some - full[:, ::-1]).max() > 0.1


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(("mode", "bits", "group"), PLAIN + FLOATS)
def test_candidates_equal_a_quantized_head(tiny, tied, mode, bits, group):
    model = tiny.model(dtype="float32", tie_word_embeddings=tied)
    nn.quantize(model, group_size=group, bits=bits, mode=mode)
    head = model.model.embed_tokens if tied else model.lm_head
    assert head["weight"].dtype in {mx.uint32, mx.uint8}
    full, some = through_both(model)
    # The packed rows are gathered with their scales and offsets, then unpacked.
    np.testing.assert_allclose(some, full, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bit_heads_are_accumulated_in_float32(tiny, dtype):
    model = tiny.model(dtype=dtype)
    hidden = model.model(mx.array(TOKENS))[mx.arange(len(LAST)), mx.array(LAST)]
    rows, _ = candidate_rows(model.model.embed_tokens, CANDIDATES)
    # The oracle: the very same 16-bit numbers, multiplied in float64.
    exact = np.array(hidden.astype(mx.float32), np.float64) @ np.array(rows, np.float64).T
    _, some = through_both(model)
    np.testing.assert_allclose(some, exact, atol=1e-5)
    assert some.dtype == np.float32


def test_float64_stays_float64(tiny):
    # Tests of exactness stand on it.
    full, some = through_both(tiny.model())
    assert some.dtype == np.float64
    np.testing.assert_allclose(some, full, rtol=0, atol=1e-12)


class CountingEmbedding(nn.Embedding):
    calls = 0

    def as_linear(self, x: Any) -> Any:
        type(self).calls += 1
        return super().as_linear(x)


class CountingLinear(nn.Linear):
    calls = 0

    def __call__(self, x: Any) -> Any:
        type(self).calls += 1
        return super().__call__(x)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_the_full_head_never_runs(tiny, tied):
    model = tiny.model(tie_word_embeddings=tied)
    head = model.model.embed_tokens if tied else model.lm_head
    head.__class__ = CountingEmbedding if tied else CountingLinear
    engine = Engine(model, chunk=16)
    calls = type(head).calls
    for mode in Mode:
        engine.score(tiny.rows(40, [3, 1, 7]), mode=mode, resident_tokens=20)
    engine.probe()
    # V columns instead of K would be the largest product of the whole prompt.
    assert type(head).calls == calls
    model(mx.array([[1, 2]]))
    # The counter does count: the model's own call goes through the full head.
    assert type(head).calls == calls + 1


# --- what models do around their heads ---


def derived(tiny: Any, call: Any, **changes: Any) -> Any:
    """Return a tiny llama whose call is another function of its class's own."""
    model = tiny.model(**{"dtype": "float32", **changes})
    plain = type(model)
    model.__class__ = type("Derived", (plain,), {"__call__": lambda *a, **k: call(plain, *a, **k)})
    return model


def capped(plain: Any, self: Any, inputs: mx.array, cache: Any = None) -> mx.array:
    return 2.0 * mx.tanh(plain.__call__(self, inputs, cache) / 2.0)


def scaled(plain: Any, self: Any, inputs: mx.array, cache: Any = None) -> mx.array:
    return plain.__call__(self, inputs, cache) / 7.0


def scaled_before(plain: Any, self: Any, inputs: mx.array, cache: Any = None) -> mx.array:
    del plain
    return self.lm_head(self.model(inputs, cache) / 7.0)


def bare_product(plain: Any, self: Any, inputs: mx.array, cache: Any = None) -> mx.array:
    del plain
    return self.model(inputs, cache) @ self.model.embed_tokens.weight.T


def looked_up(plain: Any, self: Any, inputs: mx.array, cache: Any = None) -> mx.array:
    # Depends on the other columns, which a cut head does not have.
    logits = plain.__call__(self, inputs, cache)
    return logits - logits[..., -1:]


@pytest.mark.parametrize("call", [capped, scaled, scaled_before])
def test_caps_and_scales_are_applied(tiny, call):
    changes = {"tie_word_embeddings": call is not scaled_before}
    model = derived(tiny, call, **changes)
    full, some = through_both(model)
    # Gemma 2 caps, Cohere and Granite scale, MiniCPM scales before: their own code does it.
    np.testing.assert_allclose(some, full, rtol=0, atol=1e-5)
    plain = full_head(tiny.model(dtype="float32", **changes))
    # Left out, the difference would be plain to see.
    assert np.abs(plain - full).max() > 0.05
    head = CandidateHead(model)
    assert head.check(HEAD_TOLERANCE) < 1e-5
    assert head.cut


def test_a_head_that_is_a_bare_product_is_read_whole(tiny):
    # Nothing there to cut: all columns, then the ones asked for.
    full, some = through_both(derived(tiny, bare_product))
    np.testing.assert_allclose(some, full, rtol=0, atol=1e-6)


def test_a_head_that_cannot_be_cut_is_left_whole(tiny):
    model = derived(tiny, looked_up)
    head = CandidateHead(model)
    # The last candidate stands in for the last token of the vocabulary, and shows.
    assert head.check(HEAD_TOLERANCE) > HEAD_TOLERANCE
    assert not head.cut
    some = head.logits(mx.array(TOKENS), None, LAST, CANDIDATES)
    np.testing.assert_allclose(some, full_head(model), rtol=0, atol=1e-6)


def test_a_bias_is_added(tiny):
    model = tiny.model(dtype="float32", tie_word_embeddings=False)
    model.lm_head = nn.Linear(64, 97, bias=True)
    model.lm_head.bias = mx.arange(97).astype(mx.float32)
    full, some = through_both(model)
    np.testing.assert_allclose(some, full, rtol=0, atol=1e-5)


def test_a_head_of_another_kind_is_read_whole(tiny):
    class Squared(nn.Module):
        def __call__(self, x: mx.array) -> mx.array:
            return mx.concatenate([x * x, x[..., :33]], axis=-1)

    model = tiny.model(dtype="float32", tie_word_embeddings=False)
    model.lm_head = Squared()
    # Nobody knows what its rows would be: 64 squares and 33 plain numbers.
    full, some = through_both(model)
    np.testing.assert_allclose(some, full, rtol=0, atol=1e-6)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_the_vocabulary_is_the_width_of_the_logits(tiny, tied):
    # 97 in the configuration of the tiny model.
    assert CandidateHead(tiny.model(tie_word_embeddings=tied)).vocabulary == 97


def test_a_model_without_logits_is_refused():
    # Such as an encoder: there is nothing to read.
    with pytest.raises(CheckpointError, match="must turn a plain prompt into logits") as caught:
        Engine(nn.Linear(2, 2))
    assert caught.value.hint


def test_rows_are_kept_for_some_sets_of_candidates(tiny):
    head = CandidateHead(tiny.model(dtype="float32"))
    for first in range(ROW_SETS + 5):
        head.logits(mx.array(TOKENS), None, LAST, (first, first + 1))
    # A process that meets many schemas must not keep rows of all of them.
    assert 1 <= len(head._rows) <= ROW_SETS


def test_an_engine_that_goes_leaves_the_model_as_it_was(tiny):
    model = tiny.model(dtype="float32")
    before = full_head(model)
    engine = Engine(model)
    engine.score(tiny.rows(8, [2, 3]))
    del engine
    # No reference from the model to its reader: weights go when the model goes.
    np.testing.assert_array_equal(full_head(model), before)
