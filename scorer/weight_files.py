"""The safetensors files of a checkpoint folder, read no further than their headers."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from weighbridge.scorer.errors import CheckpointError

_HEADER_LIMIT = 100 * 2**20
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files of a checkpoint folder, in order of their names.

    Raises:
        CheckpointError: There are none.
    """
    weights = sorted(folder.glob("model*.safetensors"))  # what mlx-lm loads
    if not weights:
        raise CheckpointError(
            f"a checkpoint must hold model*.safetensors weights, got none in {folder}",
            hint="convert other formats first: python -m mlx_lm convert --hf-path FOLDER",
        )
    return weights


def safetensors_header(path: Path) -> dict[str, Any]:
    """Read the header of a safetensors file: name, dtype, shape and offsets of its tensors.

    Raises:
        CheckpointError: The file is cut short or of another kind.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            text = file.read(length) if 0 < length <= min(_HEADER_LIMIT, size - 8) else b""
    except OSError as error:
        # Such as a link into a hub cache that was cleared.
        raise CheckpointError(
            f"{path.name} must be a readable file, got: {error.strerror or error}",
            hint=f"fetch {path} again",
        ) from error
    try:
        header: dict[str, Any] = json.loads(text)
        tensors = [tensor for name, tensor in header.items() if name != "__metadata__"]
        ends = [tensor["data_offsets"][1] for tensor in tensors]
        typed = all(isinstance(tensor["dtype"], str) for tensor in tensors)
        whole = typed and size == 8 + length + max(ends, default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        header, whole = {}, False
    if not whole:
        raise CheckpointError(
            f"{path.name} must be a whole safetensors file, got {size} bytes that do not fit "
            "its header",
            hint=f"fetch {path} again",
        )
    return header


def stored_dtype(weights: list[Path]) -> str:
    """Name the most frequent float type of weights, `unknown` where there is none."""
    counts: Counter[str] = Counter()
    for path in weights:
        counts.update(
            _DTYPES[tensor["dtype"]]
            for name, tensor in safetensors_header(path).items()
            if name != "__metadata__" and tensor["dtype"] in _DTYPES
        )
    return max(counts, key=lambda name: counts[name]) if counts else "unknown"
