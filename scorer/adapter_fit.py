"""Whether an adapter fits its base, as far as the headers of both can tell.

Loading compares every tensor with the model that mlx-lm makes of the base. This says the
same earlier, and only where it is sure: mlx-lm joins, splits and renames modules of some
architectures, and of those nothing is said.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weighbridge.scorer.adapter_formats import FLOATS, LowRank, core_path
from weighbridge.scorer.adapters import Adapter
from weighbridge.scorer.config_file import config_or_empty
from weighbridge.scorer.errors import CheckpointError, listed, quoted
from weighbridge.scorer.quantization import group_sizes
from weighbridge.scorer.weight_files import (
    is_draft,
    is_vision,
    safetensors_header,
    weight_files,
)

_KEEP_NAMES = frozenset(
    {
        *("cohere2", "gemma", "gemma2", "gemma3_text", "glm4", "granite", "llama", "mistral"),
        *("olmo2", "phi3", "qwen2", "qwen3", "qwen3_5", "qwen3_5_text", "smollm3"),
    }
)
"""Types whose modules mlx-lm 0.32.2 calls as they are published, but for what wraps them."""

_FLOAT8 = frozenset({"F8_E4M3", "F8_E5M2"})
_PACKED = ("qweight", "weight_packed")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


@dataclass(slots=True)
class _Stored:
    """Modules of a base with a matrix, by the core of their path.

    Attributes:
        shapes: What each holds, None where it cannot be told.
        kinds: Their paths with `*` in the place of numbers.
    """

    shapes: dict[str, list[tuple[int, ...] | None]] = field(default_factory=dict)
    kinds: set[str] = field(default_factory=set)


def check_fits(folder: Path, adapter: Adapter) -> None:
    """Refuse an adapter that loading would refuse, where headers are enough to tell.

    What they cannot tell is left to loading: products that are all zero, numbers that are
    not finite, weights that mlx-lm rearranges.

    Args:
        folder: A checkpoint folder.
        adapter: What is to be fused into its weights.

    Raises:
        CheckpointError: Modules are not there, have another shape, or are not covered as
            the configuration of the adapter says.
    """
    config = config_or_empty(folder)
    stored = _stored(folder, config)
    header = safetensors_header(adapter.weights)
    known = config.get("model_type") in _KEEP_NAMES
    lost: list[str] = []
    for product in adapter.low_rank:
        core = core_path(product.module)
        shapes = stored.shapes.get(core)
        if shapes is None:
            # A head may be the embeddings, or come of its own.
            if core != "lm_head" and (known or _kind(core) in stored.kinds):
                lost.append(product.module)
        elif None not in shapes:
            _check_shape(product, header, adapter.format, shapes)
    if lost:
        raise CheckpointError(
            f"every tensor of an adapter must have its module in the base, got {len(lost)} of "
            f"{len(adapter.low_rank)} without one: {listed(lost)}",
            hint="the adapter was trained on another model"
            + (f" ({adapter.base_model})" if adapter.base_model else "")
            + ", or on parts that mlx-lm does not hold as such",
        )
    if known:
        _check_covered(adapter, stored, config)


def _stored(folder: Path, config: Mapping[str, Any]) -> _Stored:
    tensors = {
        name: tensor
        for path in weight_files(folder)
        for name, tensor in safetensors_header(path).items()
        if name != "__metadata__" and not is_vision(name) and not is_draft(name)
    }
    size, special = group_sizes(config)
    groups = {core_path(path): group for path, group in special.items()}
    found = _Stored()
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        if leaf != "weight" and leaf not in _PACKED:
            continue
        core = core_path(module)
        shape: tuple[int, ...] | None = None
        scales = tensors.get(f"{module}.scales")
        if leaf == "weight" and scales is not None:
            group = groups.get(core, size)
            if type(group) is int:
                # Bits need not divide a word, so the scales tell how wide the weights are.
                wide = _shape(scales)
                shape = (*wide[:-1], wide[-1] * group) if wide else None
        elif leaf == "weight" and tensor["dtype"] in FLOATS | _FLOAT8:
            shape = _shape(tensor)
        found.shapes.setdefault(core, []).append(shape)
        found.kinds.add(_kind(core))
    return found


def _shape(tensor: Mapping[str, Any]) -> tuple[int, ...] | None:
    shape = tensor.get("shape")
    known = isinstance(shape, list) and all(type(size) is int for size in shape)
    return tuple(shape) if isinstance(shape, list) and known else None


def _kind(core: str) -> str:
    return _NUMBER.sub("*", core)


def _check_shape(
    product: LowRank,
    header: Mapping[str, Any],
    layout: str,
    shapes: list[tuple[int, ...] | None],
) -> None:
    """Compare the weight that a product makes with the one that is there, either way round."""
    down, up = (header[name]["shape"] for name in (product.down, product.up))
    if len(down) == 3:
        made = (up[0], up[1], down[2])
    elif layout == "mlx":
        made = (up[1], down[0])
    else:
        made = (down[1], up[0]) if product.embedding else (up[0], down[1])
    # Some are published transposed, and products of mlx-lm on embeddings are.
    if any(shape in (made, made[::-1]) for shape in shapes):
        return
    raise CheckpointError(
        f"the tensors of {quoted(product.module)} must make a weight of shape {shapes[0]}, "
        f"got {made}",
        hint="the adapter was trained on another model",
    )


def _check_covered(adapter: Adapter, stored: _Stored, config: Mapping[str, Any]) -> None:
    """Compare an mlx adapter's tensors with the layers that its configuration says it covers."""
    if adapter.layers is None or adapter.keys is None:
        return
    text = config.get("text_config")
    count = config.get("num_hidden_layers") or (
        text.get("num_hidden_layers") if isinstance(text, dict) else None
    )
    if type(count) is not int:
        return
    # `[-0:]` is all of them, as in mlx-lm.
    first = max(count - adapter.layers, 0) if adapter.layers > 0 else 0
    covered = {core_path(product.module) for product in adapter.low_rank}
    missing = [
        core
        for core in sorted(stored.shapes)
        if (match := _LAYER.fullmatch(core))
        and first <= int(match[1]) < count
        and match[2] in adapter.keys
        and core not in covered
    ]
    if missing:
        raise CheckpointError(
            "an adapter must hold tensors for the modules that adapter_config.json names "
            f"(keys, num_layers), got none for {listed(missing)}",
            hint="configuration, weights and base do not belong together, or the file is not "
            "whole: fetch the adapter again",
        )
