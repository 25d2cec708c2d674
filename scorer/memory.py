"""How much memory weights take, and how much of it there is."""

import json
import os
from math import prod
from pathlib import Path
from typing import Any

from weighbridge.scorer.adapter_formats import core_path
from weighbridge.scorer.adapters import Adapter
from weighbridge.scorer.backend import Backend, on_mlx_thread
from weighbridge.scorer.quantization import group_sizes
from weighbridge.scorer.weight_files import (
    is_draft,
    is_vision,
    safetensors_header,
    weight_files,
)

# What is left of a machine's memory for other programs, where Metal names no limit itself.
_SHARE = 0.75
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
# How names of packed weights end in AWQ, compressed-tensors and GPT-OSS.
_PACKED = (".qweight", ".weight_packed", "_blocks")
_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}

_limit: int | None = None


def limit_memory(limit: int | None) -> None:
    """Limit the bytes that all models of this process may take together.

    Args:
        limit: Bytes; None goes back to what the machine has.
    """
    global _limit  # noqa: PLW0603
    _limit = limit


def weight_bytes(
    folder: Path, dtype: str, *, dequantize: bool = False, adapter: Adapter | None = None
) -> int:
    """Return the bytes that the weights of a checkpoint take in memory.

    Vision towers and draft heads do not count: mlx-lm drops them.

    Args:
        folder: A checkpoint folder.
        dtype: The compute dtype that floating-point weights are cast to.
        dequantize: Whether packed weights become plain ones of this dtype, instead of
            staying as they are stored.
        adapter: What is fused into them: a packed module that it changes becomes plain.

    Raises:
        CheckpointError: A weight file is cut short or of another kind.
    """
    tensors = {
        name: tensor
        for path in weight_files(folder)
        for name, tensor in safetensors_header(path).items()
        if name != "__metadata__" and not is_vision(name) and not is_draft(name)
    }
    size, special = group_sizes(_config(folder))
    changed = {core_path(each.module) for each in adapter.low_rank} if adapter else set[str]()
    plain = dequantize or dtype == "float64"
    total = 0
    for name, tensor in tensors.items():
        module = name.rpartition(".")[0]
        unpacked = plain or core_path(module) in changed
        # mlx-lm itself unpacks 8-bit floats that have scales of their own.
        if f"{name}_scale_inv" in tensors or (unpacked and _is_packed(tensors, name)):
            total += _weights(tensors, name, special.get(module, size)) * _BYTES[dtype]
        elif tensor["dtype"] in _FLOATS:
            total += prod(tensor["shape"]) * _BYTES[dtype]
        else:
            first, last = tensor["data_offsets"]
            total += last - first
    return total


def _is_packed(tensors: dict[str, dict[str, Any]], name: str) -> bool:
    """Whether a tensor belongs to packed weights: the weights, their scales, their zeros."""
    module = name.rpartition(".")[0]
    return name.endswith(_PACKED) or any(
        f"{module}.{leaf}" in tensors for leaf in ("scales", "weight_packed")
    )


def _weights(tensors: dict[str, dict[str, Any]], name: str, group: int) -> int:
    """Return how many weights a tensor of a packed module stands for once they are plain.

    Args:
        tensors: Header entries by name.
        name: The tensor.
        group: Weights that share a scale.
    """
    module, _, leaf = name.rpartition(".")
    tensor = tensors[name]
    if leaf == "weight" and f"{module}.scales" in tensors:
        # Bits need not divide a word, so the scales tell how many there are.
        return prod(tensors[f"{module}.scales"]["shape"]) * group
    if name.endswith(_PACKED):
        first, last = tensor["data_offsets"]
        return (last - first) * 2  # foreign packings have 4 bits
    # Scales and zeros go into the weights.
    return prod(tensor["shape"]) if leaf in {"weight", "bias"} else 0


def _config(folder: Path) -> dict[str, Any]:
    """Read config.json; what is wrong with it is said elsewhere."""
    try:
        config: Any = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def memory_budget(backend: Backend) -> int:
    """Return the bytes that all models of this process may take together.

    What `limit_memory` was told, else on Metal what its driver recommends, else three
    quarters of the machine's memory.
    """
    if _limit is not None:
        return _limit
    if backend.device == "metal":
        return int(on_mlx_thread(_recommended))
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * _SHARE)


def _recommended() -> int:
    import mlx.core as mx

    return int(mx.device_info()["max_recommended_working_set_size"])
