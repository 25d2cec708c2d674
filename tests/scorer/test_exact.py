"""All ways of computing rows give the same logits, on every architecture, in float64.

MLX holds float64 arrays, but computes norms, rotary positions, softmax, exponentials and
convolutions of them through float32 (see `test_float64_passes_through_float32`). Last-bit
differences are rounded away there, or, rarely, to the next float32. So what 1e-12 finds are
faults from about 1e-10 of a hidden state on; `test_exact_controls.py` plants 1e-9.
`test_without_float32_in_between` replaces those operations by exact ones.
"""

import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models import gated_delta, llama, qwen3_next

from weighbridge.scorer import branching
from weighbridge.scorer.caches import Prefix
from weighbridge.scorer.engine import Engine
from weighbridge.scorer.rows import Mode, Row

pytestmark = [pytest.mark.mlx, pytest.mark.usefixtures("cpu")]

EXACT = 1e-12
FAMILIES = ("llama", "qwen3_5", "gemma3_text")  # attention, recurrence, windows
OTHERS = ("qwen2", "qwen3", "gemma2", "cohere2")
ALL = (*FAMILIES, *OTHERS)
WINDOWED = ("gemma3_text", "cohere2")
WINDOW = 16


@pytest.fixture(autouse=True, params=["forked", "packed"])
def way(request, monkeypatch) -> None:
    """Branch in both ways, whichever of them is faster for prompts as short as these."""
    if request.param == "packed":
        monkeypatch.setattr(branching, "PREFIX_LEAST", 1)
        monkeypatch.setattr(branching, "PREFIX_SHARE", 1000)
        make = Engine.__init__

        def probed(self: Engine, *args: Any, **options: Any) -> None:
            make(self, *args, **options)
            self.probe()
            assert self.packs is (args[0].model_type != "gemma2")

        monkeypatch.setattr(Engine, "__init__", probed)


def contents(prefix: Prefix) -> list[Any]:
    """Return all that the caches hold, arrays as bytes, slack behind the offset included."""
    leaves: Any = tree_flatten([cache.state for cache in prefix.caches])
    return [
        (name, leaf.shape, np.array(leaf).tobytes()) if isinstance(leaf, mx.array) else (name, leaf)
        for name, leaf in leaves
    ]


@pytest.mark.parametrize("architecture", ALL)
def test_whole_prompts_are_the_models_own_logits(tiny, architecture):
    model, rows = tiny.model(architecture=architecture), tiny.rows(20, [3, 1, 7])
    found, _ = Engine(model).score(rows, mode=Mode.INDEPENDENT)
    # mlx-lm's whole model, called as anyone would, is the oracle: caps and scales of the
    # logits included. The other tests then compare with `independent`.
    assert tiny.apart(tiny.full(model, rows), found) <= EXACT
    # Agreement would mean nothing if all logits were nearly the same, or in float32.
    assert np.array(found).std() > 0.3
    assert {each.dtype for each in found} == {np.dtype(np.float64)}


@pytest.mark.parametrize("architecture", ALL)
def test_every_token_of_a_prompt_shows(tiny, architecture):
    model, (row,) = tiny.model(architecture=architecture), tiny.rows(24, [3])
    (logits,) = tiny.full(model, [row])
    for position in range(len(row.tokens)):
        changed = list(row.tokens)
        changed[position] = (changed[position] + 1) % 97
        (other,) = tiny.full(model, [Row(tuple(changed), row.candidates)])
        # Otherwise a prefix that is lost, or shifted, would go unseen.
        assert np.abs(logits - other).max() > 1e-4


@pytest.mark.parametrize("prefix", [1, 15, 17, 63, 64, 65])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_prefixes_around_chunk_ends(tiny, architecture, prefix):
    engine = Engine(tiny.model(architecture=architecture), chunk=32)
    # 63, 64 and 65 end before, at and behind the second chunk; unequal suffixes are padded.
    assert tiny.worst(engine, tiny.rows(prefix, [3, 1, 7, 2])) <= EXACT


@pytest.mark.parametrize("prefix", [255, 256, 257])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_prefixes_around_buffer_ends(tiny, architecture, prefix):
    engine = Engine(tiny.model(architecture=architecture, num_hidden_layers=2), chunk=64)
    # mlx-lm's buffers grow by 256; a suffix may begin in one buffer and end in the next.
    assert tiny.worst(engine, tiny.rows(prefix, [3, 1])) <= EXACT


