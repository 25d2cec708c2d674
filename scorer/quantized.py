"""Packed weights of a model, and plain ones in their place. Call on the MLX thread."""

from collections.abc import Iterator
from typing import Any

from weighbridge.scorer.errors import listed
from weighbridge.scorer.quantization import refused_packing


def dequantize_model(model: Any, dtype: Any) -> None:
    """Replace all packed modules by plain ones, one after the other. Call on the MLX thread.

    Args:
        model: A model of mlx-lm.
        dtype: MLX type of the weights that come out.
    """
    import mlx.core as mx

    for path, module in list(packed_modules(model)):
        plain = plain_module(module, plain_weight(module).astype(dtype))
        # At once: kept lazy, packed and plain weights would be held together at the end.
        mx.eval(plain.parameters())
        replace_module(model, path, plain)


def packed_modules(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield path and module of the packed weights that have a plain counterpart."""
    for path, module in model.named_modules():
        if is_packed(module):
            yield path, module


def is_packed(module: Any) -> bool:
    """Whether a module holds packed weights, and has a plain counterpart."""
    return _counterpart(module) is not None


def holds_packed(module: Any) -> bool:
    """Whether a module holds packed weights of any kind, with a plain counterpart or not."""
    return hasattr(module, "bits") or "scales" in module


def plain_weight(module: Any, rows: Any = None) -> Any:
    """Return what packed weights stand for, in float32.

    Scales and biases are widened first: 16-bit ones would round each product.

    Args:
        module: A packed module of MLX or mlx-lm.
        rows: Indices (K,) of the rows wanted of a matrix; None for all of any shape.
    """
    import mlx.core as mx

    weight, scales, biases = module["weight"], module["scales"], module.get("biases")
    if rows is not None:
        weight, scales = weight[rows], scales[rows]
        biases = None if biases is None else biases[rows]
    if biases is not None:  # affine
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    plain = mx.dequantize(
        weight,
        scales,
        biases,
        group_size=module.group_size,
        bits=module.bits,
        mode=module.mode,
        dtype=mx.float32,
    )
    factor = module.get("global_scale")  # of nvfp4 experts, one each
    # As its kernels do: a factor is the largest weight, and 6 times 448 the largest product
    # of their 4-bit and 8-bit floats.
    return plain if factor is None else plain * (factor / 2688.0)[:, None, None]


def plain_module(module: Any, weight: Any) -> Any:
    """Make the plain counterpart of a packed module around a weight.

    Args:
        module: A packed module.
        weight: Its plain weight.
    """
    plain = _counterpart(module)
    if plain is None:
        raise TypeError(f"{type(module).__name__} has no plain counterpart")
    # The smallest one: its own random weights are thrown away.
    made = plain(*([1] * (weight.ndim if weight.ndim > 2 else 2)))
    made.weight = weight
    made.pop("bias", None)
    if "bias" in module:
        made.bias = module.bias.astype(weight.dtype)
    made.train(module.training)
    return made


def replace_module(model: Any, path: str, module: Any) -> None:
    """Put a module in the place of another.

    Args:
        model: A model of mlx-lm.
        path: Where, dotted, with numbers for the places of a list.
        module: The new one.
    """
    from mlx.utils import tree_unflatten

    model.update_modules(tree_unflatten([(path, module)]))


def check_types(model: Any) -> None:
    """Refuse weights of plain modules that are no floats: packed ones that stayed packed.

    mlx-lm assigns a weight whatever its type is, and 8-bit floats come as integers.

    Args:
        model: A model of mlx-lm, loaded lazily.

    Raises:
        CheckpointError: With the first names.
    """
    import mlx.core as mx

    odd: list[str] = []
    for path, module in model.named_modules():
        if holds_packed(module):
            continue
        weight = module.get("weight")
        if isinstance(weight, mx.array) and not mx.issubdtype(weight.dtype, mx.floating):
            odd.append(f"{path}.weight")
    if odd:
        raise refused_packing(f"got integers for {listed(odd)}")


def _counterpart(module: Any) -> Any | None:
    from mlx import nn
    from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
    from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

    pairs = {
        nn.QuantizedLinear: nn.Linear,
        nn.QuantizedEmbedding: nn.Embedding,
        QuantizedSwitchLinear: SwitchLinear,
        QuantizedMultiLinear: MultiLinear,
    }
    # Their subclasses (layers that a model fuses for itself) do more than multiply.
    return pairs.get(type(module))
