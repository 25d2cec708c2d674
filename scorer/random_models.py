"""Small models with random weights, for benchmarks: the layers of real ones, made in a second.

Their answers mean nothing. What they cost depends on shapes alone, so the ratio of two
algorithms on one of them says what it would say on trained weights of these shapes.
"""

import importlib
from typing import Any

_SIZES: dict[str, Any] = {
    "num_hidden_layers": 8,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "vocab_size": 32_768,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
RANDOM_MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_SIZES},
    # Three of four layers are gated delta ones, as in the published sizes.
    "qwen3_5": {
        "model_type": "qwen3_5",
        **_SIZES,
        "full_attention_interval": 4,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        **_SIZES,
        "query_pre_attn_scalar": 64,
        "sliding_window": 512,
        "sliding_window_pattern": 4,
    },
}
"""Configurations by name, as a `config.json` has them."""


def random_model(name: str, dtype: str, **changes: Any) -> Any:
    """Make a model of mlx-lm with its own random initialisation, the same each time.

    Call on the MLX thread.

    Args:
        name: One of `RANDOM_MODELS`.
        dtype: Name of the compute dtype, as MLX spells it.
        changes: Other values of its configuration.
    """
    import mlx.core as mx

    config = {**RANDOM_MODELS[name], **changes}
    classes = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(0)
    model = classes.Model(classes.ModelArgs.from_dict(config))
    if config["model_type"] == "gemma3_text":
        model.sanitize({})  # ties the head
    model.set_dtype(getattr(mx, dtype))
    mx.eval(model.parameters())
    return model


def share_weights(model: Any, twin: Any) -> Any:
    """Give a model the very arrays of another one of the same shapes, and return it.

    A model has one reader of its head, so each `Engine` of a benchmark needs a model of its
    own; with shared arrays that costs no memory. Call on the MLX thread.
    """
    return twin.update(model.parameters())
