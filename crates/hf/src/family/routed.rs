//! MoE families of 2026, with routers by sigmoid or softmax.

use super::{
    BY_SIGMOID, CORRECTION, DEEPSEEK, Default, EXPERTS, Experts, Family, LAYER_EPS, Layers, NORM_TOPK_PROB,
    QWEN2, Tensor, WINDOW, Windows,
};
use crate::tensor_transform::Transform;

/// The selection bias, where it belongs to the layer and not to the router.
const CORRECTION_OF_LAYER: Tensor = ("mlp.e_score_correction_bias", "exp_probs_b.bias", Transform::Whole);

const BIAS_OF_LAYER: Tensor = ("mlp.expert_bias", "exp_probs_b.bias", Transform::Whole);
const ROUTER: Tensor = ("mlp.router.gate.weight", "ffn_gate_inp.weight", Transform::Whole);

/// K-EXAONE.
pub(super) const EXAONE_MOE: Family = Family {
    class: "ExaoneMoeForCausalLM",
    arch: "exaone-moe",
    defaults: &[(NORM_TOPK_PROB, Default::Flag(true)), (WINDOW, Default::Size(4096))],
    windows: Windows::Every(4),
    experts: Some(BY_SIGMOID),
    tensors: &[CORRECTION, CORRECTION_OF_LAYER],
    ..QWEN2
};

/// Trinity. Its routers always normalize weights.
pub(super) const AFMOE: Family = Family {
    class: "AfmoeForCausalLM",
    arch: "afmoe",
    defaults: &[
        ("mup_enabled", Default::Flag(false)),
        (NORM_TOPK_PROB, Default::Flag(true)),
        (WINDOW, Default::Size(1024)),
    ],
    has_post_attention_norm: true,
    windows: Windows::Every(4),
    factors: &[("route_scale", "expert_weights_scale")],
    experts: Some(BY_SIGMOID),
    tensors: &[
        ("pre_mlp_layernorm.weight", "ffn_norm.weight", Transform::Whole),
        ("self_attn.gate_proj.weight", "attn_gate.weight", Transform::Whole),
        ROUTER,
        BIAS_OF_LAYER,
    ],
    fixed: &[("mup_enabled", 1.0)],
    ..QWEN2
};

pub(super) const MELLUM: Family = Family {
    class: "MellumForCausalLM",
    arch: "mellum",
    defaults: &[(NORM_TOPK_PROB, Default::Flag(true)), (WINDOW, Default::Size(1024))],
    windows: Windows::Every(4),
    experts: Some(EXPERTS),
    ..QWEN2
};

/// North Mini Code. Dense layers have another width than experts.
pub(super) const COHERE2_MOE: Family = Family {
    class: "Cohere2MoeForCausalLM",
    arch: "cohere2moe",
    defaults: &[
        (NORM_TOPK_PROB, Default::Flag(true)),
        (WINDOW, Default::Size(4096)),
        ("logit_scale", Default::Number(0.0625)),
    ],
    eps: LAYER_EPS,
    width: "prefix_dense_intermediate_size",
    windows: Windows::Named,
    factors: &[("logit_scale", "logit_scale")],
    experts: Some(Experts { width: Some("intermediate_size"), ..BY_SIGMOID }),
    fixed: &[("prefix_dense_sliding_window_pattern", 1.0)],
    words: &[("expert_selection_fn", "sigmoid"), ("shared_expert_combination_strategy", "average")],
    ..QWEN2
};

/// Mistral Small 4.
pub(super) const MISTRAL4: Family = Family {
    class: "Mistral4ForCausalLM",
    arch: "mistral4",
    defaults: &[(NORM_TOPK_PROB, Default::Flag(true))],
    experts: Some(EXPERTS),
    tensors: &[
        ("self_attn.kv_b_proj.weight", "attn_k_b.weight", Transform::LatentKeys),
        ("self_attn.kv_b_proj.weight", "attn_v_b.weight", Transform::LatentValues),
        ("mlp.experts.gate_up_proj", "ffn_gate_up_exps.weight", Transform::Whole),
        ("mlp.experts.down_proj", "ffn_down_exps.weight", Transform::Whole),
    ],
    fixed: &[("rope_interleave", 1.0), ("n_group", 1.0)],
    ..DEEPSEEK
};

/// Its vision model, whose class is that of Mistral Small 3.
pub(super) static MISTRAL4_OF_VISION: Family = Family { is_multimodal: true, ..MISTRAL4 };

