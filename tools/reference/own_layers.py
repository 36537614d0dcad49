"""Tiny models of families with a layer or an activation that no other has."""

from spec import LLAMA3, YARN, Spec

GROWING = {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7, "llama_4_scaling_beta": 0.6}

OWN_LAYERS = [
    Spec(
        "mistral4-latent128-yarn-growing",
        hidden=48,
        heads=3,
        kv_heads=3,
        head_dim=None,
        rope=GROWING,
        rope_without=(
            {**GROWING, "factor": 2.0},
            {**GROWING, "mscale": 0.0, "mscale_all_dim": 0.0},
            {**GROWING, "llama_4_scaling_beta": 0.0},
        ),
        extra={
            "qk_nope_head_dim": 40,
            "qk_rope_head_dim": 32,
            "v_head_dim": 24,
            "q_lora_rank": 40,
            "kv_lora_rank": 128,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.6,
        },
        without=({"num_experts_per_tok": 1}, {"norm_topk_prob": False}, {"routed_scaling_factor": 1.0}),
        less=("q_a_layernorm.weight", "shared_experts.down_proj.weight"),
    ),
    Spec(
        "apertus-h64-g2-llama3",
        hidden=128,
        heads=4,
        kv_heads=2,
        head_dim=64,
        theta=1e6,
        rope=LLAMA3,
        less=("act_fn.alpha_p", "act_fn.alpha_n", "act_fn.beta", "q_norm.weight"),
    ),
]
