"""How the weights of a folder are packed, as their headers show it beside what config.json says.

mlx-lm packs a module where there are `scales` for it, in the way that config.json tells.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from weighbridge.scorer.adapter_formats import core_path
from weighbridge.scorer.errors import listed, shown
from weighbridge.scorer.quantization import (
    describe_quantization,
    packing_of,
    refused_packing,
)
from weighbridge.scorer.weight_files import (
    is_draft,
    is_vision,
    safetensors_header,
    weight_files,
)

_WORD = 32  # bits


def check_packing(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse packed weights of which config.json says nothing, or another packing than theirs.

    Call after `check_quantization`. Weights of other programs than mlx-lm are left to it.

    Args:
        folder: A checkpoint folder.
        config: Its configuration, as `read_config` gives it.

    Raises:
        CheckpointError: Loading would fail; with the first names.
    """
    own = config.get("quantization")
    if own is None:
        if not _told(config) and (packed := sorted(module for module, *_ in _packed(folder))):
            raise refused_packing(
                f'got packed ones for {listed(packed[:1])} and no "quantization" in config.json',
                hint="restore config.json of the same release: it tells how they are packed",
            )
        return
    other = [
        module
        for module, words, groups in _packed(folder)
        if not any(
            words * _WORD == groups * group * bits for bits, group in packing_of(config, module)
        )
    ]
    if other:
        raise refused_packing(
            f"got {shown(own.get('bits'))} bits in groups of {shown(own.get('group_size'))} in "
            f"config.json, and others in the weights of {listed(sorted(other))}",
            hint="config.json and the weights are of two conversions: fetch both again",
        )


def describe_packing(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Name the packing of a checkpoint for people, None for plain weights.

    Args:
        folder: A checkpoint folder.
        config: Its configuration, as `read_config` gives it.
    """
    if config.get("quantization") is not None and next(_packed(folder), None) is None:
        return None  # the key is left over: mlx-lm reads such weights as plain ones
    return describe_quantization(config)


def _told(config: Mapping[str, Any]) -> bool:
    text = config.get("text_config")
    parts = (config, text if isinstance(text, dict) else {})
    return any(
        part.get(key) is not None
        for part in parts
        for key in ("quantization", "quantization_config")
    )


def _packed(folder: Path) -> Iterator[tuple[str, int, int]]:
    """Yield the modules that are packed, with the words and the scales of each row."""
    tensors = {
        name: tensor
        for path in weight_files(folder)
        for name, tensor in safetensors_header(path).items()
        if name != "__metadata__" and not is_vision(name) and not is_draft(name)
    }
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        scales = tensors.get(f"{module}.scales")
        if leaf != "weight" or scales is None or tensor["dtype"] != "U32":
            continue
        rows = tensor.get("shape"), scales.get("shape")
        if all(isinstance(row, list) and row and type(row[-1]) is int for row in rows):
            yield core_path(module), tensor["shape"][-1], scales["shape"][-1]
