"""The chunked gated delta rule has the loop's results, and is used just where it should be."""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models import gated_delta as stock

from weighbridge.scorer import gated_delta
from weighbridge.scorer.engine import Engine

pytestmark = [pytest.mark.mlx, pytest.mark.usefixtures("cpu")]

LOOP = stock.gated_delta_ops
EXACT = 1e-5
NAMES = ("q", "k", "v", "g", "beta", "state")
Inputs = dict[str, np.ndarray]


@pytest.fixture(autouse=True)
def loop_again() -> Iterator[None]:
    yield
    gated_delta.uninstall()
    assert stock.gated_delta_ops is LOOP


def inputs(
    *,
    rows: int = 2,
    tokens: int = 70,
    key_heads: int = 2,
    heads: int = 4,
    key_width: int = 16,
    width: int = 8,
    least: float = 0.5,
    most_beta: float = 1.0,
    alike: bool = False,
    seed: int = 0,
) -> Inputs:
    """Draw what a layer passes on: keys of length 1, queries scaled for reading."""
    draw = np.random.default_rng(seed)
    q, k = draw.normal(size=(2, rows, tokens, key_heads, key_width))
    if alike:  # one direction and 5 % of others, as texts of one word have it
        k = 0.05 * k + draw.normal(size=(1, 1, key_heads, key_width))
    q /= np.linalg.norm(q, axis=-1, keepdims=True) * key_width**0.5
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    return {
        "q": q,
        "k": k,
        "v": draw.normal(size=(rows, tokens, heads, width)),
        "g": draw.uniform(least, 1, (rows, tokens, heads)),
        "beta": draw.uniform(0, most_beta, (rows, tokens, heads)),
        "state": draw.normal(size=(rows, heads, width, key_width)),
    }


