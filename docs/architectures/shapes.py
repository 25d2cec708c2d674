"""What the configurations of tiny models share.

`COMMON` is what most architectures read. Windows, chunks and patterns are small, so that a
prompt of 40 tokens meets them.
"""

from typing import Any

Config = dict[str, Any]

COMMON: Config = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "vocab_size": 97,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
}

EXPERTS: Config = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 32,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
}

LATENT: Config = {
    **EXPERTS,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "moe_layer_freq": 1,
}
"""Latent attention (MLA): keys and values are kept as one short vector."""

SPARSE: Config = {**LATENT, "index_head_dim": 16, "index_n_heads": 2, "index_topk": 64}

GATED_DELTA: Config = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "partial_rotary_factor": 0.5,
}

ALTERNATING: Config = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 16,
    "sliding_window_pattern": 2,
}

QWEN3_5: Config = {
    **COMMON,
    **GATED_DELTA,
    "rope_parameters": {
        "type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    },
}

GRANITE: Config = {
    "logits_scaling": 4.0,
    "attention_multiplier": 0.1,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.5,
}

YARN: Config = {
    "type": "yarn",
    "factor": 2.0,
    "original_max_position_embeddings": 256,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
