"""Packed weights as their headers show them, beside what config.json says."""

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest

from weighbridge.scorer.errors import CheckpointError
from weighbridge.scorer.packing import check_packing, describe_packing

Q, EMBEDDING = "model.layers.0.self_attn.q_proj", "model.embed_tokens"
OWN = {"quantization": {"bits": 4, "group_size": 64}}


def weights(folder: Path, shapes: dict[str, tuple[str, list[int]]]) -> Path:
    """Write zeros of these types (of 4 bytes) and shapes."""
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in shapes.items():
        size = 4 * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))
    return folder


def packed(module: str, bits: int, group: int, width: int = 128) -> dict[str, Any]:
    return {
        f"{module}.weight": ("U32", [2, width * bits // 32]),
        f"{module}.scales": ("F32", [2, width // group]),
    }


def test_what_is_told_is_there(tmp_path):
    folder = weights(tmp_path, packed(Q, 4, 64))
    check_packing(folder, OWN)
    assert describe_packing(folder, OWN) == "4-bit affine, groups of 64"


def test_a_key_that_is_left_over_describes_nothing(tmp_path):
    folder = weights(tmp_path, {f"{Q}.weight": ("F32", [2, 128])})
    check_packing(folder, OWN)  # mlx-lm packs nothing without scales
    assert describe_packing(folder, OWN) is None
    assert describe_packing(folder, {}) is None


def test_packed_weights_without_the_key_are_refused(tmp_path):
    folder = weights(tmp_path, packed(Q, 4, 64))
    with pytest.raises(CheckpointError, match=r'no "quantization" in config\.json') as caught:
        check_packing(folder, {})
    assert "config.json" in str(caught.value.hint)
    # Of other programs, their own settings tell.
    check_packing(folder, {"text_config": {"quantization_config": {"quant_method": "fp8"}}})


@pytest.mark.parametrize("told", [{"bits": 8, "group_size": 64}, {"bits": 4, "group_size": 32}])
def test_another_packing_than_that_of_the_weights_is_refused(tmp_path, told):
    folder = weights(tmp_path, packed(Q, 4, 64))
    with pytest.raises(CheckpointError, match=r'others in the weights of "layers\.0'):
        check_packing(folder, {"quantization": told})


@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_a_layer_may_be_packed_otherwise(tmp_path, prefix):
    folder = weights(tmp_path, {**packed(Q, 4, 64), **packed(EMBEDDING, 6, 32)})
    layer = {f"{prefix}{EMBEDDING}": {"bits": 6, "group_size": 32}}
    check_packing(folder, {"quantization": {**OWN["quantization"], **layer}})
    with pytest.raises(CheckpointError, match="embed_tokens"):
        check_packing(folder, OWN)
