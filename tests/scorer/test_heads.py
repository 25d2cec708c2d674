"""Candidate logits are those of the full head, which is never computed."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn

from weighbridge.scorer.backend import PROBE_TOLERANCE
from weighbridge.scorer.engine import Engine
from weighbridge.scorer.errors import CheckpointError
from weighbridge.scorer.heads import ROWS_LIMIT_BYTES, CandidateHead, HeadCut, candidate_rows
from weighbridge.scorer.rows import Mode

pytestmark = [pytest.mark.mlx, pytest.mark.usefixtures("cpu")]

CANDIDATES = (5, 96, 0, 41, 17)
TOKENS = ((3, 1, 4, 1, 5), (9, 2, 6, 5, 3))
LAST = [4, 2]
PLAIN = [("affine", bits, 32) for bits in (2, 3, 4, 5, 6, 8)]
TOLERANCE = PROBE_TOLERANCE["float32"]
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


def centred(plain: Any, self: Any, inputs: mx.array, cache: Any = None) -> mx.array:
    logits = plain.__call__(self, inputs, cache)
    return logits - logits.mean(axis=-1, keepdims=True)


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
    assert CandidateHead(model).check(TOLERANCE) is HeadCut.COLUMNS


def uncut(model: Any, cut: HeadCut) -> None:
    """Check that a head is left less cut, and right all the same."""
    head = CandidateHead(model)
    assert head.check(TOLERANCE) is cut
    assert head.cut is cut
    some = head.logits(mx.array(TOKENS), None, LAST, CANDIDATES)
    np.testing.assert_allclose(some, full_head(model), rtol=0, atol=1e-5)


def test_a_bare_product_with_tied_embeddings_is_cut_to_the_candidates(tiny):
    model = derived(tiny, bare_product)
    plain = full_head(model)
    # MiniCPM, Llama 4 and Seed OSS take the weights themselves: they are given K rows of them.
    uncut(model, HeadCut.ALL_POSITIONS)
    widths: list[int] = []

    class Watched(CandidateHead):
        def factor(self, head: Any, whole: mx.array) -> mx.array:
            rows = super().factor(head, whole)
            widths.append(rows.shape[0])
            return rows

    head = Watched(model)
    head.cut = HeadCut.ALL_POSITIONS
    widths.clear()
    head.logits(mx.array(TOKENS), None, LAST, CANDIDATES)
    # Tokens are embedded by the whole table; then as many columns as candidates.
    assert widths == [97, len(CANDIDATES)]
    np.testing.assert_array_equal(full_head(model), plain)


def test_a_bare_product_with_a_bare_array_is_read_whole(tiny):
    def bare_array(plain: Any, self: Any, inputs: mx.array, cache: Any = None) -> mx.array:
        del plain
        return self.model(inputs, cache) @ self.table.T

    model = derived(tiny, bare_array)
    model.table = mx.array(model.model.embed_tokens.weight)
    # No layer to cut, as in Talkie: all columns at all positions.
    uncut(model, HeadCut.NONE)


def test_logits_written_by_token_are_never_cut_to_columns(tiny):
    def forbidding(plain: Any, self: Any, inputs: mx.array, cache: Any = None) -> mx.array:
        logits = plain.__call__(self, inputs, cache)
        # MLX checks no bounds: with K columns this would write into foreign memory.
        assert logits.shape[-1] == 97
        logits[..., self.unused] = -float("inf")
        return logits

    model = derived(tiny, forbidding)
    model.unused = mx.array([13, 96])
    # Phi 3 small does so. Some of the candidates of the check are forbidden ones.
    head = CandidateHead(model)
    assert head.check(TOLERANCE) is HeadCut.POSITIONS
    some = head.logits(mx.array(TOKENS), None, LAST, (5, 41))
    np.testing.assert_allclose(some, full_head(model, (5, 41)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("call", [looked_up, centred])
def test_logits_that_depend_on_the_others_need_all_columns(tiny, call):
    # The last candidate stands in for the last token of the vocabulary, and shows; so does
    # the mean over some columns instead of all. One position is enough.
    uncut(derived(tiny, call), HeadCut.POSITIONS)


def test_small_logits_are_compared_by_their_spread(tiny):
    def faint(plain: Any, self: Any, inputs: mx.array, cache: Any = None) -> mx.array:
        return centred(plain, self, inputs, cache) / 1000.0

    # Differences of a thousandth are all these logits have; a fixed bound would not see them.
    uncut(derived(tiny, faint), HeadCut.POSITIONS)


def test_a_table_as_wide_as_the_vocabulary_is_no_head(tiny):
    def sideways(plain: Any, self: Any, inputs: mx.array, cache: Any = None) -> mx.array:
        del plain
        hidden = self.model(inputs, cache)
        # Used on its own, and again inside: two answers, one of them not the logits.
        return self.lm_head(hidden) + self.other(hidden) * self.other(hidden).sum(-1)[..., None]

    model = derived(tiny, sideways, tie_word_embeddings=False)
    model.other = nn.Linear(64, 97, bias=False)
    mx.eval(model.parameters())
    uncut(model, HeadCut.POSITIONS)


def test_a_model_that_reads_its_last_position_only_is_refused(tiny):
    def last_only(plain: Any, self: Any, inputs: mx.array, cache: Any = None) -> mx.array:
        return plain.__call__(self, inputs, cache)[:, -1:]

    # Rows of unequal length are read at positions of their own.
    with pytest.raises(CheckpointError, match="logits for each of 4 tokens"):
        CandidateHead(derived(tiny, last_only))


def test_logits_that_are_no_numbers_are_refused(tiny):
    model = tiny.model(dtype="float32")
    model.model.norm.weight = mx.full((64,), float("nan"))
    # Told once, when the checkpoint is loaded, and not once for each document.
    with pytest.raises(CheckpointError, match="must be finite numbers") as caught:
        CandidateHead(model).check(TOLERANCE)
    assert caught.value.hint


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


def test_rows_are_kept_up_to_a_size(tiny, monkeypatch):
    monkeypatch.setattr("weighbridge.scorer.heads.ROWS_LIMIT_BYTES", 3 * 2 * 64 * 4)
    head = CandidateHead(tiny.model(dtype="float32"))
    sets = [(first, first + 1) for first in range(5)]
    for candidates in (*sets, sets[2]):
        head.logits(mx.array(TOKENS), None, LAST, candidates)
        assert head.rows_nbytes <= 3 * 2 * 64 * 4
    # Two rows of 64 float32 numbers a set; three sets fit, the latest ones.
    assert [candidates for _, candidates in head._rows] == [sets[3], sets[4], sets[2]]
    assert ROWS_LIMIT_BYTES > 2**20


def test_a_model_keeps_no_reader(tiny):
    import weakref

    model = tiny.model(dtype="float32")
    before = full_head(model)
    heads = [CandidateHead(model), CandidateHead(model)]
    # The latest one reads; the other is right as well, and computes all of it.
    for some in [head.logits(mx.array(TOKENS), None, LAST, CANDIDATES) for head in heads]:
        np.testing.assert_allclose(some, before, rtol=0, atol=1e-5)
    assert type(model.model.embed_tokens).__mro__[1] is nn.Embedding
    gone = [weakref.ref(head) for head in heads]
    del heads
    # At once, without the garbage collector: weights of gigabytes must not wait for it.
    assert [each() for each in gone] == [None, None]
    np.testing.assert_array_equal(full_head(model), before)
    weights = weakref.ref(model)
    del model
    assert weights() is None
