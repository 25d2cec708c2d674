"""How much memory weights take, and how much of it there is."""

import os
from math import prod
from pathlib import Path
from typing import Any

from weighbridge.scorer.adapter_formats import FLOATS, core_path
from weighbridge.scorer.adapters import Adapter
from weighbridge.scorer.backend import Backend, on_mlx_thread
from weighbridge.scorer.config_file import config_or_empty
from weighbridge.scorer.errors import CheckpointError
from weighbridge.scorer.quantization import group_sizes
from weighbridge.scorer.weight_files import (
    is_draft,
    is_vision,
    safetensors_header,
    weight_files,
)

# What is left of a machine's memory for other programs, where Metal names no limit itself.
_SHARE = 0.75
# How names of packed weights end in AWQ, compressed-tensors and GPT-OSS.
_PACKED = (".qweight", ".weight_packed", "_blocks")
_EMBEDDING_NAMES = frozenset(
    {
        "embed_tokens",
        "embed_in",
        "embedding",
        "embeddings",
        "tok_embeddings",
        "word_embeddings",
        "wte",
    }
)
_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


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
    size, special = group_sizes(config_or_empty(folder))
    changed = {core_path(each.module) for each in adapter.low_rank} if adapter else set[str]()
    embedding = _tied_embedding(tensors) if "lm_head" in changed or adapter else None
    apart = embedding is not None and adapter is not None and adapter.parts_tied_head
    if embedding is not None and "lm_head" in changed and not apart:
        changed.add(core_path(embedding))  # one matrix for both
    plain = dequantize or dtype == "float64"

    def held(name: str, unpacked: bool) -> int:
        return _held(tensors, name, special.get(name.rpartition(".")[0], size), dtype, unpacked)

    total = 0
    for name in tensors:
        module = name.rpartition(".")[0]
        total += held(name, plain or core_path(module) in changed)
        if apart and module == embedding:
            total += held(name, plain or "lm_head" in changed)
    return total


def _held(
    tensors: dict[str, dict[str, Any]], name: str, group: int, dtype: str, unpacked: bool
) -> int:
    """Return the bytes that a tensor takes in memory.

    Args:
        tensors: Header entries by name.
        name: The tensor.
        group: Weights that share a scale, where it is packed.
        dtype: The compute dtype.
        unpacked: Whether its module becomes a plain one.
    """
    tensor = tensors[name]
    packed = _is_packed(tensors, name)
    # mlx-lm itself unpacks 8-bit floats that have scales of their own.
    if f"{name}_scale_inv" in tensors or (unpacked and packed):
        return _weights(tensors, name, group) * _BYTES[dtype]
    first, last = tensor["data_offsets"]
    if tensor["dtype"] not in FLOATS:
        return last - first
    cast = prod(tensor["shape"]) * _BYTES[dtype]
    # Scales of packed weights are not narrowed.
    return max(cast, last - first) if packed and not name.endswith(".bias") else cast


def _tied_embedding(tensors: dict[str, dict[str, Any]]) -> str | None:
    """Return the module of embeddings that are the head as well, None where a head is there."""
    modules = {name.rpartition(".")[0] for name in tensors}
    if any(core_path(module) == "lm_head" for module in modules):
        return None
    named = (each for each in modules if each.rpartition(".")[2] in _EMBEDDING_NAMES)
    return next(named, None)


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


def require_room(
    name: str, weights: int, backend: Backend, *, unpacked: bool = False, hint: str
) -> int:
    """Refuse weights that alone are larger than the memory there is for them.

    Args:
        name: What people call the checkpoint.
        weights: The bytes its weights take in memory.
        backend: What they are computed with.
        unpacked: Whether they are stored packed, and held as plain ones.
        hint: What to do instead.

    Returns:
        The bytes that all models of this process may take together.

    Raises:
        CheckpointError: They do not fit.
    """
    budget = memory_budget(backend)
    if weights > budget:
        raise CheckpointError(
            f"the weights of {name} must fit into memory: they take {weights / 2**30:.1f} GiB as "
            f"{backend.dtype}{', unpacked' if unpacked else ''}, and {budget / 2**30:.1f} GiB "
            "may be used",
            hint=hint,
        )
    return budget


def memory_budget(backend: Backend) -> int:
    """Return the bytes that all models of this process may take together.

    On Metal what its driver recommends, else three quarters of the machine's memory; at
    most MLX's own limit (`mx.set_memory_limit`), for who wants less.
    """
    return int(on_mlx_thread(_budget, backend.device))


def _budget(device: str) -> int:
    import mlx.core as mx

    if device == "metal":
        own = mx.device_info()["max_recommended_working_set_size"]
    else:
        own = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * _SHARE
    return min(int(own), mx.get_memory_limit())
