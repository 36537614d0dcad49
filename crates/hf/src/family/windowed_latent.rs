//! Families of MLA with other sizes in layers with a window.

use super::{CORRECTION, DEEPSEEK, Default, Family, Layers, NORM_TOPK_PROB, THETA, Windows};
use crate::tensor_transform::Transform;

/// dots.3 note's text model, which published configurations have at their top.
pub(super) const DOTS3: Family = Family {
    class: "Dots3NoteForCausalLM",
    is_multimodal: true,
    arch: "dots3note",
    defaults: &[
        (NORM_TOPK_PROB, Default::Flag(true)),
        (THETA, Default::Number(8e7)),
        ("first_k_dense_replace", Default::Size(1)),
        ("num_nextn_predict_layers", Default::Size(1)),
    ],
    windows: Windows::Named,
    layers: Layers::WindowedLatent,
    tensors: &[
        ("self_attn.kv_b_proj.weight", "attn_k_b.weight", Transform::LatentKeys),
        ("self_attn.kv_b_proj.weight", "attn_v_b.weight", Transform::LatentValues),
        ("self_attn.k_rope_only_layernorm.weight", "attn_k_norm.weight", Transform::Whole),
        ("self_attn.g_proj.weight", "attn_gate.weight", Transform::Whole),
        CORRECTION,
    ],
    fixed: &[
        ("moe_layer_freq", 1.0),
        ("use_dsa", 1.0),
        ("use_sliding_window", 1.0),
        ("k_rope_only_layernorm", 1.0),
        ("apply_mla_qkv_lora_rescale", 1.0),
        ("use_dynamic_rsf", 0.0),
        ("moe_gating_fp32", 0.0),
        ("attention_bias", 0.0),
        ("mlp_bias", 0.0),
    ],
    ..DEEPSEEK
};
