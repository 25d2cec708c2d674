"""Adapter folders as mlx-lm and PEFT write them, made from plain numbers."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

RANK = 3
SCALE = 0.75

Product = tuple[np.ndarray, np.ndarray]
"""A (r, in) and B (out, r): a weight of shape (out, in) grows by scale times B @ A."""


def draw(
    shapes: Mapping[str, Sequence[int]], rank: int = RANK, seed: int = 7, size: float = 0.3
) -> dict[str, Product]:
    """Draw a product for each module, by the shape (out, in) of its weight."""
    numbers = np.random.default_rng(seed)
    return {
        module: (
            numbers.normal(0, size, (rank, width)).astype(np.float32),
            numbers.normal(0, size, (height, rank)).astype(np.float32),
        )
        for module, (height, width) in shapes.items()
    }


def write_mlx(
    folder: Path,
    products: Mapping[str, Product],
    *,
    embeddings: Sequence[str] = (),
    tensors: Mapping[str, np.ndarray] | None = None,
    **config: Any,
) -> Path:
    """Write an adapter of mlx-lm; products on embeddings have the shape (V, D) of them."""
    arrays: dict[str, np.ndarray] = {}
    for module, (a, b) in products.items():
        down, up = (b, a) if module in embeddings else (a.T, b.T)
        arrays[f"{module}.lora_a"], arrays[f"{module}.lora_b"] = down, up
    ranks = {a.shape[0] for a, _ in products.values()} or {RANK}
    parameters = {"rank": max(ranks), "scale": SCALE, "dropout": 0.0}
    parameters |= config.pop("lora_parameters", {})
    told = {"fine_tune_type": "lora", "lora_parameters": parameters, "model": "org/base"}
    return _write(folder, "adapters.safetensors", {**arrays, **(tensors or {})}, {**told, **config})


def write_peft(
    folder: Path,
    products: Mapping[str, Product],
    *,
    embeddings: Sequence[str] = (),
    name: str = "",
    tensors: Mapping[str, np.ndarray] | None = None,
    **config: Any,
) -> Path:
    """Write an adapter of PEFT, by the names of modules in Hugging Face's classes."""
    arrays: dict[str, np.ndarray] = {}
    middle = f".{name}" if name else ""
    for module, (a, b) in products.items():
        path = f"base_model.model.{module}"
        if module in embeddings:  # their A is (r, V), their B (D, r)
            arrays[f"{path}.lora_embedding_A{middle}"] = b.T
            arrays[f"{path}.lora_embedding_B{middle}"] = a.T
        else:
            arrays[f"{path}.lora_A{middle}.weight"] = a
            arrays[f"{path}.lora_B{middle}.weight"] = b
    told = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": SCALE * RANK,
        "base_model_name_or_path": "org/base",
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "init_lora_weights": True,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    arrays |= tensors or {}
    return _write(folder, "adapter_model.safetensors", arrays, {**told, **config})


def _write(
    folder: Path, name: str, arrays: Mapping[str, np.ndarray], config: Mapping[str, Any]
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    # A view would be written in the order of what it is a view of.
    save_file({key: np.ascontiguousarray(array) for key, array in arrays.items()}, folder / name)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
