"""The safetensors files of a checkpoint folder, read no further than their headers."""

import errno
import json
from collections import Counter
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

from weighbridge.scorer.errors import CheckpointError, quoted
from weighbridge.scorer.foreign_formats import foreign_format

INDEX_FILE = "model.safetensors.index.json"
VOCABULARY_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "spm.model",
    "sentencepiece*.model",
    "tekken.json",
    "*.tiktoken",
)
"""Any of these holds a vocabulary; patterns."""
# In this order fingerprints are made: what is added goes to the end.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    *VOCABULARY_FILES,
    "tokenizer*.json",
    "tokenizer.model.v*",
    "vocab.bpe",
    "bpe.codes",
    "chat_template*.json",
    "chat_template*.jinja",
)
"""What a tokenizer and its chat template may consist of; patterns, none that fits code."""

ADAPTER_WEIGHTS = ("adapters.safetensors", "adapter_model.safetensors")
"""Of mlx-lm and of PEFT."""
ADAPTER_FILES = (*ADAPTER_WEIGHTS, "adapter_model.bin", "adapter_model.pt", "adapter_model.pth")
"""What the weights of an adapter are called, those included that are never loaded."""

_HEADER_LIMIT = 100 * 2**20
_LARGEST = 2**60  # bytes; what claims more is damaged, and its digits would fill a page
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""What a file begins with by which Git LFS stands for another."""
_SIZES = {
    **{"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4},
    **{"F16": 2, "BF16": 2, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1},
}
# What mlx-lm drops of folders that also see and hear, by the module that holds it.
_VISION = frozenset(
    {
        "aligner",
        "audio_encoder",
        "audio_tower",
        "embed_audio",
        "embed_vision",
        "image_newline",
        "image_projector",
        "mm_projector",
        "multi_modal_projector",
        "multimodal_projector",
        "patch_merge_mlp",
        "patch_merger",
        "vision",
        "vision_adapter",
        "vision_embedder",
        "vision_encoder",
        "vision_language_adapter",
        "vision_model",
        "vision_projection",
        "vision_proj",
        "vision_tower",
        "visual",
    }
)


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files of a checkpoint folder, in order of their names.

    Raises:
        CheckpointError: There are none.
    """
    weights = sorted(folder.glob("model*.safetensors"))  # what mlx-lm loads
    if weights:
        return weights
    found = foreign_format(_names(folder))
    raise CheckpointError(
        f"a checkpoint must hold model*.safetensors weights, got {found.what if found else 'none'}"
        f" in {folder}",
        hint=found.remedy
        if found
        else "fetch the weights too: the files model*.safetensors of the same release",
    )


def safetensors_header(path: Path) -> dict[str, Any]:
    """Read the header of a safetensors file: name, dtype, shape and offsets of its tensors.

    Raises:
        CheckpointError: The file cannot be read, is cut short or of another kind.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            text = file.read(length) if 0 < length <= min(_HEADER_LIMIT, size - 8) else b""
            pointer = size < 1024 and (start + text + file.read(1024)).startswith(LFS_POINTER)
    except OSError as error:
        raise unreadable(path, error) from error
    if pointer:
        raise lfs_pointer(path)
    try:
        header: dict[str, Any] = json.loads(text)
        tensors = [tensor for name, tensor in header.items() if name != "__metadata__"]
        ends = [tensor["data_offsets"][1] for tensor in tensors]
        typed = all(isinstance(tensor["dtype"], str) for tensor in tensors)
        whole = 8 + length + max(ends, default=0) if typed else None
        misfit = next((tensor for tensor in tensors if not _fits(tensor)), None)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        header, whole, misfit = {}, None, None
    if whole != size:
        # Of a file that was cut in its header, only the header's own length is known.
        least = 8 + length if size - 8 < length <= _HEADER_LIMIT else None
        known = whole is not None and size < whole <= _LARGEST
        should = f", should be {whole}" if known else f", should be over {least}" if least else ""
        raise CheckpointError(
            f"{path.name} must be a whole safetensors file, got {size} bytes that do not fit "
            f"its header{should}",
            hint=f"fetch {path} again",
        )
    if misfit is not None:
        name = next(name for name, tensor in header.items() if tensor is misfit)
        raise CheckpointError(
            f"{path.name} must be a whole safetensors file, got {quoted(name)} whose bytes do not "
            "fit its shape",
            hint=f"fetch {path} again",
        )
    return header


def lfs_pointer(path: Path) -> CheckpointError:
    """Describe the text by which Git LFS stands for a file that was not fetched."""
    return CheckpointError(
        f"{path.name} must be the file itself, got the text by which Git LFS stands for it",
        hint=f"fetch the file: git -C {path.parent} lfs pull",
    )


def _fits(tensor: dict[str, Any]) -> bool:
    """Say whether a shape and the bytes of a tensor agree; of packed floats nobody can tell."""
    first, last = tensor["data_offsets"]
    shape = tensor["shape"]
    if not isinstance(shape, list):
        return False
    if not all(type(number) is int and number >= 0 for number in (first, last, *shape)):
        return False
    width = _SIZES.get(tensor["dtype"])
    return first <= last and (width is None or prod(shape) * width == last - first)


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """Describe a file that cannot be opened, and what helps."""
    if error.errno in {errno.EACCES, errno.EPERM}:
        hint = f"give yourself the right to read it: chmod u+r {path}"
    elif error.errno == errno.ELOOP:
        hint = f"put the file itself in the place of {path}, a link that leads back to itself"
    elif path.is_symlink():
        # Such as one into a hub cache that was cleared.
        hint = f"fetch it again: {path} points to {path.readlink()}, where nothing is"
    else:
        hint = f"fetch {path} again"
    return CheckpointError(
        f"{path.name} must be a readable file, got: {error.strerror or error}", hint=hint
    )


def is_vision(name: str) -> bool:
    """Say whether a tensor belongs to the eyes or ears of a checkpoint, which mlx-lm drops.

    Args:
        name: As in the file: `model.visual.blocks.0.attn.qkv.weight`,
            `vision_tower.…`, `model.embed_audio.…`.
    """
    # Above the layers: further down, the same word may name a part of the language model.
    return not _VISION.isdisjoint(name.split(".")[:3])


def is_draft(name: str) -> bool:
    """Say whether a tensor predicts further tokens ahead (`mtp`), which mlx-lm drops."""
    return any(part.startswith("mtp") for part in name.split("."))


def stored_dtype(weights: Sequence[Path]) -> str:
    """Name the most frequent float type of the language weights, `unknown` where there is none."""
    counts: Counter[str] = Counter()
    for path in weights:
        counts.update(
            _DTYPES[tensor["dtype"]]
            for name, tensor in safetensors_header(path).items()
            if name != "__metadata__" and tensor["dtype"] in _DTYPES and not is_vision(name)
        )
    return max(counts, key=lambda name: counts[name]) if counts else "unknown"


def _names(folder: Path) -> list[str]:
    try:
        return [entry.name for entry in folder.iterdir()]
    except OSError:
        return []
