"""Candidate logits are those of the full head, which is never computed."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn

from weighbridge.scorer.engine import Engine, Mode
from weighbridge.scorer.errors import CheckpointError
from weighbridge.scorer.heads import (
    candidate_logits,
    candidate_rows,
    head_module,
    vocabulary_size,
)

pytestmark = [pytest.mark.mlx, pytest.mark.usefixtures("cpu")]

CANDIDATES = (5, 96, 0, 41, 17)
PLAIN = [("affine", bits, 32) for bits in (2, 3, 4, 5, 6, 8)]
FLOATS = [("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)]


def through_both(model: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the logits of the full head, gathered, and those of the candidate rows."""
    tokens = mx.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    full = model(tokens)[:, -1][:, mx.array(CANDIDATES)]
    rows = candidate_rows(model, CANDIDATES)
    return np.array(full), np.array(candidate_logits(model.model(tokens)[:, -1], rows))


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
    assert head_module(model)["weight"].dtype in {mx.uint32, mx.uint8}
    full, some = through_both(model)
    # The packed rows are gathered with their scales and offsets, then unpacked.
    np.testing.assert_allclose(some, full, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bit_heads_are_accumulated_in_float32(tiny, dtype):
    model = tiny.model(dtype=dtype)
    hidden = model.model(mx.array([[3, 1, 4, 1, 5]]))[:, -1]
    rows = candidate_rows(model, CANDIDATES)
    # The oracle: the very same 16-bit numbers, multiplied in float64.
    exact = np.array(hidden.astype(mx.float32), np.float64) @ np.array(rows, np.float64).T
    np.testing.assert_allclose(np.array(candidate_logits(hidden, rows)), exact, atol=1e-5)
    assert rows.dtype == mx.float32


def test_float64_stays_float64(tiny):
    # Tests of exactness stand on it.
    assert candidate_rows(tiny.model(), CANDIDATES).dtype == mx.float64


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
def test_the_full_head_is_never_called(tiny, tied, monkeypatch):
    model = tiny.model(tie_word_embeddings=tied)
    kind = CountingEmbedding if tied else CountingLinear
    monkeypatch.setattr(kind, "calls", 0)
    head_module(model).__class__ = kind
    engine = Engine(model, chunk=16)
    for mode in Mode:
        engine.score(tiny.rows(40, [3, 1, 7]), mode=mode, resident_tokens=20)
    engine.probe()
    # V columns instead of K would be the largest product of the whole prompt.
    assert kind.calls == 0
    model(mx.array([[1, 2]]))
    # The counter does count: the model's own call goes through the full head.
    assert kind.calls == 1


def test_a_head_whose_logits_are_capped_shows_at_load(tiny):
    class Capped(type(tiny.model())):
        def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
            return 2.0 * mx.tanh(super().__call__(inputs, cache) / 2.0)

    model = tiny.model(dtype="float32")
    # A plain head agrees with the whole model up to rounding.
    assert Engine(model).head_difference() < 1e-5
    model.__class__ = Capped
    # Gemma caps like this; candidate rows alone would give other probabilities.
    assert Engine(model).head_difference() > 1e-2


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_the_vocabulary_is_the_rows_of_the_head(tiny, tied):
    # 97 in the configuration of the tiny model.
    assert vocabulary_size(tiny.model(tie_word_embeddings=tied)) == 97


def test_a_head_with_a_bias_is_refused(tiny):
    model = tiny.model(tie_word_embeddings=False)
    model.lm_head = nn.Linear(64, 97, bias=True)
    # Rows alone would drop the bias and silently change every answer.
    with pytest.raises(CheckpointError, match="no bias"):
        candidate_rows(model, CANDIDATES)


def test_a_head_that_is_not_linear_is_refused(tiny):
    model = tiny.model(tie_word_embeddings=False)
    model.lm_head = nn.Bilinear(4, 4, 97, bias=False)
    # Nobody knows what its rows mean.
    with pytest.raises(CheckpointError, match="must be linear, got Bilinear"):
        candidate_rows(model, CANDIDATES)


def test_a_model_without_a_head_is_refused():
    # Such as an encoder: there is nothing to project on.
    with pytest.raises(CheckpointError, match="must have an output head") as caught:
        head_module(nn.Linear(2, 2))
    assert caught.value.hint


def test_a_model_without_a_backbone_is_refused():
    # The engine calls the backbone, never the whole model.
    with pytest.raises(CheckpointError, match="must have a backbone"):
        Engine(nn.Linear(2, 2))
