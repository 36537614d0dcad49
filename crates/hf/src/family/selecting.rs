//! Families of multi-head latent attention, to all tokens or to selected ones.

use super::{BY_SIGMOID, CORRECTION, Default, Family, Layers, NORM_TOPK_PROB, QWEN2, Tensor};
use crate::tensor_transform::{HeadsOf, Transform};

pub(super) const DEEPSEEK: Family = Family {
    class: "",
    arch: "deepseek2",
    layers: Layers::Latent,
    yarn_mscale_factor: Some(0.1),
    experts: Some(BY_SIGMOID),
    tensors: &[
        ("self_attn.kv_b_proj.weight", "attn_k_b.weight", Transform::LatentKeys),
        ("self_attn.kv_b_proj.weight", "attn_v_b.weight", Transform::LatentValues),
        CORRECTION,
    ],
    fixed: &[("rope_interleave", 1.0), ("moe_layer_freq", 1.0)],
    ..QWEN2
};

pub(super) const DEEPSEEK3: Family = Family {
    class: "DeepseekV3ForCausalLM",
    defaults: &[
        (NORM_TOPK_PROB, Default::Flag(true)),
        ("routed_scaling_factor", Default::Number(2.5)),
        ("n_group", Default::Size(8)),
        ("topk_group", Default::Size(4)),
    ],
    ..DEEPSEEK
};

pub(super) const DEEPSEEK32: Family = Family {
    class: "DeepseekV32ForCausalLM",
    arch: "deepseek32",
    layers: Layers::Selecting,
    fixed: &[("rope_interleave", 1.0), ("moe_layer_freq", 1.0), ("indexer_rope_interleave", 0.0)],
    ..DEEPSEEK3
};

pub(super) const GLM_DSA: Family = Family {
    class: "GlmMoeDsaForCausalLM",
    arch: "glm-dsa",
    layers: Layers::Selecting,
    defaults: &[(NORM_TOPK_PROB, Default::Flag(true)), ("routed_scaling_factor", Default::Number(2.5))],
    fixed: &[("rope_interleave", 1.0), ("moe_layer_freq", 1.0), ("indexer_rope_interleave", 1.0)],
    ..DEEPSEEK
};

const OF_INDEX: Transform = Transform::LastNeighbours(HeadsOf::Index);
/// Hunyuan 4. RoPE rotates halves there, and neighbours in GGUF.
const HY_V4_TENSORS: &[Tensor] = &[
    ("self_attn.q_b_proj.weight", "attn_q_b.weight", Transform::LastNeighbours(HeadsOf::Queries)),
    (
        "self_attn.kv_a_proj_with_mqa.weight",
        "attn_kv_a_mqa.weight",
        Transform::LastNeighbours(HeadsOf::Latent),
    ),
    ("self_attn.indexer.wq_b.weight", "indexer.attn_q_b.weight", OF_INDEX),
    ("self_attn.indexer.wk.weight", "indexer.attn_k.weight", OF_INDEX),
    ("self_attn.indexer.k_norm.weight", "indexer.k_norm.weight", OF_INDEX),
    ("self_attn.indexer.k_norm.bias", "indexer.k_norm.bias", OF_INDEX),
    ("self_attn.kv_b_proj.weight", "attn_k_b.weight", Transform::LatentKeys),
    ("self_attn.kv_b_proj.weight", "attn_v_b.weight", Transform::LatentValues),
    ("self_attn.gate_proj.weight", "attn_gate.weight", Transform::Whole),
    ("self_attn.sinks", "attn_sinks.weight", Transform::Whole),
    ("mlp.experts.gate_up_proj", "ffn_gate_exps.weight", Transform::Half(0)),
    ("mlp.experts.gate_up_proj", "ffn_up_exps.weight", Transform::Half(1)),
    ("mlp.experts.down_proj", "ffn_down_exps.weight", Transform::Whole),
    CORRECTION,
    ("attn_hc.fn", "hc_attn_fn.weight", Transform::Whole),
    ("attn_hc.scale", "hc_attn_scale.weight", Transform::Whole),
    ("attn_hc.base", "hc_attn_base.weight", Transform::Whole),
    ("ffn_hc.fn", "hc_ffn_fn.weight", Transform::Whole),
    ("ffn_hc.scale", "hc_ffn_scale.weight", Transform::Whole),
    ("ffn_hc.base", "hc_ffn_base.weight", Transform::Whole),
];

pub(super) const HY_V4: Family = Family {
    class: "HYV4ForCausalLM",
    arch: "hy_v4",
    layers: Layers::Connected,
    defaults: &[(NORM_TOPK_PROB, Default::Flag(true)), ("routed_scaling_factor", Default::Number(2.827))],
    tensors: HY_V4_TENSORS,
    fixed: &[("moe_layer_freq", 1.0)],
    ..DEEPSEEK
};
