"""Tiny models whose queries attend to selected tokens."""

from spec import YARN, Spec

# The first layer is dense. A query attends to fewer tokens than the prompt has.
SELECTING = {
    "qk_nope_head_dim": 40,
    "v_head_dim": 24,
    "q_lora_rank": 40,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.6,
    "index_topk": 20,
    "index_n_heads": 12,
}

SELECTING_MODELS = [
    Spec(
        "deepseek32-latent192-index48-yarn",
        hidden=48,
        heads=3,
        kv_heads=3,
        head_dim=None,
        rope={**YARN, "mscale": 0.7, "mscale_all_dim": 0.7},
        rope_without=({}, {**YARN, "mscale": 0.0, "mscale_all_dim": 0.0}),
        extra={
            **SELECTING,
            "kv_lora_rank": 192,
            "qk_rope_head_dim": 32,
            "index_head_dim": 48,
            "n_routed_experts": 9,
            "n_group": 3,
            "topk_group": 1,
        },
        without=({"index_topk": 19}, {"index_topk": 256}, {"num_experts_per_tok": 1}, {"topk_group": 3}),
        less=("indexer.weights_proj.weight", "indexer.k_norm.bias", "e_score_correction_bias"),
    ),
    Spec(
        "glmdsa-latent128-index64-shared",
        hidden=48,
        heads=3,
        kv_heads=3,
        head_dim=None,
        layers=4,
        theta=1e6,
        extra={
            **SELECTING,
            "kv_lora_rank": 128,
            "qk_rope_head_dim": 32,
            "index_head_dim": 64,
            "n_routed_experts": 7,
            "n_group": 1,
            "topk_group": 1,
            "indexer_types": ["full", "shared", "shared", "full"],
        },
        without=({"index_topk": 19}, {"index_topk": 256}, {"num_experts_per_tok": 1}),
        less=("layers.3.self_attn.indexer.wk.weight", "indexer.weights_proj.weight", "e_score_correction_bias"),
    ),
]
