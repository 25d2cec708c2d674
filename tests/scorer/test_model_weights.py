"""Weights loaded: packings of others read rightly or refused, never taken for something else."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from weighbridge.scorer.backend import on_mlx_thread
from weighbridge.scorer.errors import CheckpointError
from weighbridge.scorer.heads import relative_difference
from weighbridge.scorer.model_weights import cast_weights, load_model, prompt_logits

pytestmark = pytest.mark.mlx

SIZES = {"hidden_size": 128, "intermediate_size": 128, "num_key_value_heads": 4}
PROJECTIONS = ("_proj.weight",)
GROUP = 64
# Where AWQ's gemm layout puts each of eight neighbouring columns within a word.
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@pytest.fixture
def folder(tiny, tmp_path) -> Path:
    return tiny.checkpoint(tmp_path / "plain", **SIZES)


def rewrite(folder: Path, tensors: Mapping[str, np.ndarray], **config: Any) -> Path:
    save_file(dict(tensors), folder / "model.safetensors")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return folder


def logits(folder: Path, **options: Any) -> np.ndarray:
    return on_mlx_thread(lambda: prompt_logits(load_model(folder, "float32", **options)))


def awq(weight: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Pack a weight (out, in) as AWQ does; return its tensors and what they stand for."""
    grouped = weight.T.reshape(weight.shape[1] // GROUP, GROUP, weight.shape[0])  # (G, g, out)
    low, high = grouped.min(axis=1), grouped.max(axis=1)
    scales = ((high - low) / 15).astype(np.float16)
    zeros = np.clip(np.round(-low / scales), 0, 15)
    wide = scales.astype(np.float32)
    codes = np.clip(np.round(grouped / wide[:, None] + zeros[:, None]), 0, 15)
    meant = (codes - zeros[:, None]) * wide[:, None]

    def words(rows: np.ndarray) -> np.ndarray:
        columns = rows.astype(np.uint32).reshape(len(rows), -1, 8)
        packed = np.zeros(columns.shape[:2], np.uint32)
        for place, column in enumerate(ORDER):
            packed |= columns[:, :, column] << np.uint32(4 * place)
        return packed.view(np.int32)

    tensors = {
        "qweight": words(codes.reshape(weight.shape[1], -1)),
        "qzeros": words(zeros),
        "scales": scales,
    }
    return tensors, meant.reshape(weight.shape[1], -1).T


def test_awq_is_read_as_what_it_means(folder, tmp_path, tiny):
    plain = load_file(folder / "model.safetensors")
    packed: dict[str, np.ndarray] = {}
    meant: dict[str, np.ndarray] = {}
    for name, array in plain.items():
        if name.endswith(PROJECTIONS):
            tensors, meant[name] = awq(array)
            stem = name.removesuffix("weight")
            packed |= {stem + leaf: np.ascontiguousarray(each) for leaf, each in tensors.items()}
        else:
            packed[name] = meant[name] = array.astype(np.float16)
    method = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}
    rewrite(folder, packed, quantization_config=method)
    by_hand = tiny.checkpoint(tmp_path / "by_hand", **SIZES)
    rewrite(by_hand, {k: np.ascontiguousarray(v, np.float32) for k, v in meant.items()})
    expected = logits(by_hand)
    # mlx-lm keeps the product of zero and scale in 16 bits.
    assert relative_difference(logits(folder), expected) < 5e-3
    assert relative_difference(logits(folder, dequantize=True), expected) < 5e-3
    # Negative control: packing itself changed more than that.
    rewrite(by_hand, plain)
    assert relative_difference(logits(by_hand), expected) > 2e-2


def test_another_layout_of_awq_is_refused_though_its_shapes_fit(folder):
    # Square weights of the gemv layout load without a word, and are other numbers.
    method = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemv"}
    rewrite(folder, load_file(folder / "model.safetensors"), quantization_config=method)
    with pytest.raises(CheckpointError, match="would be read as gemm"):
        logits(folder)


def test_rounded_activations_are_refused_on_a_cpu(folder):
    rewrite(folder, load_file(folder / "model.safetensors"), quantize_activations=True)
    with pytest.raises(CheckpointError, match="layers run on Metal alone"):
        logits(folder, dequantize=True)


def test_integers_in_the_place_of_weights_are_refused(folder):
    # 8-bit floats reach mlx as bytes, and mlx-lm takes any bytes of the right shape.
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = np.ones(tensors[name].shape, np.uint8)
    rewrite(folder, tensors, quantization_config={"quant_method": "fp8"})
    with pytest.raises(CheckpointError, match=r'integers for "model.layers.1.mlp.up_proj.weight"'):
        logits(folder)


