"""The configuration of a checkpoint folder, read the same way by all who ask for it."""

import json
from pathlib import Path
from typing import Any

from weighbridge.scorer.chat import first_line
from weighbridge.scorer.errors import CheckpointError
from weighbridge.scorer.weight_files import LFS_POINTER, lfs_pointer

CONFIG_FILE = "config.json"
QUANTIZATION_FILE = "hf_quant_config.json"
"""Where ModelOpt tells how weights are packed; config.json beats it where it tells too."""


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json, and how weights are packed where a file beside it tells.

    mlx-lm reads both, so does everything here that asks what the weights are.

    Args:
        folder: A checkpoint folder.

    Returns:
        The configuration; `quantization_config` is that of hf_quant_config.json where
        config.json has none.

    Raises:
        CheckpointError: config.json is missing, or one of the files is no JSON object.
    """
    config = _read_object(folder / CONFIG_FILE)
    text = config.get("text_config")
    told = any("quantization_config" in part for part in (config, text) if isinstance(part, dict))
    if not told and (folder / QUANTIZATION_FILE).exists():
        config["quantization_config"] = _read_object(folder / QUANTIZATION_FILE)
    return config


def config_or_empty(folder: Path) -> dict[str, Any]:
    """Read the configuration as `read_config` does, {} where that would raise."""
    try:
        return read_config(folder)
    except CheckpointError:
        return {}


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = path.read_bytes()
        if content.startswith(LFS_POINTER):
            raise lfs_pointer(path)
        value: Any = json.loads(content.decode("utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"a checkpoint must hold {path.name}, got none in {path.parent}",
            hint="name the folder that holds config.json and the weights",
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path.name} must be readable JSON, got: {first_line(error)}",
            hint=f"restore {path}",
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path.name} must be a JSON object, got {type(value).__name__}",
            hint=f"restore {path}",
        )
    return value
