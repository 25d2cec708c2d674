"""The weights of a checkpoint as a model of mlx-lm. Call on the MLX thread."""

from pathlib import Path
from typing import Any

from weighbridge.scorer.errors import CheckpointError


def load_model(folder: Path, dtype: str) -> Any:
    """Load the weights of a checkpoint and cast them. Call on the MLX thread.

    Args:
        folder: A checkpoint folder.
        dtype: Name of the compute dtype, as MLX spells it.

    Returns:
        An evaluated text model of mlx-lm.

    Raises:
        CheckpointError: The weights cannot be loaded.
    """
    import mlx.core as mx
    from mlx_lm.utils import load_model as load

    try:
        model, _ = load(folder, lazy=True, strict=True)
        model.set_dtype(getattr(mx, dtype))
        mx.eval(model.parameters())
    except Exception as error:  # what a foreign configuration makes mlx-lm raise
        raise CheckpointError(
            f"the weights of a checkpoint must load with mlx-lm, got {_in_short(error)}",
            hint=f"compare the files in {folder} with where they came from",
        ) from error
    return model


def _in_short(error: Exception) -> str:
    """Put a foreign error in one line; mlx-lm names tensors below the first one."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
