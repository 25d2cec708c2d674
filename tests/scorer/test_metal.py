"""CPU against Metal, on a Mac; elsewhere the comparison itself is tested, CPU against CPU.

The float32 CPU is the reference: an operation that is wrong on the GPU, or rounds more
than its dtype explains, shows as a difference of candidate logits.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from weighbridge.scorer.backend import PROBE_TOLERANCE
from weighbridge.scorer.engine import Engine
from weighbridge.scorer.rows import Mode, Row

pytestmark = pytest.mark.mlx

ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3_5", "gemma3_text", "gemma2", "cohere2")
DTYPES = ("float32", "bfloat16", "float16")
METAL = pytest.mark.skipif(
    not mx.metal.is_available(), reason="no Metal here: the GPU side needs a Mac"
)
MODES = (Mode.INDEPENDENT, Mode.CACHED_SERIAL, Mode.PARALLEL, Mode.AUTO)
# A whole head of 32, so that on a Mac the gated delta kernel runs and not its slow form.
KERNEL = {"linear_key_head_dim": 32, "linear_value_head_dim": 32}


def candidate_logits(
    tiny: Any,
    device: Any,
    rows: Sequence[Row],
    mode: Mode,
    *,
    dtype: str,
    stored: str | None = None,
    **model: Any,
) -> list[np.ndarray]:
    """Score rows with a tiny model on one device.

    Args:
        tiny: Makes the model, always on the CPU.
        device: Where it computes.
        rows: What is scored.
        mode: How.
        dtype: What it computes in.
        stored: What its weights were rounded to before, by default the same.
        model: Further arguments of `tiny.model`.
    """
    if model["architecture"] == "qwen3_5":
        model = {**KERNEL, **model}
    made = tiny.model(dtype=stored or dtype, **model)
    # mlx-lm asks the default device which kernels to use.
    before = mx.default_device()
    mx.set_default_device(device)
    try:
        made.set_dtype(getattr(mx, dtype))
        found, _ = Engine(made, chunk=32).score(rows, mode=mode)
    finally:
        mx.set_default_device(before)
    return found


def relative(reference: Sequence[np.ndarray], found: Sequence[np.ndarray]) -> float:
    """Return the largest difference over the largest logit, as the check at load does."""
    scale = max(1.0, *(float(np.abs(row).max()) for row in reference))
    pairs = zip(reference, found, strict=True)
    return max(float(np.abs(one - other).max()) for one, other in pairs) / scale


def labels_differ(
    reference: Sequence[np.ndarray], found: Sequence[np.ndarray], tolerance: float
) -> bool:
    """Tell whether any row's best candidate differs, near ties apart."""
    scale = max(1.0, *(float(np.abs(row).max()) for row in reference))
    for one, other in zip(reference, found, strict=True):
        best, chosen = int(one.argmax()), int(other.argmax())
        # Both logits may be off by the tolerance, in opposite directions.
        if one[best] - one[chosen] > 2 * tolerance * scale:
            return True
    return False


def check_device(tiny: Any, device: Any, architecture: str, dtype: str) -> None:
    """Compare all modes on a device and dtype with whole prompts in float32 on the CPU."""
    rows = tiny.rows(50, [3, 1, 7, 2])
    tolerance = PROBE_TOLERANCE[dtype]
    # Weights are rounded to the dtype first, so that only the arithmetic differs.
    options = {"architecture": architecture, "stored": dtype}
    reference = candidate_logits(tiny, mx.cpu, rows, Mode.INDEPENDENT, dtype="float32", **options)
    for mode in MODES:
        found = candidate_logits(tiny, device, rows, mode, dtype=dtype, **options)
        # Logits of all modes are those of the CPU, up to the rounding of the dtype.
        assert relative(reference, found) <= tolerance
        assert not labels_differ(reference, found, tolerance)


@METAL
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_metal_equals_cpu(tiny, architecture, dtype):
    check_device(tiny, mx.gpu, architecture, dtype)


@METAL
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_modes_agree_on_metal(tiny, architecture, dtype):
    engine_rows = tiny.rows(130, [3, 1, 7, 2])
    model = {"architecture": architecture, "dtype": dtype}
    reference, *others = (
        candidate_logits(tiny, mx.gpu, engine_rows, mode, **model) for mode in MODES
    )
    # The bound that decides at load whether branching is used at all.
    assert max(relative(reference, other) for other in others) <= PROBE_TOLERANCE[dtype]


@METAL
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_float64_computes_on_the_cpu_of_a_mac(tiny, tmp_path, architecture):
    from weighbridge.scorer import ParallelScorer

    folder = tiny.checkpoint(tmp_path / "exact", architecture=architecture)
    exact, usual = ParallelScorer(folder, dtype="float64"), ParallelScorer(folder)
    assert [each.backend.split()[0] for each in (exact, usual)] == ["cpu", "metal"]
    one, two = (
        each.score("The invoice was charged twice.", tiny.schema()) for each in (exact, usual)
    )
    for name, field in one.fields.items():
        # Metal has no float64; asked for, it is another decision, with nearly the same answer.
        assert max(abs(p - two.fields[name].scores[key]) for key, p in field.scores.items()) < 0.05


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_comparison_holds_on_the_cpu(tiny, architecture, dtype):
    # The same code with the CPU on both sides: tolerances are wide enough for each dtype's
    # rounding and mode, so that a failure on a Mac is the GPU's.
    check_device(tiny, mx.cpu, architecture, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_control_other_weights_show(tiny, architecture, dtype):
    rows = tiny.rows(50, [3, 1, 7, 2])
    one, other = (
        candidate_logits(
            tiny, mx.cpu, rows, Mode.PARALLEL, architecture=architecture, dtype=dtype, seed=seed
        )
        for seed in (0, 1)
    )
    # Another random model is no rounding: both halves of the comparison say so.
    assert relative(one, other) > PROBE_TOLERANCE[dtype]
    assert labels_differ(one, other, PROBE_TOLERANCE[dtype])


def test_comparison_by_hand():
    one, other = [np.array([4.0, 1.0])], [np.array([3.0, 1.0])]
    # 1 of 4; below a largest logit of 1 the difference counts as it is.
    assert relative(one, other) == 0.25
    assert relative([np.array([0.5, 0.1])], [np.array([0.5, 0.2])]) == pytest.approx(0.1)
    # Best of the first is worth 3 more than the candidate that the other one prefers: no tie
    # up to 2 · 0.3 · 4 = 2.4, a tie at 2 · 0.4 · 4 = 3.2.
    assert labels_differ(one, [np.array([1.0, 2.0])], 0.3)
    assert not labels_differ(one, [np.array([1.0, 2.0])], 0.4)
    assert not labels_differ(one, other, 0.0)
