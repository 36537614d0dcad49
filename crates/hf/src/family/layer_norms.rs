//! Families with LayerNorms, whose biases GGUF stores as they are.

use super::{Default, EXPERTS, Experts, Family, GELU, LAYER_EPS, MILLION, QWEN2, Windows};
use crate::tensor_transform::Transform;

/// Epsilon in GGUF.
const EPS: &str = LAYER_EPS.1;

pub(super) const STARCODER2: Family = Family {
    class: "Starcoder2ForCausalLM",
    arch: "starcoder2",
    defaults: &[],
    eps: ("norm_epsilon", EPS),
    activations: GELU,
    windows: Windows::All,
    tensors: &[
        ("mlp.c_fc.weight", "ffn_up.weight", Transform::Whole),
        ("mlp.c_fc.bias", "ffn_up.bias", Transform::Whole),
        ("mlp.c_proj.weight", "ffn_down.weight", Transform::Whole),
        ("mlp.c_proj.bias", "ffn_down.bias", Transform::Whole),
    ],
    ..QWEN2
};

/// Phi-1, 1.5 and 2.
pub(super) const PHI2: Family = Family {
    class: "PhiForCausalLM",
    arch: "phi2",
    defaults: &[],
    eps: LAYER_EPS,
    activations: GELU,
    rotary_fraction: 0.5,
    tensors: &[
        ("self_attn.dense.weight", "attn_output.weight", Transform::Whole),
        ("self_attn.dense.bias", "attn_output.bias", Transform::Whole),
        ("mlp.fc1.weight", "ffn_up.weight", Transform::Whole),
        ("mlp.fc1.bias", "ffn_up.bias", Transform::Whole),
        ("mlp.fc2.weight", "ffn_down.weight", Transform::Whole),
        ("mlp.fc2.bias", "ffn_down.bias", Transform::Whole),
    ],
    fixed: &[("qk_layernorm", 0.0)],
    ..QWEN2
};

/// Phi-3.5-MoE, whose epsilon has the name of RMSNorm's.
pub(super) const PHI_MOE: Family = Family {
    class: "PhimoeForCausalLM",
    arch: "phimoe",
    defaults: &[MILLION],
    windows: Windows::All,
    experts: Some(Experts { width: None, ..EXPERTS }),
    fixed: &[("router_jitter_noise", 0.01), ("num_experts_per_tok", 2.0)],
    ..QWEN2
};

pub(super) const STABLELM: Family = Family {
    class: "StableLmForCausalLM",
    arch: "stablelm",
    defaults: &[],
    eps: LAYER_EPS,
    rotary_fraction: 0.25,
    fixed: &[("qk_layernorm", 0.0), ("use_parallel_residual", 0.0)],
    ..QWEN2
};

/// Minitron and Nemotron-4.
pub(super) const NEMOTRON4: Family = Family {
    class: "NemotronForCausalLM",
    arch: "nemotron",
    defaults: &[("head_dim", Default::Size(128))],
    norms_minus_one: true,
    eps: ("norm_eps", EPS),
    activations: &["relu2"],
    rotary_fraction: 0.5,
    ..QWEN2
};

pub(super) const JAIS2: Family = Family {
    class: "Jais2ForCausalLM",
    arch: "jais2",
    defaults: &[],
    eps: LAYER_EPS,
    activations: &["relu2"],
    ..QWEN2
};
