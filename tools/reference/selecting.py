"""Tiny models whose queries attend to selected tokens."""

from ngrams import NGRAM_MODELS
from pooled import POOLED_MODELS
from spec import YARN, Spec
from windowed_latent import WINDOWED_LATENT_MODELS

# A query attends to fewer tokens than the prompt has.
SELECTING = {
    "qk_nope_head_dim": 40,
    "v_head_dim": 24,
    "q_lora_rank": 40,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.6,
    "index_topk": 20,
    "index_n_heads": 12,
}
# The second and third layer attend to the tokens of the first.
SHARING = {
    **SELECTING,
    "kv_lora_rank": 128,
    "qk_rope_head_dim": 32,
    "index_head_dim": 64,
    "n_routed_experts": 7,
    "n_group": 1,
    "topk_group": 1,
    "indexer_types": ["full", "shared", "shared", "full"],
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
            "first_k_dense_replace": 1,
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
            **SHARING,
            "first_k_dense_replace": 1,
        },
        without=({"index_topk": 19}, {"index_topk": 256}, {"num_experts_per_tok": 1}),
        less=("layers.3.self_attn.indexer.wk.weight", "indexer.weights_proj.weight", "e_score_correction_bias"),
    ),
    # Three residual streams, which every sublayer reads and writes.
    Spec(
        "hyv4-latent128-index64-streams3",
        hidden=48,
        heads=3,
        kv_heads=3,
        head_dim=None,
        layers=4,
        theta=1e6,
        extra={
            **SHARING,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "hc_mult": 3,
            "hc_magnitude": 1.5,
            "hc_eps": 0.125,
            "swiglu_limit": 2.0,
            "bos_token_id": None,
            "eos_token_id": None,
        },
        without=(
            {"index_topk": 19},
            {"index_topk": 256},
            {"num_experts_per_tok": 1},
            {"hc_magnitude": 1.0},
            {"hc_eps": 0.0},
            {"swiglu_limit": 100.0},
        ),
        less=(
            "layers.3.self_attn.indexer.wk.weight",
            "indexer.weights_proj.weight",
            "indexer.k_norm.bias",
            "attn_hc.fn",
            "ffn_hc.base",
            "hc_head.hc_base",
            "sinks",
            "self_attn.gate_proj.weight",
        ),
    ),
    # Blocks of tokens, for each KV head by itself.
    Spec(
        "minimaxm3-h64-g2-index48-blocks",
        hidden=32,
        heads=4,
        kv_heads=2,
        head_dim=64,
        ffn=24,
        layers=3,
        theta=5e6,
        partial=0.5,
        extra={
            "dense_intermediate_size": 48,
            "shared_intermediate_size": 24,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "routed_scaling_factor": 1.6,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
            "index_n_heads": 2,
            "index_head_dim": 48,
            "index_block_size": 8,
            "index_topk_blocks": 3,
            "index_local_blocks": 1,
            "bos_token_id": None,
            "eos_token_id": None,
        },
        without=(
            {"index_topk_blocks": 2},
            {"index_topk_blocks": 32},
            {"index_block_size": 9},
            {"index_local_blocks": 2},
            {"num_experts_per_tok": 1},
            {"swiglu_limit": 1.0},
        ),
        less=("indexer.q_norm.weight", "e_score_correction_bias", "shared_experts.down_proj.weight"),
    ),
    *POOLED_MODELS,
    *NGRAM_MODELS,
    *WINDOWED_LATENT_MODELS,
]
