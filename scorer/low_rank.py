"""Low-rank products added to the weights of a model. Call everything here on the MLX thread."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from weighbridge.scorer.adapter_formats import MERGE_WITH_PEFT, LowRank, core_path
from weighbridge.scorer.adapters import Adapter
from weighbridge.scorer.errors import CheckpointError, listed, quoted
from weighbridge.scorer.quantized import (
    is_packed,
    plain_module,
    plain_weight,
    replace_module,
)
from weighbridge.scorer.untying import EMBEDDINGS, LINEARS, head_is_tied, untie_head
from weighbridge.scorer.weight_files import weight_files

_EXPERTS = (SwitchLinear, QuantizedSwitchLinear)
_FETCH = "fetch the adapter again: its file is damaged"


@dataclass(frozen=True, slots=True)
class _Placed:
    """A product, and the path of the module that it changes."""

    product: LowRank
    path: str


def check_layout(model: Any, adapter: Adapter, folder: Path) -> None:
    """Refuse a PEFT adapter where mlx-lm holds the rows of a weight in another order.

    PEFT's products belong to the weights as they are published; the model must hold the
    same numbers, or their transpose (GPT-2 stores its layers so). Products of mlx-lm are
    made for its own modules, and packed weights are in its own layout already.

    Args:
        model: The model as it was loaded, before any cast.
        adapter: Any adapter.
        folder: The checkpoint folder that the model is from.

    Raises:
        CheckpointError: With the first names.
    """
    if adapter.format != "peft":
        return
    stored = _stored(folder)
    modules = dict(model.named_modules())
    other: list[str] = []
    for placed in _place(adapter, modules):
        module = modules[placed.path]
        if is_packed(module):
            continue
        weight = module.weight
        tensors = stored.get(core_path(placed.path), [])
        if not any(_same(tensor, weight) for tensor in tensors):
            other.append(placed.product.module)
    if other:
        raise CheckpointError(
            "a PEFT adapter must meet the weights as they are published, and mlx-lm "
            f"rearranges those of {listed(other)}",
            hint=MERGE_WITH_PEFT,
        )


def fuse_adapter(model: Any, adapter: Adapter, dtype: str) -> float | None:
    """Add the products of an adapter to the weights of a model.

    Computed in float32, in float64 for float64; a packed module becomes a plain one. On
    tied embeddings mlx-lm's products count for the head too, and PEFT's do not (unless
    `ensure_weight_tying` says so), as in training: there the head gets weights of its own.

    Args:
        model: A model of mlx-lm, its plain weights in `dtype`.
        adapter: What to add.
        dtype: Name of the compute dtype.

    Returns:
        The share of the intended change that the weights took on: 1 for all of it, near 0
        where rounding to `dtype` lost it, None where no change was intended at all.

    Raises:
        CheckpointError: A tensor has no module, another shape, or is not finite.
    """
    modules = dict(model.named_modules())
    if adapter.parts_tied_head and head_is_tied(modules):
        untie_head(model)
        modules = dict(model.named_modules())
    placed = _place(adapter, modules)
    _check_once(placed)
    _check_coverage(model, adapter, placed, modules)
    # mlx reads lazily: a tensor is in memory while its module is computed.
    tensors: Any = mx.load(str(adapter.weights))
    _check_copies(adapter, tensors, modules)
    kept = wanted = 0.0
    for each in placed:
        module = modules[each.path]
        change = _change(each.product, module, tensors, adapter.format, dtype)
        before = plain_weight(module) if is_packed(module) else module.weight
        before = before.astype(change.dtype)
        if before.shape != change.shape:
            raise _misshapen(each, before.shape, change.shape)
        target = getattr(mx, dtype)
        after = (before + change).astype(target)
        real = after.astype(change.dtype) - before.astype(target).astype(change.dtype)
        sums: Any = mx.stack([(real * change).sum(), (change * change).sum()])
        finite = mx.isfinite(after).all()
        mx.eval(after, sums, finite)
        if not finite.item():
            raise CheckpointError(
                f"weights with an adapter must be finite in {dtype}, got others in "
                f"{quoted(each.product.module)}",
                hint="the adapter is damaged, or its scale is too large for this dtype",
            )
        kept += sums[0].item()
        wanted += sums[1].item()
        if is_packed(module):
            replace_module(model, each.path, plain_module(module, after))
        else:
            module.weight = after
    return kept / wanted if wanted else None


def changed_tokens(model: Any, adapter: Adapter) -> tuple[int, ...]:
    """Return the tokens whose embeddings an adapter changes most, two for each product.

    Args:
        model: A model of mlx-lm.
        adapter: What is to be added.

    Raises:
        CheckpointError: A tensor has no module.
    """
    modules = dict(model.named_modules())
    tensors: Any = mx.load(str(adapter.weights))
    tokens: list[int] = []
    for each in _place(adapter, modules):
        if each.product.embedding or (
            adapter.format == "mlx" and isinstance(modules[each.path], EMBEDDINGS)
        ):
            down = tensors[each.product.down].astype(mx.float32)
            size: Any = mx.abs(down).sum(axis=0 if each.product.embedding else 1)
            order: Any = mx.argsort(-size)[:2]
            tokens += order.tolist()
    return tuple(tokens)


def _place(adapter: Adapter, modules: Mapping[str, Any]) -> list[_Placed]:
    """Find the module of each product; all must have one."""
    by_core: dict[str, list[str]] = {}
    for path, module in modules.items():
        if isinstance(module, LINEARS + EMBEDDINGS + _EXPERTS):
            by_core.setdefault(core_path(path), []).append(path)
    if adapter.format == "peft" and head_is_tied(modules):
        # Meant for both, or for both being one matrix.
        by_core["lm_head"] = [p for p, m in modules.items() if isinstance(m, EMBEDDINGS)]
    placed: list[_Placed] = []
    lost: list[str] = []
    for product in adapter.low_rank:
        if adapter.format == "mlx":
            module = modules.get(product.module)
            known = isinstance(module, LINEARS + EMBEDDINGS + _EXPERTS)
            paths = [product.module] if known else []
        else:
            paths = by_core.get(core_path(product.module), [])
        if len(paths) == 1:
            placed.append(_Placed(product, paths[0]))
        else:
            lost.append(product.module)
    if lost:
        raise CheckpointError(
            f"every tensor of an adapter must have its module in the base, got {len(lost)} of "
            f"{len(adapter.low_rank)} without one: {listed(lost)}",
            hint="the adapter was trained on another model"
            + (f" ({adapter.base_model})" if adapter.base_model else "")
            + ", or on parts that mlx-lm does not hold as such",
        )
    return placed


def _check_once(placed: Sequence[_Placed]) -> None:
    """Refuse two products for a module; embeddings and head are two once they are parted."""
    paths = [each.path for each in placed]
    twice = sorted({path for path in paths if paths.count(path) > 1})
    if twice:
        raise CheckpointError(
            f"an adapter must change a module once, got two products for {listed(twice)}",
            hint=_FETCH,
        )


def _check_coverage(
    model: Any, adapter: Adapter, placed: Sequence[_Placed], modules: Mapping[str, Any]
) -> None:
    """Compare an mlx adapter's tensors with what its configuration says it covers."""
    if adapter.layers is None or adapter.keys is None:
        return
    layers = {id(layer) for layer in getattr(model, "layers", ())[-max(adapter.layers, 0) :]}
    inside = [path for path, module in modules.items() if id(module) in layers]
    wanted = {
        path
        for path in modules
        for key in adapter.keys
        if path == key or any(path == f"{layer}.{key}" for layer in inside)
    }
    found = {each.path for each in placed}
    missing, extra = sorted(wanted - found), sorted(found - wanted)
    if missing or extra:
        got = f"none for {listed(missing)}" if missing else f"some for {listed(extra)}"
        raise CheckpointError(
            "an adapter must hold tensors for the modules that adapter_config.json names "
            f"(keys, num_layers), got {got}",
            hint="configuration, weights and base do not belong together, or the file is not "
            "whole: fetch the adapter again",
        )


