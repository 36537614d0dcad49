"""Tiny models with experts whose layers differ in their number of query heads."""

from spec import LLAMA3, YARN, Spec

LAGUNA = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
    "moe_routed_scaling_factor": 1.6,
}

HEADS_BY_LAYER = [
    Spec(
        "laguna-h64-g2-g3-window20-yarn",
        hidden=32,
        heads=4,
        kv_heads=2,
        head_dim=64,
        layers=5,
        theta=5e5,
        local_theta=500.0,
        rope={**YARN, "attention_factor": 1.25},
        rope_without=({}, YARN),
        partial=0.5,
        extra={
            **LAGUNA,
            "num_attention_heads_per_layer": [4, 6, 6, 6, 4],
            "mlp_layer_types": ["dense", *4 * ["sparse"]],
            "sliding_window": 20,
            "layer_types": ["full_attention", *3 * ["sliding_attention"], "full_attention"],
        },
        without=({"sliding_window": 10_000}, {"num_experts_per_tok": 1}, {"moe_routed_scaling_factor": 1.0}),
        less=("e_score_correction_bias", "shared_experts.down_proj.weight", "self_attn.g_proj.weight"),
    ),
    Spec(
        "laguna-h64-g2-gates",
        hidden=32,
        heads=4,
        kv_heads=2,
        head_dim=64,
        theta=5e5,
        extra={
            **LAGUNA,
            "mlp_layer_types": ["dense", "sparse"],
            "sliding_window": 0,
            "gating": "per-element",
        },
        without=({"num_experts_per_tok": 1}, {"moe_routed_scaling_factor": 1.0}),
        less=("e_score_correction_bias", "shared_experts.down_proj.weight", "self_attn.g_proj.weight"),
    ),
    Spec(
        "step35-h64-g2-g3-window20-llama3",
        hidden=32,
        heads=4,
        kv_heads=2,
        head_dim=64,
        layers=5,
        theta=5e5,
        local_theta=500.0,
        rope=LLAMA3,
        partial=0.5,
        extra={
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "share_expert_dim": 20,
            "num_sliding_attention_heads": 6,
            "moe_router_scaling_factor": 1.6,
            "mlp_layer_types": ["dense", *4 * ["sparse"]],
            "sliding_window": 20,
            "layer_types": ["full_attention", *3 * ["sliding_attention"], "full_attention"],
            "pad_token_id": 1,
            "swiglu_limits": [None, None, None, 0.4, 0.3],
            "swiglu_limits_shared": [None, None, None, 0.0, 0.35],
        },
        without=(
            {"sliding_window": 10_000},
            {"num_experts_per_tok": 1},
            {"moe_router_scaling_factor": 1.0},
            {"swiglu_limits": None},
            {"swiglu_limits_shared": None},
        ),
        less=("e_score_correction_bias", "shared_experts.down_proj.weight", "self_attn.g_proj.weight"),
    ),
]


def heads_of_layers(spec: Spec) -> int | list[int]:
    """Returns the number of query heads, or that of each layer."""
    windowed = spec.extra.get("num_sliding_attention_heads", spec.extra.get("swa_num_attention_heads"))
    if windowed is not None:
        return [windowed if kind == "sliding_attention" else spec.heads for kind in spec.extra["layer_types"]]
    return spec.extra.get("num_attention_heads_per_layer", spec.heads)