def test_tensors_that_do_not_fit_are_named(folder):
    tensors = load_file(folder / "model.safetensors")
    missing = {k: v for k, v in tensors.items() if "q_proj" not in k}
    for wrong in (missing, {**tensors, "model.odd.weight": np.ones((2, 2), np.float32)}):
        rewrite(folder, wrong)
        with pytest.raises(CheckpointError, match=r"must load with mlx-lm, got ValueError.*model"):
            logits(folder)


def test_a_packing_that_contradicts_the_weights_is_refused(folder):
    def pack() -> None:
        from mlx_lm.utils import quantize_model, save_model

        model, _ = quantize_model(load_model(folder, "float32"), {}, 64, 4)
        save_model(folder, model)

    on_mlx_thread(pack)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for packing in ({"group_size": 64, "bits": 4}, {"group_size": 64, "bits": 8}):
        layers = {f"model.layers.0.self_attn.{name}_proj": packing for name in "qk"}
        path.write_text(json.dumps({**config, "quantization": {**packing, **layers}}))
        if packing["bits"] == 4:
            assert np.isfinite(logits(folder)).all()
        else:
            with pytest.raises(CheckpointError, match="must load with mlx-lm"):
                logits(folder)


def types(folder: Path, dtype: str, **options: Any) -> dict[str, str]:
    """The type of each parameter once it is loaded, by its path."""

    def look() -> dict[str, str]:
        import mlx.core as mx
        from mlx.utils import tree_flatten

        with mx.stream(mx.cpu):
            leaves: Any = tree_flatten(load_model(folder, dtype, **options).parameters())
        return {name: str(array.dtype).rpartition(".")[2] for name, array in leaves}

    return on_mlx_thread(look)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_an_architecture_keeps_wide_stays_wide(tiny, tmp_path, dtype):
    found = types(tiny.checkpoint(tmp_path / "qwen", architecture="qwen3_5"), dtype)
    decays = {name for name in found if name.endswith("A_log")}
    assert decays
    assert {found[name] for name in decays} == {"float32"}
    # Negative control: all else is cast, the rest of the same module as well.
    assert {found[name] for name in found.keys() - decays} == {dtype}


def test_what_is_kept_wide_is_widened(tiny, tmp_path):
    folder = tiny.checkpoint(tmp_path / "qwen", architecture="qwen3_5")
    tensors = load_file(folder / "model.safetensors")
    halves = {name: array.astype(np.float16) for name, array in tensors.items()}
    rewrite(folder, halves)
    assert set(types(folder, "float32").values()) == {"float32"}
    assert set(types(folder, "float64").values()) == {"float64"}
    decays = {k: v for k, v in types(folder, "bfloat16").items() if k.endswith("A_log")}
    assert set(decays.values()) == {"float16"}  # as published: there are no more digits


def pack(folder: Path, scales: str) -> None:
    """Pack a checkpoint, with scales in a type of their own."""

    def run() -> None:
        from mlx_lm.utils import quantize_model, save_config, save_model

        config = json.loads((folder / "config.json").read_text())
        model, config = quantize_model(load_model(folder, scales), config, GROUP, 4)
        save_model(folder, model)
        save_config(config, folder / "config.json")

    on_mlx_thread(run)


@pytest.mark.parametrize("scales", ["float16", "float32"])
def test_scales_of_packed_weights_are_not_rounded(folder, scales):
    pack(folder, scales)
    found = types(folder, "bfloat16")
    factors = {name for name in found if name.endswith((".scales", ".biases"))}
    words = {name for name, kind in found.items() if kind == "uint32"}
    assert len(factors) == 2 * len(words) > 0
    assert {found[name] for name in factors} == {scales}
    rest = found.keys() - factors - words
    assert {found[name] for name in rest} == {"bfloat16"}
    # float64 has no packed weights, and casts all that there is.
    assert set(types(folder, "float64").values()) == {"float64"}


def test_the_factor_of_packed_experts_is_not_rounded():
    def cast(dtype: str) -> dict[str, str]:
        from mlx import nn
        from mlx.utils import tree_flatten
        from mlx_lm.models.switch_layers import QuantizedSwitchLinear

        options: Any = {"group_size": 16, "bits": 4, "mode": "nvfp4", "global_scale": True}
        model = nn.Sequential(QuantizedSwitchLinear(32, 8, 2, **options), nn.RMSNorm(8))
        cast_weights(model, dtype)
        leaves: Any = tree_flatten(model.parameters())
        kinds = {name.rpartition("layers.")[2]: str(array.dtype) for name, array in leaves}
        return {name: kind.rpartition(".")[2] for name, kind in kinds.items()}

    found = on_mlx_thread(cast, "bfloat16")
    assert found["0.global_scale"] == "float32"
    assert (found["0.weight"], found["0.scales"]) == ("uint32", "uint8")
    assert (found["0.bias"], found["1.weight"]) == ("bfloat16", "bfloat16")