/// Hunyuan 3. Its routers always normalize weights.
pub(super) const HY_V3: Family = Family {
    class: "HYV3ForCausalLM",
    arch: "hy_v3",
    defaults: &[(NORM_TOPK_PROB, Default::Flag(true))],
    factors: &[("router_scaling_factor", "expert_weights_scale")],
    experts: Some(BY_SIGMOID),
    tensors: &[
        ROUTER,
        BIAS_OF_LAYER,
        ("mlp.shared_mlp.gate_proj.weight", "ffn_gate_shexp.weight", Transform::Whole),
        ("mlp.shared_mlp.up_proj.weight", "ffn_up_shexp.weight", Transform::Whole),
        ("mlp.shared_mlp.down_proj.weight", "ffn_down_shexp.weight", Transform::Whole),
    ],
    ..QWEN2
};

const HEAD_GATES: Tensor = ("self_attn.g_proj.weight", "attn_gate.weight", Transform::Whole);

/// Laguna. Its routers always normalize weights.
pub(super) const LAGUNA: Family = Family {
    class: "LagunaForCausalLM",
    arch: "laguna",
    defaults: &[],
    windows: Windows::Named,
    factors: &[("moe_routed_scaling_factor", "expert_weights_scale")],
    experts: Some(BY_SIGMOID),
    layers: Layers::HeadsByLayer { halves_full: false },
    tensors: &[
        HEAD_GATES,
        CORRECTION,
        ("mlp.experts.e_score_correction_bias", "exp_probs_b.bias", Transform::Whole),
    ],
    fixed: &[("moe_apply_router_weight_on_input", 0.0), ("moe_router_logit_softcapping", 0.0)],
    ..QWEN2
};

/// Step 3.5.
pub(super) const STEP35: Family = Family {
    class: "Step3p5ForCausalLM",
    arch: "step35",
    defaults: &[],
    norms_minus_one: true,
    windows: Windows::Named,
    factors: &[("moe_router_scaling_factor", "expert_weights_scale")],
    experts: Some(BY_SIGMOID),
    layers: Layers::HeadsByLayer { halves_full: true },
    tensors: &[
        HEAD_GATES,
        ("moe.gate.weight", "ffn_gate_inp.weight", Transform::Whole),
        ("moe.router_bias", "exp_probs_b.bias", Transform::Whole),
        ("moe.gate_proj.weight", "ffn_gate_exps.weight", Transform::Whole),
        ("moe.up_proj.weight", "ffn_up_exps.weight", Transform::Whole),
        ("moe.down_proj.weight", "ffn_down_exps.weight", Transform::Whole),
        ("share_expert.gate_proj.weight", "ffn_gate_shexp.weight", Transform::Whole),
        ("share_expert.up_proj.weight", "ffn_up_shexp.weight", Transform::Whole),
        ("share_expert.down_proj.weight", "ffn_down_shexp.weight", Transform::Whole),
    ],
    fixed: &[("norm_expert_weight", 1.0), ("moe_every_n_layer", 1.0), ("use_head_wise_attn_gate", 1.0)],
    ..QWEN2
};

/// MiniMax M3. Its routers always normalize weights; experts have the width that most families have
/// for dense layers.
pub(super) const MINIMAX_M3: Family = Family {
    class: "MiniMaxM3SparseForConditionalGeneration",
    is_multimodal: true,
    arch: "minimax-m3",
    defaults: &[("routed_scaling_factor", Default::Number(2.0))],
    norms_minus_one: true,
    width: "dense_intermediate_size",
    activations: &["silu", "swigluoai"],
    experts: Some(Experts { width: Some("intermediate_size"), ..BY_SIGMOID }),
    layers: Layers::SelectingBlocks,
    tensors: &[
        ("block_sparse_moe.e_score_correction_bias", "exp_probs_b.bias", Transform::Whole),
        ("block_sparse_moe.shared_experts.gate_proj.weight", "ffn_gate_shexp.weight", Transform::Whole),
        ("block_sparse_moe.shared_experts.up_proj.weight", "ffn_up_shexp.weight", Transform::Whole),
        ("block_sparse_moe.shared_experts.down_proj.weight", "ffn_down_shexp.weight", Transform::Whole),
        ("self_attn.index_q_proj.weight", "indexer.q_proj.weight", Transform::Whole),
        ("self_attn.index_k_proj.weight", "indexer.k_proj.weight", Transform::Whole),
        ("self_attn.index_q_norm.weight", "indexer.q_norm.weight", Transform::Whole),
        ("self_attn.index_k_norm.weight", "indexer.k_norm.weight", Transform::Whole),
    ],
    fixed: &[("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)],
    ..QWEN2
};