@pytest.mark.parametrize("prefix", [1, 16, 64])
@pytest.mark.parametrize("architecture", OTHERS)
def test_other_architectures(tiny, architecture, prefix):
    engine = Engine(tiny.model(architecture=architecture), chunk=32)
    # gemma2 caps its logits, cohere2 scales them and has windows: the same bound holds.
    assert tiny.worst(engine, tiny.rows(prefix, [3, 1, 7, 2])) <= EXACT


@pytest.mark.parametrize("architecture", FAMILIES)
def test_untied_heads(tiny, architecture):
    model = tiny.model(architecture=architecture, tie_word_embeddings=False)
    rows = tiny.rows(20, [3, 1, 7])
    # The head is another matrix than the embeddings; the whole model is the oracle.
    assert tiny.apart(tiny.full(model, rows), Engine(model).score(rows)[0]) <= EXACT
    assert tiny.worst(Engine(model), rows) <= EXACT


@pytest.mark.parametrize("suffixes", [[1, 1, 1], [3, 1, 7, 2], [20, 1, 18]], ids=str)
@pytest.mark.parametrize("chunk", [8, 64])
@pytest.mark.parametrize("prefix", [WINDOW - 2, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW])
@pytest.mark.parametrize("architecture", WINDOWED)
def test_window_edges(tiny, architecture, prefix, chunk, suffixes):
    engine = Engine(tiny.model(architecture=architecture), chunk=chunk)
    # One token rotates the cache in place, several are appended to it; 17 tokens in chunks
    # of 8 end with a chunk of one; suffixes of 20 cross a whole window on their own.
    assert tiny.worst(engine, tiny.rows(prefix, suffixes)) <= EXACT


@pytest.mark.parametrize(("window", "pattern"), [(16, 3), (5, 2), (64, 2)])
def test_windows_of_other_sizes(tiny, window, pattern):
    model = tiny.model(
        architecture="gemma3_text", sliding_window=window, sliding_window_pattern=pattern
    )
    # Layers 1 and 2 of three slide; a window below a suffix; a window never filled.
    assert tiny.worst(Engine(model, chunk=8), tiny.rows(33, [3, 1, 7, 2])) <= EXACT


@pytest.mark.parametrize("layers", [4, 5])
def test_recurrence_in_three_layers_of_four(tiny, layers):
    model = tiny.model(architecture="qwen3_5", num_hidden_layers=layers, full_attention_interval=4)
    # As published; with 5 layers the last one is recurrent.
    assert tiny.worst(Engine(model, chunk=16), tiny.rows(20, [3, 1, 7])) <= EXACT


@pytest.mark.parametrize("architecture", ALL)
def test_order_and_repetition_of_rows(tiny, architecture):
    engine = Engine(tiny.model(architecture=architecture))
    rows = tiny.rows(20, [4, 6, 1, 9])
    order = [2, 0, 3, 1, 0, 0]
    straight, _ = engine.score(rows, mode=Mode.INDEPENDENT)
    for size in (None, 1, 2, 3):
        found, _ = engine.score([rows[index] for index in order], batch_size=size)
        # Row i of the call is row order[i] of the four: neither place nor company matters.
        assert tiny.apart([straight[index] for index in order], found) <= EXACT


@pytest.mark.parametrize("architecture", ALL)
def test_padding_may_be_any_token(tiny, architecture, monkeypatch):
    engine = Engine(tiny.model(architecture=architecture))
    rows = tiny.rows(20, [2, 25, 1])
    reference, _ = engine.score(rows, mode=Mode.INDEPENDENT)
    found: list[Sequence[np.ndarray]] = []
    for pad in (0, 1, 50, 96):
        monkeypatch.setattr(Engine, "PAD", pad)
        found.append(engine.score(rows)[0])
        # Whole prompts have no padding at all.
        assert tiny.apart(reference, found[-1]) <= EXACT
    # 23 and 24 padding tokens, never read: not even the last bit knows which.
    assert {tiny.apart(found[0], other) for other in found} == {0.0}


@pytest.mark.parametrize("architecture", ALL)
def test_one_row(tiny, architecture):
    engine = Engine(tiny.model(architecture=architecture))
    # A schema of one field: all but the last token is shared with itself.
    assert tiny.worst(engine, tiny.rows(20, [4])) <= EXACT
    assert tiny.worst(engine, tiny.rows(20, [4]), resident_tokens=12) <= EXACT


@pytest.mark.parametrize("architecture", ALL)
def test_rows_of_one_token(tiny, architecture):
    engine = Engine(tiny.model(architecture=architecture))
    # Nothing shared: branches start from empty caches. And one token behind a prefix.
    assert tiny.worst(engine, [Row((token,), (1, 2)) for token in (5, 6, 7)]) <= EXACT
    assert tiny.worst(engine, tiny.rows(20, [1, 1, 1])) <= EXACT


