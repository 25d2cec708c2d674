"""The weights of a checkpoint as a model of mlx-lm. Call on the MLX thread."""

import logging
from pathlib import Path
from typing import Any

import numpy as np

from weighbridge.scorer.adapters import Adapter
from weighbridge.scorer.config_file import config_or_empty
from weighbridge.scorer.errors import CheckpointError
from weighbridge.scorer.quantization import check_quantization, refused_packing
from weighbridge.scorer.quantized import (
    check_types,
    dequantize_model,
    holds_packed,
    packed_modules,
)

logger = logging.getLogger(__name__)

LEAST_CHANGE = 1e-6
"""Smallest change of the logits that proves an adapter, relative to their spread."""

LEAST_KEPT = 0.5
"""Smallest share of an adapter's change that must survive the rounding of the weights."""

MOSTLY_KEPT = 0.9
"""Below this share, rounding is worth a warning."""

# A run computes in the dtype of its backend; these two are where a dtype can be named.
_IN_FLOAT32 = 'ParallelScorer(…, dtype="float32"), or checkpoint fuse --dtype float32'
_PROMPT = (1, 2, 3, 4, 5, 6, 7, 8)


def load_model(
    folder: Path, dtype: str, *, adapter: Adapter | None = None, dequantize: bool = False
) -> Any:
    """Load the weights of a checkpoint and cast them. Call on the MLX thread.

    Args:
        folder: A checkpoint folder.
        dtype: Name of the compute dtype, as MLX spells it.
        adapter: What to fuse into the weights.
        dequantize: Unpack all packed weights: a CPU multiplies packed ones some 80 times
            slower. float64 has no packed weights at all.

    Returns:
        An evaluated text model of mlx-lm.

    Raises:
        CheckpointError: The weights cannot be loaded or are packed in a way that is not
            read rightly, the adapter does not fit, or it changes nothing.
    """
    import mlx.core as mx

    config = config_or_empty(folder)
    check_quantization(config)
    if dequantize and config.get("quantize_activations"):
        raise refused_packing("got quantize_activations, whose layers run on Metal alone")
    model = _load(folder)
    check_types(model)
    if adapter is not None:
        from weighbridge.scorer.low_rank import check_layout

        check_layout(model, adapter, folder)
    packed = None
    if (dequantize or dtype == "float64") and next(packed_modules(model), None):
        packed = _held_bytes(model)
        dequantize_model(model, getattr(mx, dtype))
    cast_weights(model, dtype)
    mx.eval(model.parameters())
    if packed is not None:
        logger.warning(
            "%s: packed weights of %.2f GiB are held as %s, %.2f GiB: packed ones are slow "
            "without Metal",
            folder.name,
            packed / 2**30,
            dtype,
            _held_bytes(model) / 2**30,
        )
    if adapter is not None:
        _fuse(model, adapter, dtype)
    return model


def cast_weights(model: Any, dtype: str) -> None:
    """Cast floating-point parameters, but narrow none that has to stay wide.

    An architecture names parameters that 16 bits would spoil, such as the decay of a state
    space (`cast_predicate` of mlx-lm). Scales and factors of packed weights were made in
    their own type, and each stands for a group of weights. These are widened at most.

    Args:
        model: A model of mlx-lm.
        dtype: Name of the compute dtype.
    """
    import mlx.core as mx
    from mlx.utils import tree_map_with_path

    target = getattr(mx, dtype)
    may_narrow = getattr(model, "cast_predicate", None) or (lambda _: True)
    packed = {path for path, module in model.named_modules() if holds_packed(module)}

    def cast(path: str, array: mx.array) -> mx.array:
        if not mx.issubdtype(array.dtype, mx.floating):
            return array
        module, _, leaf = path.rpartition(".")
        narrows = array.dtype != target and array.dtype.size >= target.size
        wide = not may_narrow(path) or (module in packed and leaf != "bias")
        return array if narrows and wide else array.astype(target)

    model.update(tree_map_with_path(cast, model.parameters()))


def prompt_logits(model: Any, tokens: tuple[int, ...] = _PROMPT) -> np.ndarray:
    """Return the logits of a short prompt. Call on the MLX thread.

    Args:
        model: A text model of mlx-lm.
        tokens: T of them.

    Returns:
        (T, V), float32, or float64 for float64 weights.
    """
    import mlx.core as mx

    from weighbridge.scorer.heads import at_least_float32

    logits = at_least_float32(model(mx.array([tokens])))[0]
    mx.eval(logits)
    return np.array(logits)


def _fuse(model: Any, adapter: Adapter, dtype: str) -> None:
    """Fuse an adapter and prove that it changed what the model says."""
    from weighbridge.scorer.heads import relative_difference
    from weighbridge.scorer.low_rank import changed_tokens, fuse_adapter

    # Embeddings change for some tokens only: those must be in the prompt.
    prompt = (*_PROMPT, *changed_tokens(model, adapter))
    before = prompt_logits(model, prompt)
    kept = fuse_adapter(model, adapter, dtype)
    after = prompt_logits(model, prompt)
    if not np.isfinite(after).all():
        raise CheckpointError(
            "the logits of a plain prompt must be finite with an adapter, got some that are not",
            hint="the adapter is damaged, or was trained on another base",
        )
    if kept is None:
        raise CheckpointError(
            "an adapter must change the weights, got one whose products are all zero",
            hint="it was saved before it was trained, or its file is damaged: fetch it again",
        )
    change = relative_difference(after, before)
    if kept < LEAST_KEPT:
        raise CheckpointError(
            f"an adapter must survive in the weights, and rounding to {dtype} keeps "
            f"{max(kept, 0.0):.0%} of it",
            hint=f"float32 keeps it: {_IN_FLOAT32}"
            if dtype.endswith("16")
            else "its tensors are almost zero: it was hardly trained",
        )
    if change < LEAST_CHANGE:
        raise CheckpointError(
            f"an adapter must change the logits, got a change of {change:.1e} (relative)",
            hint="it has no effect on this base: its tensors are almost zero, or belong to "
            "parts that are not in use",
        )
    if kept < MOSTLY_KEPT:
        logger.warning(
            "rounding to %s keeps %.0f%% of the adapter's change; float32 keeps all of it: %s",
            dtype,
            100 * kept,
            _IN_FLOAT32,
        )
    logger.debug("adapter: logits change by %.2g (relative), %.0f%% kept", change, 100 * kept)


def _load(folder: Path) -> Any:
    from mlx_lm.utils import load_model as load

    try:
        return load(folder, lazy=True, strict=True)[0]
    except (Exception, SystemExit) as error:  # what a foreign configuration makes mlx-lm raise
        raise CheckpointError(
            f"the weights of a checkpoint must load with mlx-lm, got {_in_short(error)}",
            hint=f"compare the files in {folder} with where they came from",
        ) from error


def _held_bytes(model: Any) -> int:
    from mlx.utils import tree_flatten

    leaves: Any = tree_flatten(model.parameters())
    return sum(array.nbytes for _, array in leaves)


def _in_short(error: BaseException) -> str:
    """Put a foreign error in one line; mlx-lm names tensors below the first one."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
