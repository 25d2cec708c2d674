"""Small bases for adapters: folders of configuration and weights, and what they say."""

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tests.scorer.conftest import weight_range

from weighbridge.scorer.adapters import read_adapter
from weighbridge.scorer.backend import on_mlx_thread
from weighbridge.scorer.model_weights import load_model, prompt_logits

TOKENS = (5, 17, 60, 3, 88, 41)
SIZES = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 97}
KEYS = ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj")
MORE: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "gpt2": {
        "n_ctx": 64,
        "n_embd": 32,
        "n_head": 2,
        "n_layer": 2,
        "n_positions": 64,
        "layer_norm_epsilon": 1e-5,
    },
}


def bases(tiny: Any, new_folder: Callable[[str], Path]) -> Callable[..., Path]:
    """Make checkpoint folders without tokenizers, once for each kind."""
    made: dict[str, Path] = {}

    def make(architecture: str = "llama", **changes: Any) -> Path:
        key = json.dumps([architecture, changes], sort_keys=True)
        if key not in made:
            folder = new_folder(architecture)
            config = {**SIZES, **MORE.get(architecture, {}), **changes}
            if architecture not in MORE:
                config = tiny.config(architecture, **config)
            config["model_type"] = architecture
            (folder / "config.json").write_text(json.dumps(config))
            on_mlx_thread(save, folder, config)
            made[key] = folder
        return made[key]

    return make


def save(folder: Path, config: Mapping[str, Any]) -> None:
    import mlx.core as mx
    from mlx.utils import tree_flatten

    architecture = config["model_type"]
    classes = importlib.import_module(f"mlx_lm.models.{architecture}")
    model = classes.Model(classes.ModelArgs.from_dict(dict(config)))
    if architecture == "gemma3_text" and config["tie_word_embeddings"]:
        model.sanitize({})  # ties the head, as a checkpoint without one does
    numbers = np.random.default_rng(0)
    leaves: Any = tree_flatten(model.parameters())
    weights: dict[str, mx.array] = {}
    for name, array in leaves:
        drawn = numbers.normal(*weight_range(name, array.ndim, architecture), array.shape)
        weights[name] = mx.array(drawn.astype(np.float32))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)


def shapes(folder: Path, ends: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the modules whose paths end so."""

    def look() -> dict[str, tuple[int, ...]]:
        model = load_model(folder, "float32")
        found = {path: each for path, each in model.named_modules() if path.endswith(tuple(ends))}
        return {path: tuple(each.weight.shape) for path, each in sorted(found.items())}

    return on_mlx_thread(look)


def logits(
    folder: Path, adapter: Path | None = None, dtype: str = "float32", **options: Any
) -> np.ndarray:
    read = read_adapter(adapter) if adapter else None
    return on_mlx_thread(
        lambda: prompt_logits(load_model(folder, dtype, adapter=read, **options), TOKENS)
    )


def load_on_cpu(folder: Path, adapter: Path, dtype: str) -> Any:
    import mlx.core as mx

    with mx.stream(mx.cpu):
        return load_model(folder, dtype, adapter=read_adapter(adapter))