def definition(given: Inputs, mask: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Compute the rule token by token in float64: forget, write what is new, read."""
    group = given["v"].shape[2] // given["k"].shape[2]
    q, k = (np.repeat(given[name], group, axis=2) for name in ("q", "k"))
    v, g, beta, state = (given[name] for name in ("v", "g", "beta", "state"))
    outputs = np.zeros_like(v)
    for t in range(v.shape[1]):
        kept = g[:, t, :, None, None] * state
        known = np.einsum("bhvk,bhk->bhv", kept, k[:, t])
        added = beta[:, t, :, None] * (v[:, t] - known)
        after = kept + added[..., None] * k[:, t, :, None, :]
        if mask is not None:
            after = np.where(mask[:, t, None, None, None], after, state)
        state = after
        outputs[:, t] = np.einsum("bhvk,bhk->bhv", state, q[:, t])
    return outputs, state


def arrays(given: Inputs) -> list[mx.array]:
    return [mx.array(given[name], dtype=mx.float64).astype(mx.float32) for name in NAMES]


def run_chunked(
    given: list[mx.array], mask: mx.array | None = None, **options: Any
) -> tuple[mx.array, mx.array]:
    q, k, v, g, beta, *state = given
    return gated_delta.chunked(q, k, v, g, beta, *state, mask=mask, **options)


def gap(one: mx.array, other: mx.array) -> float:
    """Return the largest difference of two arrays."""
    return float(np.abs(np.array((one - other).astype(mx.float32))).max())


def apart(given: Inputs, mask: np.ndarray | None = None, **options: Any) -> float:
    """Return the largest difference from the definition, of tokens that count."""
    expected, state = definition(given, mask)
    masked = None if mask is None else mx.array(mask)
    y, after = run_chunked(arrays(given), masked, **options)
    assert y.shape == expected.shape
    assert after.shape == state.shape
    difference = np.abs(np.array(y) - expected)
    if mask is not None:
        difference = difference * mask[..., None, None]
    return max(float(difference.max()), float(np.abs(np.array(after) - state).max()))


# One chunk and less, one token more, two chunks but one, many and a rest.
@pytest.mark.parametrize("tokens", [1, 2, 7, 31, 32, 33, 63, 64, 96, 257])
def test_any_number_of_tokens(tokens):
    assert apart(inputs(tokens=tokens)) < EXACT


@pytest.mark.parametrize(
    "special",
    [
        {"alike": True},
        {"alike": True, "most_beta": 2.0, "least": 0.99},
        {"most_beta": 2.0},
        {"least": 0.999},
        {"least": 0.0},
        {"rows": 1, "key_heads": 1, "heads": 1},
        {"key_heads": 4, "heads": 4},
        {"key_heads": 1, "heads": 6},
        {"key_width": 8, "width": 32},
        {"rows": 5, "tokens": 20},
    ],
    ids=str,
)
def test_whatever_keys_gates_and_heads(special):
    assert apart(inputs(**special)) < EXACT


@pytest.mark.parametrize("chunk", [1, 5, 16, 64, 1000])
def test_any_length_of_chunks(chunk):
    assert apart(inputs(alike=True, most_beta=2.0), chunk=chunk) < EXACT


@pytest.mark.parametrize("kept", [0.0, 1e-38, 1e-20, 1e-3, 0.05, 1.0])
def test_gates_whose_products_underflow(kept):
    given = inputs(tokens=100)
    given["g"][:] = kept
    assert apart(given) < EXACT


def test_all_is_forgotten_at_some_tokens():
    given = inputs(tokens=100, least=0.99)
    # exp(log 0) is where forms made of logarithms turn into nan.
    given["g"][:, [3, 31, 32, 33, 99]] = 0.0
    assert apart(given) < EXACT


@pytest.mark.parametrize("side", ["right", "left", "between", "first row for all"])
def test_masked_tokens_leave_the_state_alone(side):
    given = inputs(rows=3)
    positions = np.arange(70)[None]
    mask = {
        "right": positions < np.array([[70], [41], [1]]),
        "left": positions >= np.array([[0], [33], [69]]),
        "between": (positions % 7 != 3) & (positions < np.array([[70], [50], [0]])),
        "first row for all": positions < 45,
    }[side]
    assert apart(given, mask) < EXACT


def test_control_a_mask_that_is_ignored_shows():
    given = inputs()
    mask = np.arange(70)[None] < np.array([[70], [41]])
    _, state = definition(given, mask)
    _, after = run_chunked(arrays(given))
    assert np.abs(np.array(after) - state).max() > 0.01


def test_no_state_is_a_state_of_zeros():
    given = inputs()
    given["state"][:] = 0
    y, after = run_chunked(arrays(given))
    bare, bare_after = run_chunked(arrays(given)[:5])
    assert mx.array_equal(y, bare)
    assert mx.array_equal(after, bare_after)


def test_halves_one_after_the_other_are_the_whole():
    given = arrays(inputs(alike=True))
    whole, end = run_chunked(given)
    *steps, state = given
    first, state = run_chunked([*(each[:, :41] for each in steps), state])
    second, state = run_chunked([*(each[:, 41:] for each in steps), state])
    assert gap(mx.concatenate([first, second], axis=1), whole) < EXACT
    assert gap(state, end) < EXACT


def test_rows_do_not_touch_each_other():
    given = inputs(rows=3)
    together, _ = run_chunked(arrays(given))
    for row in range(3):
        alone, _ = run_chunked(
            arrays({name: value[row : row + 1] for name, value in given.items()})
        )
        assert gap(alone[0], together[row]) < 1e-6


def test_a_state_that_is_broadcast_is_read_and_not_written():
    given = inputs(rows=4)
    given["state"][:] = given["state"][:1]
    *steps, state = arrays(given)
    before = np.array(state[:1])
    shared = mx.broadcast_to(state[:1], state.shape)  # as a branch has it from its prefix
    y, _ = run_chunked([*steps, shared])
    expected, _ = definition(given)
    assert np.abs(np.array(y) - expected).max() < EXACT
    assert np.array_equal(np.array(shared[:1]), before)


@given(
    tokens=st.integers(1, 80),
    rows=st.integers(1, 3),
    key_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    least=st.sampled_from([0.0, 0.5, 0.99]),
    most_beta=st.sampled_from([1.0, 2.0]),
    alike=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_shape(tokens, rows, key_heads, group, least, most_beta, alike, seed):
    drawn = inputs(
        tokens=tokens,
        rows=rows,
        key_heads=key_heads,
        heads=key_heads * group,
        least=least,
        most_beta=most_beta,
        alike=alike,
        seed=seed,
    )
    assert apart(drawn) < EXACT


@pytest.mark.parametrize("fault", ["g", "beta", "state", "k"])
def test_control_the_smallest_fault_shows(fault):
    given = inputs()
    expected, state = definition(given)
    given[fault] = given[fault] * (1 - 1e-3)
    y, after = run_chunked(arrays(given))
    worst = max(np.abs(np.array(y) - expected).max(), np.abs(np.array(after) - state).max())
    assert worst > EXACT


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
def test_half_precision_accumulates_in_float32_as_the_loop_does(dtype):
    q, k, v, g, beta, state = arrays(inputs())
    q, k, v, beta = (each.astype(dtype) for each in (q, k, v, beta))
    y, after = gated_delta.chunked(q, k, v, g, beta, state)
    looped, looped_after = LOOP(q, k, v, g, beta, state)
    assert (y.dtype, after.dtype) == (looped.dtype, looped_after.dtype) == (dtype, mx.float32)
    assert gap(after, looped_after) < EXACT
    # Outputs are rounded once more: to the next number of 8 or 11 bits.
    assert gap(y.astype(mx.float32), looped.astype(mx.float32)) < 2**-7


def plant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the chunked form be visibly wrong wherever it is used."""
    right = gated_delta.chunked

    def wrong(*arguments: Any) -> tuple[mx.array, mx.array]:
        y, state = right(*arguments)
        return y + 1, state

    monkeypatch.setattr(gated_delta, "chunked", wrong)


@pytest.mark.skipif(mx.metal.is_available(), reason="Metal has kernels of its own")
class TestInstalled:
    def test_twice_is_once_and_undone_is_undone(self):
        assert gated_delta.install()
        put = stock.gated_delta_ops
        assert put is not LOOP
        assert gated_delta.install()
        assert stock.gated_delta_ops is put
        gated_delta.uninstall()
        assert stock.gated_delta_ops is LOOP
        gated_delta.uninstall()
        assert stock.gated_delta_ops is LOOP

    @pytest.mark.parametrize("case", ["4-D gate", "float64", "half", "short", *NAMES])
    def test_what_does_not_suit_is_the_loop_to_the_last_bit(self, monkeypatch, case):
        given = arrays(inputs(tokens=3 if case == "short" else 40))
        if case == "4-D gate":
            given[3] = mx.broadcast_to(given[3][..., None], (*given[3].shape, 16))
        elif case == "float64":
            given = [each.astype(mx.float64) for each in given]
        elif case == "half":  # a half state, with which the loop accumulates in half precision
            given = [each.astype(mx.bfloat16) for each in given]
        elif case in NAMES:  # one of them in float64 is enough
            given[NAMES.index(case)] = given[NAMES.index(case)].astype(mx.float64)
        expected, state = LOOP(*given)
        gated_delta.install()
        plant(monkeypatch)
        y, after = stock.gated_delta_ops(*given)
        assert y.dtype == expected.dtype
        assert mx.array_equal(y, expected)
        assert mx.array_equal(after, state)

    def test_few_tokens_of_a_large_state_are_worth_it(self, monkeypatch):
        given = arrays(inputs(tokens=2, rows=2, key_heads=4, heads=8, key_width=128, width=128))
        gated_delta.install()
        plant(monkeypatch)
        assert gap(stock.gated_delta_ops(*given)[0], LOOP(*given)[0]) > 0.9

    def test_arguments_may_have_names_and_defaults(self):
        q, k, v, g, beta, _ = arrays(inputs())
        mask = mx.arange(70)[None] < 50
        expected, state = LOOP(q=q, k=k, v=v, g=g, beta=beta, mask=mask)
        gated_delta.install()
        y, after = stock.gated_delta_ops(q=q, k=k, v=v, g=g, beta=beta, mask=mask)
        assert gap(y[:, :50], expected[:, :50]) < EXACT
        assert gap(after, state) < EXACT


def test_metal_keeps_its_kernels(monkeypatch):
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    assert not gated_delta.install()
    assert stock.gated_delta_ops is LOOP


USES = {"qwen3_5": True, "qwen3_5_moe": True, "qwen3_next": True, "olmo_hybrid": True}
USES |= {"kimi_linear": False, "bailing_moe_v3": False}  # a gate per key channel


@pytest.mark.skipif(mx.metal.is_available(), reason="Metal has kernels of its own")
@pytest.mark.parametrize("name", USES)
def test_real_models_use_it_and_agree(monkeypatch, table, tiny, name):
    model = table.build(name, {**table.A_TO_L, **table.M_TO_Z}[name])
    rows = table.rows(table.CODES, [3, 9, 20])
    looped = tiny.full(model, rows)
    gated_delta.install()
    assert tiny.apart(tiny.full(model, rows), looped) < 1e-4
    # Branches of all modes, with prefill chunks that are no multiple of anything here.
    assert tiny.worst(Engine(model, chunk=23), rows) < 1e-4
    assert tiny.worst(Engine(model, chunk=23), rows, resident_tokens=31) < 1e-4
    # What shows that it was really there: a fault planted in it, in models that use it.
    plant(monkeypatch)
    assert (tiny.apart(tiny.full(model, rows), looped) > 1e-2) is USES[name]
    gated_delta.uninstall()
    assert tiny.apart(tiny.full(model, rows), looped) == 0


@pytest.mark.skipif(mx.metal.is_available(), reason="Metal has kernels of its own")
def test_float64_stays_as_it_is(monkeypatch, tiny):
    model, rows = tiny.model(architecture="qwen3_5"), tiny.rows(65, [3, 1, 7])
    looped = tiny.full(model, rows)
    gated_delta.install()
    plant(monkeypatch)
    assert tiny.apart(tiny.full(model, rows), looped) == 0
    assert tiny.worst(Engine(model, chunk=32), rows) <= 1e-12