@pytest.mark.parametrize("chunk", [1, 2, 7, 16, 17, 512])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_prefill_chunks_do_not_show(tiny, architecture, chunk):
    engine = Engine(tiny.model(architecture=architecture), chunk=chunk)
    # 33 tokens: one by one, in pairs and one more, in 16 + 16 + 1, in 17 + 16, at once. The
    # convolution of qwen3_5 looks back 3 tokens, further than a chunk of 1 or 2.
    assert tiny.worst(engine, tiny.rows(33, [3, 1])) <= EXACT


@pytest.mark.parametrize("resident", [1, 2, 15, 16, 17, 32, 39, 40, 60])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_resident_prefixes_of_any_length(tiny, architecture, resident):
    engine = Engine(tiny.model(architecture=architecture), chunk=16)
    rows = tiny.rows(40, [3, 5, 1])
    reference, _ = engine.score(rows, mode=Mode.INDEPENDENT)
    for mode in (Mode.PARALLEL, Mode.CACHED_SERIAL, Mode.PARALLEL):
        found, _ = engine.score(rows, mode=mode, resident_tokens=resident)
        # Made first, taken then; 60 is more than the 40 shared and is cut to them.
        assert tiny.apart(reference, found) <= EXACT


@pytest.mark.parametrize("architecture", ALL)
def test_two_documents_from_one_resident_prefix(tiny, architecture):
    engine = Engine(tiny.model(architecture=architecture), chunk=16)
    schema = tuple(range(18))
    documents = [
        [Row(schema + (number,) * 9 + row.tokens, row.candidates) for row in tiny.rows(0, [2, 4])]
        for number in (40, 41)
    ]
    reference = [engine.score(rows, mode=Mode.INDEPENDENT)[0] for rows in documents]
    # The documents do differ.
    assert tiny.apart(*reference) > 1e-4
    for turn in (0, 1, 0, 0, 1):
        found, timings = engine.score(documents[turn], resident_tokens=len(schema))
        # Whatever the other document appended to the resident prefix is gone.
        assert tiny.apart(reference[turn], found) <= EXACT
    # The last turn did take the 18 tokens, and prefilled no more than the document's 9.
    assert (timings.resident_tokens, timings.prefix_tokens) == (18, 9)


@pytest.mark.parametrize("length", [3, 20])
@pytest.mark.parametrize("architecture", ALL)
def test_branches_leave_their_parent_bit_identical(tiny, architecture, length):
    engine = Engine(tiny.model(architecture=architecture), chunk=16)
    rows = tiny.rows(length + 10, [3, 1, 7])
    engine.score(rows, resident_tokens=length)
    resident = engine.resident.get(rows[0].tokens[:length])
    # Kept by the first score, and taken by those below.
    assert resident is not None
    before = contents(resident)
    for mode, size in ((Mode.PARALLEL, None), (Mode.PARALLEL, 2), (Mode.CACHED_SERIAL, None)):
        engine.score(rows, mode=mode, batch_size=size, resident_tokens=length)
        engine.score(tiny.rows(0, [1]), mode=mode)
        # Branches of one and of many rows, prefills on top of it, and another document:
        # not one byte of keys, values, convolution or recurrent state has changed.
        assert contents(resident) == before
    # Every layer holds something to change, and it was compared.
    assert len([leaf for leaf in before if isinstance(leaf[-1], bytes)]) == 2 * len(resident.caches)


def test_float64_passes_through_float32():
    draw = np.random.default_rng(0)
    values = draw.normal(size=(4, 16))
    norm = values / np.sqrt((values**2).mean(-1, keepdims=True) + 1e-5)
    weights = np.exp(values)
    softmax = weights / weights.sum(-1, keepdims=True)
    array = mx.array(values, mx.float64)
    differences = {
        "rms_norm": mx.fast.rms_norm(array, None, 1e-5) - mx.array(norm, mx.float64),
        "softmax": mx.softmax(array, axis=-1, precise=True) - mx.array(softmax, mx.float64),
        "matmul": array @ array.T - mx.array(values @ values.T, mx.float64),
    }
    worst = {name: float(np.abs(np.array(each)).max()) for name, each in differences.items()}
    # NumPy in float64 is the oracle. Products are exact to float64; norms and softmax to
    # float32 only (mlx 0.32.4). Should that change, the docstring above is out of date.
    assert worst["matmul"] < 1e-14
    assert 1e-12 < min(worst["rms_norm"], worst["softmax"]) < 1e-6


# --- the same with operations that are exact in float64 ---


