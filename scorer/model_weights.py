"""The weights of a checkpoint as a model of mlx-lm. Call on the MLX thread."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np

from weighbridge.scorer.adapters import Adapter
from weighbridge.scorer.errors import CheckpointError
from weighbridge.scorer.quantization import check_quantization, refused_packing
from weighbridge.scorer.quantized import check_types, dequantize_model, packed_modules

logger = logging.getLogger(__name__)

LEAST_CHANGE = 1e-6
"""Smallest change of the logits that proves an adapter, relative to their spread."""

LEAST_KEPT = 0.5
"""Smallest share of an adapter's change that must survive the rounding of the weights."""

MOSTLY_KEPT = 0.9
"""Below this share, rounding is worth a warning."""

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

    config = _config(folder)
    check_quantization(config)
    if dequantize and config.get("quantize_activations"):
        raise refused_packing("got quantize_activations, whose layers run on Metal alone")
    model = _load(folder)
    check_types(model)
    if adapter is not None:
        from weighbridge.scorer.low_rank import check_layout

        check_layout(model, adapter, folder)
    if (dequantize or dtype == "float64") and next(packed_modules(model), None):
        packed = _held_bytes(model)
        dequantize_model(model, getattr(mx, dtype))
        model.set_dtype(getattr(mx, dtype))
        logger.warning(
            "%s: packed weights of %.2f GiB are held as %s, %.2f GiB: packed ones are slow "
            "without Metal",
            folder.name,
            packed / 2**30,
            dtype,
            _held_bytes(model) / 2**30,
        )
    model.set_dtype(getattr(mx, dtype))
    mx.eval(model.parameters())
    if adapter is not None:
        _fuse(model, adapter, dtype)
    return model


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
            hint="compute in float32 (--dtype float32)"
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
            "rounding to %s keeps %.0f%% of the adapter's change; float32 keeps all of it "
            "(--dtype float32)",
            dtype,
            100 * kept,
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


def _config(folder: Path) -> dict[str, Any]:
    """Read config.json; what is wrong with it is for mlx-lm to say."""
    try:
        config: Any = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def _held_bytes(model: Any) -> int:
    from mlx.utils import tree_flatten

    leaves: Any = tree_flatten(model.parameters())
    return sum(array.nbytes for _, array in leaves)


def _in_short(error: Exception) -> str:
    """Put a foreign error in one line; mlx-lm names tensors below the first one."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
