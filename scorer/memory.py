"""How much memory weights take, and how much of it there is."""

import os
from math import prod
from pathlib import Path

from weighbridge.scorer.backend import Backend, on_mlx_thread
from weighbridge.scorer.weight_files import safetensors_header, weight_files

# What is left of a machine's memory for other programs, where Metal names no limit itself.
_SHARE = 0.75
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}

_limit: int | None = None


def limit_memory(limit: int | None) -> None:
    """Limit the bytes that all models of this process may take together.

    Args:
        limit: Bytes; None goes back to what the machine has.
    """
    global _limit  # noqa: PLW0603
    _limit = limit


def weight_bytes(folder: Path, dtype: str) -> int:
    """Return the bytes that the weights of a checkpoint take in memory.

    Args:
        folder: A checkpoint folder.
        dtype: The compute dtype that floating-point weights are cast to; packed
            ones stay as they are stored.

    Raises:
        CheckpointError: A weight file is cut short or of another kind.
    """
    total = 0
    for path in weight_files(folder):
        for name, tensor in safetensors_header(path).items():
            if name == "__metadata__":
                continue
            if tensor["dtype"] in _FLOATS:
                total += prod(tensor["shape"]) * _BYTES[dtype]
            else:
                first, last = tensor["data_offsets"]
                total += last - first
    return total


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