def exp(x: mx.array) -> mx.array:
    return mx.expm1(x) + 1  # exact to float64, where mx.exp is not


def silu(x: mx.array) -> mx.array:
    return x * (1 + mx.tanh(x / 2)) / 2


def rms_norm(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
    normed = x * mx.rsqrt(mx.mean(x * x, axis=-1, keepdims=True) + eps)
    return normed if weight is None else normed * weight


def rope(
    x: mx.array, dims: int, *, traditional: bool, base: float, scale: float, offset: int, **_: Any
) -> mx.array:
    half = dims // 2
    positions = np.arange(offset, offset + x.shape[-2]) * scale
    angles = np.outer(positions, base ** (-np.arange(half) / half))
    cos, sin = mx.array(np.cos(angles), mx.float64), mx.array(np.sin(angles), mx.float64)
    one, two, rest = x[..., :half], x[..., half:dims], x[..., dims:]
    return mx.concatenate([one * cos - two * sin, one * sin + two * cos, rest], axis=-1)


def attention(
    q: mx.array, k: mx.array, v: mx.array, *, scale: float, mask: Any = None, **_: Any
) -> mx.array:
    repeats = q.shape[1] // k.shape[1]
    scores = (q * scale) @ mx.repeat(k, repeats, 1).swapaxes(-1, -2)
    weights = exp(scores - scores.max(-1, keepdims=True))
    if isinstance(mask, str):  # "causal": the last query sees all keys
        rows, columns = scores.shape[-2:]
        mask = mx.arange(columns - rows, columns)[:, None] >= mx.arange(columns)
    if mask is not None:
        weights = mx.where(mask, weights, 0)
    return weights / weights.sum(-1, keepdims=True) @ mx.repeat(v, repeats, 1)


def convolution(self: Any, x: mx.array) -> mx.array:
    taps, length = self.weight.shape[1], x.shape[1] - self.weight.shape[1] + 1
    parts = [x[:, tap : tap + length] * self.weight[:, tap, 0] for tap in range(taps)]
    return mx.stack(parts).sum(0)


def gelu(x: mx.array) -> mx.array:
    return x * (1 + mx.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


def kept_per_token(a_log: mx.array, a: mx.array, dt_bias: mx.array) -> mx.array:
    return exp(-exp(a_log) * mx.log1p(exp(a + dt_bias)))


@pytest.fixture
def exact_operations(monkeypatch) -> None:
    """Replace what MLX computes through float32 by its definition in float64."""
    monkeypatch.setattr(mx.fast, "rms_norm", rms_norm)
    monkeypatch.setattr(mx.fast, "rope", rope)
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", attention)
    monkeypatch.setattr(mx, "sigmoid", lambda x: (1 + mx.tanh(x / 2)) / 2)
    monkeypatch.setattr(nn.Conv1d, "__call__", convolution)
    monkeypatch.setattr(nn, "silu", silu)
    monkeypatch.setattr(nn, "gelu_approx", gelu)
    for module in (llama, qwen3_next):
        monkeypatch.setattr(module, "swiglu", lambda gate, x: silu(gate) * x)
    monkeypatch.setattr(qwen3_next, "precise_swiglu", lambda _, gate, x: silu(gate) * x)
    monkeypatch.setattr(gated_delta, "compute_g", kept_per_token)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_without_float32_in_between(tiny, architecture, request):
    model, rows = tiny.model(architecture=architecture), tiny.rows(65, [3, 1, 7, 2])
    through_float32 = tiny.full(model, rows)
    request.getfixturevalue("exact_operations")
    # The same model: float32 rounding is all that was taken out, and it was there.
    assert 1e-12 < tiny.apart(through_float32, tiny.full(model, rows)) < 1e-4
    # Now nothing rounds a difference away, and the bound still holds.
    assert tiny.worst(Engine(model, chunk=32), rows) <= EXACT
    assert tiny.worst(Engine(model, chunk=32), rows, resident_tokens=20) <= EXACT


@pytest.mark.parametrize("architecture", FAMILIES)
def test_control_without_float32_the_smallest_leak_shows(tiny, architecture, exact_operations):
    model, rows = tiny.model(architecture=architecture), tiny.rows(20, [3, 1, 7])
    whole = type(model.layers[0])

    class Leaky(whole):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            out = super().__call__(*args, **kwargs)
            return out + 1e-11 * mx.roll(out, 1, 0)

    model.layers[0].__class__ = Leaky
    # 1e-11 of the row above, which float32 would mostly round away, is found.
    assert EXACT < tiny.worst(Engine(model), rows) < 1e-9