def _check_copies(adapter: Adapter, tensors: Any, modules: Mapping[str, Any]) -> None:
    """Accept whole weights that equal the base's; PEFT saves embeddings it adapts so."""
    by_core = {core_path(path): module for path, module in modules.items()}
    embeddings = [each for each in modules.values() if isinstance(each, EMBEDDINGS)]
    other: list[str] = []
    for copy in adapter.whole:
        module = by_core.get(core_path(copy.module))
        if module is None and core_path(copy.module) == "lm_head" and len(embeddings) == 1:
            module = embeddings[0]
        weight = module.get("weight") if isinstance(module, nn.Module) else None
        if weight is None or is_packed(module) or not _equal(tensors[copy.tensor], weight):
            other.append(copy.tensor)
    if other:
        raise CheckpointError(
            f"an adapter must leave whole weights as the base has them, got {listed(other)}",
            hint=MERGE_WITH_PEFT,
        )


def _change(product: LowRank, module: Any, tensors: Any, layout: str, dtype: str) -> mx.array:
    """Return what a product adds to a weight, in the weight's own orientation."""
    wide = mx.float64 if dtype == "float64" else mx.float32
    down, up = tensors[product.down].astype(wide), tensors[product.up].astype(wide)
    for name, array in ((product.down, down), (product.up, up)):
        if not mx.isfinite(array).all().item():
            raise CheckpointError(
                f"tensors of an adapter must be finite numbers, got others in {quoted(name)}",
                hint=_FETCH,
            )
    if layout == "peft":
        change = (up @ down).T if product.embedding else up @ down
    elif down.ndim == 3:
        change = up @ down
    elif isinstance(module, EMBEDDINGS):
        change = down @ up
    else:
        change = (down @ up).T
    return change * product.scale


def _misshapen(placed: _Placed, expected: Sequence[int], found: Sequence[int]) -> CheckpointError:
    return CheckpointError(
        f"the tensors of {quoted(placed.product.module)} must make a weight of shape "
        f"{tuple(expected)}, got {tuple(found)}",
        hint="the adapter was trained on another model",
    )


def _stored(folder: Path) -> dict[str, list[Any]]:
    """Return lazy weights of a checkpoint folder by the core of their module's path."""
    stored: dict[str, list[Any]] = {}
    for file in weight_files(folder):
        arrays: Any = mx.load(str(file))
        for name in arrays:
            if not name.endswith(".weight"):
                continue
            stored.setdefault(core_path(name.removesuffix(".weight")), []).append(arrays[name])
    return stored


def _same(stored: mx.array, weight: mx.array) -> bool:
    if stored.shape == weight.shape and mx.array_equal(stored, weight).item():
        return True
    turned = stored.ndim == 2 and stored.shape[::-1] == weight.shape
    return turned and bool(mx.array_equal(stored.T, weight).item())


def _equal(copy: mx.array, weight: mx.array) -> bool:
    """Whether two arrays hold the same numbers, one of them perhaps rounded."""
    return copy.shape == weight.shape and (
        bool(mx.array_equal(copy.astype(weight.dtype), weight).item())
        or bool(mx.array_equal(copy, weight.astype(copy.dtype)).item())
    )
