//! Families with recurrent layers. One class may name several of them.

use super::routed::MISTRAL4_OF_VISION;
use super::{
    ClassMembers, DEEPSEEK, Default, EXPERTS, Experts, Family, GRANITE, LLAMA, Layers, QWEN2, RMS_EPS, Tensor,
};
use crate::error::HfError;
use crate::folder::Object;
use crate::tensor_transform::Transform;

/// State-space tensors of Granite.
const SPACE: &[Tensor] = &[
    ("mamba.A_log", "ssm_a", Transform::Column),
    ("mamba.D", "ssm_d", Transform::Column),
    ("mamba.dt_bias", "ssm_dt.bias", Transform::Whole),
    ("mamba.conv1d.weight", "ssm_conv1d.weight", Transform::Taps),
    ("mamba.conv1d.bias", "ssm_conv1d.bias", Transform::Whole),
    ("mamba.in_proj.weight", "ssm_in.weight", Transform::Whole),
    ("mamba.norm.weight", "ssm_norm.weight", Transform::Groups),
    ("mamba.out_proj.weight", "ssm_out.weight", Transform::Whole),
];

/// The shared FFN of models without experts.
const DENSE: &[Tensor] = &[
    ("shared_mlp.input_linear.weight", "ffn_gate.weight", Transform::Half(0)),
    ("shared_mlp.input_linear.weight", "ffn_up.weight", Transform::Half(1)),
    ("shared_mlp.output_linear.weight", "ffn_down.weight", Transform::Whole),
];

/// Expert tensors of Granite.
pub(super) const GRANITE_EXPERTS: &[Tensor] = &[
    ("block_sparse_moe.router.layer.weight", "ffn_gate_inp.weight", Transform::Whole),
    ("block_sparse_moe.input_linear.weight", "ffn_gate_exps.weight", Transform::Half(0)),
    ("block_sparse_moe.input_linear.weight", "ffn_up_exps.weight", Transform::Half(1)),
    ("block_sparse_moe.output_linear.weight", "ffn_down_exps.weight", Transform::Whole),
];

/// The shared expert beside them.
const BESIDE_EXPERTS: &[Tensor] = &[
    ("shared_mlp.input_linear.weight", "ffn_gate_shexp.weight", Transform::Half(0)),
    ("shared_mlp.input_linear.weight", "ffn_up_shexp.weight", Transform::Half(1)),
    ("shared_mlp.output_linear.weight", "ffn_down_shexp.weight", Transform::Whole),
];

/// Concatenates two tensor lists; `N` is the total length.
const fn joined<const N: usize>(some: &[Tensor], others: &[Tensor]) -> [Tensor; N] {
    let mut all = [("", "", Transform::Whole); N];
    let mut i = 0;
    while i < N {
        all[i] = if i < some.len() { some[i] } else { others[i - some.len()] };
        i += 1;
    }
    all
}

/// Routed and shared experts.
const OF_EXPERTS: [Tensor; GRANITE_EXPERTS.len() + BESIDE_EXPERTS.len()] =
    joined(GRANITE_EXPERTS, BESIDE_EXPERTS);

/// Granite 4 without state-space layers; the shared FFN is its only one.
pub(super) const GRANITE4: Family = Family {
    class: "GraniteMoeHybridForCausalLM",
    kinds: ClassMembers::Granite4,
    defaults: &[("attention_multiplier", Default::Number(1.0)), ("num_local_experts", Default::Size(8))],
    width: "shared_intermediate_size",
    tensors: DENSE,
    fixed: &[("num_local_experts", 0.0)],
    words: &[("position_embedding_type", "rope")],
    ..GRANITE
};

static GRANITE4_SPACE: Family = Family {
    arch: "granitehybrid",
    layers: Layers::Space,
    tensors: &joined::<{ SPACE.len() + DENSE.len() }>(SPACE, DENSE),
    fixed: &[("num_local_experts", 0.0), ("mamba_conv_bias", 1.0), ("mamba_proj_bias", 0.0)],
    words: &[],
    ..GRANITE4
};

static GRANITE4_SPACE_OF_EXPERTS: Family = Family {
    arch: "granitehybrid",
    width: "intermediate_size",
    layers: Layers::Space,
    tensors: &joined::<{ SPACE.len() + OF_EXPERTS.len() }>(SPACE, &OF_EXPERTS),
    experts: Some(Experts { width: None, by_sigmoid: false }),
    fixed: &[("mamba_conv_bias", 1.0), ("mamba_proj_bias", 0.0)],
    words: &[],
    ..GRANITE4
};

const NEMOTRON_TENSORS: &[Tensor] = &[
    ("norm.weight", "attn_norm.weight", Transform::Whole),
    ("mixer.A_log", "ssm_a", Transform::Column),
    ("mixer.D", "ssm_d", Transform::Column),
    ("mixer.dt_bias", "ssm_dt.bias", Transform::Whole),
    ("mixer.conv1d.weight", "ssm_conv1d.weight", Transform::Taps),
    ("mixer.conv1d.bias", "ssm_conv1d.bias", Transform::Whole),
    ("mixer.in_proj.weight", "ssm_in.weight", Transform::Whole),
    ("mixer.norm.weight", "ssm_norm.weight", Transform::Groups),
    ("mixer.out_proj.weight", "ssm_out.weight", Transform::Whole),
    ("mixer.q_proj.weight", "attn_q.weight", Transform::Whole),
    ("mixer.k_proj.weight", "attn_k.weight", Transform::Whole),
    ("mixer.v_proj.weight", "attn_v.weight", Transform::Whole),
    ("mixer.o_proj.weight", "attn_output.weight", Transform::Whole),
    ("mixer.up_proj.weight", "ffn_up.weight", Transform::Whole),
    ("mixer.down_proj.weight", "ffn_down.weight", Transform::Whole),
    ("mixer.gate.weight", "ffn_gate_inp.weight", Transform::Whole),
    ("mixer.gate.e_score_correction_bias", "exp_probs_b.bias", Transform::Whole),
    ("mixer.fc1_latent_proj.weight", "ffn_latent_down.weight", Transform::Whole),
    ("mixer.fc2_latent_proj.weight", "ffn_latent_up.weight", Transform::Whole),
    ("mixer.shared_experts.up_proj.weight", "ffn_up_shexp.weight", Transform::Whole),
    ("mixer.shared_experts.down_proj.weight", "ffn_down_shexp.weight", Transform::Whole),
];

pub(super) const NEMOTRON: Family = Family {
    class: "NemotronHForCausalLM",
    kinds: ClassMembers::Nemotron,
    arch: "nemotron_h",
    is_reordered: false,
    eps: ("layer_norm_epsilon", RMS_EPS.1),
    layers: Layers::Halved,
    tensors: NEMOTRON_TENSORS,
    fixed: &[
        ("use_bias", 0.0),
        ("mlp_bias", 0.0),
        ("attention_bias", 0.0),
        ("mamba_proj_bias", 0.0),
        ("use_conv_bias", 1.0),
    ],
    words: &[("mlp_hidden_act", "relu2"), ("mamba_hidden_act", "silu")],
    ..LLAMA
};

static NEMOTRON_OF_EXPERTS: Family = Family {
    arch: "nemotron_h_moe",
    experts: Some(Experts { width: Some("moe_intermediate_size"), by_sigmoid: true }),
    ..NEMOTRON
};

/// Mamba-2, without attention.
pub(super) const MAMBA2: Family = Family {
    class: "Mamba2ForCausalLM",
    kinds: ClassMembers::One,
    arch: "mamba2",
    layers: Layers::StateSpaces,
    // As in llama.cpp's converter: nothing limits it.
    defaults: &[("max_position_embeddings", Default::Size(1 << 20))],
    fixed: &[("use_bias", 0.0), ("use_conv_bias", 1.0)],
    words: &[],
    ..NEMOTRON
};

const KIMI_TENSORS: &[Tensor] = &[
    ("self_attn.q_conv1d.weight", "ssm_conv1d_q.weight", Transform::OwnTaps),
    ("self_attn.k_conv1d.weight", "ssm_conv1d_k.weight", Transform::OwnTaps),
    ("self_attn.v_conv1d.weight", "ssm_conv1d_v.weight", Transform::OwnTaps),
    ("self_attn.A_log", "ssm_a", Transform::Column),
    ("self_attn.dt_bias", "ssm_dt.bias", Transform::Whole),
    ("self_attn.f_a_proj.weight", "ssm_f_a.weight", Transform::Whole),
    ("self_attn.f_b_proj.weight", "ssm_f_b.weight", Transform::Whole),
    ("self_attn.g_a_proj.weight", "ssm_g_a.weight", Transform::Whole),
    ("self_attn.g_b_proj.weight", "ssm_g_b.weight", Transform::Whole),
    ("self_attn.b_proj.weight", "ssm_beta.weight", Transform::Whole),
    ("self_attn.o_norm.weight", "ssm_norm.weight", Transform::Whole),
    ("self_attn.kv_b_proj.weight", "attn_k_b.weight", Transform::LatentKeys),
    ("self_attn.kv_b_proj.weight", "attn_v_b.weight", Transform::LatentValues),
    ("block_sparse_moe.gate.e_score_correction_bias", "exp_probs_b.bias", Transform::Whole),
    ("block_sparse_moe.shared_experts.gate_proj.weight", "ffn_gate_shexp.weight", Transform::Whole),
    ("block_sparse_moe.shared_experts.up_proj.weight", "ffn_up_shexp.weight", Transform::Whole),
    ("block_sparse_moe.shared_experts.down_proj.weight", "ffn_down_shexp.weight", Transform::Whole),
    // The dense layer, as `transformers` saves it.
    ("block_sparse_moe.gate_proj.weight", "ffn_gate.weight", Transform::Whole),
    ("block_sparse_moe.up_proj.weight", "ffn_up.weight", Transform::Whole),
    ("block_sparse_moe.down_proj.weight", "ffn_down.weight", Transform::Whole),
];

pub(super) const KIMI_LINEAR: Family = Family {
    class: "KimiLinearForCausalLM",
    arch: "kimi-linear",
    layers: Layers::Kimi,
    tensors: KIMI_TENSORS,
    fixed: &[("mla_use_nope", 1.0), ("moe_layer_freq", 1.0)],
    ..DEEPSEEK
};

/// What Kimi K3 has beside the tensors of Kimi Linear, or instead.
const KIMI_STREAMS_TENSORS: &[Tensor] = &[
    ("self_attn.g_proj.weight", "attn_gate.weight", Transform::GatesOfAttention),
    ("self_attn.g_proj.weight", "ssm_g.weight", Transform::GatesOfState),
    ("block_sparse_moe.routed_expert_down_proj.weight", "ffn_routed_down.weight", Transform::Whole),
    ("block_sparse_moe.routed_expert_up_proj.weight", "ffn_routed_up.weight", Transform::Whole),
    ("block_sparse_moe.routed_expert_norm.weight", "ffn_routed_norm.weight", Transform::Whole),
    ("self_attention_res_norm.weight", "attn_res_score.weight", Transform::Factor { second: false }),
    ("self_attention_res_proj.weight", "attn_res_score.weight", Transform::Factor { second: true }),
    ("mlp_res_norm.weight", "ffn_res_score.weight", Transform::Factor { second: false }),
    ("mlp_res_proj.weight", "ffn_res_score.weight", Transform::Factor { second: true }),
    ("model.output_attn_res_norm.weight", "output_res_score.weight", Transform::Factor { second: false }),
    ("model.output_attn_res_proj.weight", "output_res_score.weight", Transform::Factor { second: true }),
];

/// Kimi K3's text model.
pub(super) const KIMI_K3: Family = Family {
    class: "KimiK3ForConditionalGeneration",
    is_multimodal: true,
    arch: "kimi-k3",
    activations: &["situ"],
    layers: Layers::KimiStreams,
    tensors: &with_rates_of_heads(joined::<{ KIMI_TENSORS.len() + KIMI_STREAMS_TENSORS.len() }>(
        KIMI_TENSORS,
        KIMI_STREAMS_TENSORS,
    )),
    fixed: &[
        ("mla_use_nope", 1.0),
        ("mla_use_output_gate", 1.0),
        ("latent_moe_use_norm", 1.0),
        ("moe_layer_freq", 1.0),
    ],
    words: &[("moe_router_activation_func", "sigmoid")],
    ..KIMI_LINEAR
};

/// Returns the tensors with rates in a row instead of a column.
const fn with_rates_of_heads<const N: usize>(mut all: [Tensor; N]) -> [Tensor; N] {
    let mut i = 0;
    while i < N {
        if matches!(all[i].2, Transform::Column) {
            all[i].2 = Transform::Heads;
        }
        i += 1;
    }
    all
}

/// Ling 3, of which both kinds of layers have a `g_proj`.
const LING3_TENSORS: &[Tensor] = &[
    ("attention.q_proj.weight", "attn_q.weight", Transform::Whole),
    ("attention.k_proj.weight", "attn_k.weight", Transform::Whole),
    ("attention.v_proj.weight", "attn_v.weight", Transform::Whole),
    ("attention.dense.weight", "attn_output.weight", Transform::Whole),
    ("attention.q_conv1d.weight", "ssm_conv1d_q.weight", Transform::OwnTaps),
    ("attention.k_conv1d.weight", "ssm_conv1d_k.weight", Transform::OwnTaps),
    ("attention.v_conv1d.weight", "ssm_conv1d_v.weight", Transform::OwnTaps),
    ("attention.A_log", "ssm_a", Transform::ExponentialColumn),
    ("attention.dt_bias", "ssm_dt.bias", Transform::Whole),
    ("attention.f_proj.weight", "ssm_f_a.weight", Transform::Whole),
    ("attention.g_proj.weight", "ssm_g_a.weight", Transform::GatesOfDims),
    ("attention.g_proj.weight", "attn_gate.weight", Transform::GatesOfHeads),
    ("attention.b_proj.weight", "ssm_beta.weight", Transform::Whole),
    ("attention.o_norm.weight", "ssm_norm.weight", Transform::Whole),
    ("attention.q_a_proj.weight", "attn_q_a.weight", Transform::Whole),
    ("attention.q_a_layernorm.weight", "attn_q_a_norm.weight", Transform::Whole),
    ("attention.q_b_proj.weight", "attn_q_b.weight", Transform::Whole),
    ("attention.kv_a_proj_with_mqa.weight", "attn_kv_a_mqa.weight", Transform::Whole),
    ("attention.kv_a_layernorm.weight", "attn_kv_a_norm.weight", Transform::Whole),
    ("attention.kv_b_proj.weight", "attn_k_b.weight", Transform::LatentKeys),
    ("attention.kv_b_proj.weight", "attn_v_b.weight", Transform::LatentValues),
    ("mlp.gate.expert_bias", "exp_probs_b.bias", Transform::Whole),
];

pub(super) const LING3: Family = Family {
    class: "BailingHybridForCausalLM",
    arch: "bailingmoe3",
    tensors: LING3_TENSORS,
    fixed: &[("kda_safe_gate", 1.0), ("no_kda_lora", 1.0)],
    ..KIMI_LINEAR
};

impl ClassMembers {
    /// Selects the family of a configuration among those of its class, of which `family` is the
    /// default.
    pub(super) fn choose(
        self,
        family: &'static Family,
        config: Object<'_>,
    ) -> Result<&'static Family, HfError> {
        let kinds = |key| Ok::<_, HfError>(config.find_array(key)?.unwrap_or_default());
        Ok(match self {
            Self::One => family,
            Self::Mistral => {
                let text = config.find_object("text_config")?;
                let kind = text.map(|text| text.find_str("model_type")).transpose()?.flatten();
                if kind == Some("mistral4") { &MISTRAL4_OF_VISION } else { family }
            }
            Self::Granite4 => {
                let keeps_states =
                    kinds("layer_types")?.iter().any(|kind| kind == "mamba" || kind == "linear_attention");
                match (keeps_states, config.find_size("num_local_experts")?) {
                    (false, _) => family,
                    (true, Some(0)) => &GRANITE4_SPACE,
                    (true, _) => &GRANITE4_SPACE_OF_EXPERTS,
                }
            }
            Self::Nemotron => {
                let by_letters =
                    config.find_str("hybrid_override_pattern")?.is_some_and(|all| all.contains('E'));
                let by_names = kinds("layers_block_type")?.iter().any(|kind| kind == "moe");
                if by_letters || by_names { &NEMOTRON_OF_EXPERTS } else { family }
            }
        })
    }
}

pub(super) const QWEN3_NEXT_TENSORS: &[Tensor] = &[
    ("linear_attn.A_log", "ssm_a", Transform::Whole),
    ("linear_attn.dt_bias", "ssm_dt.bias", Transform::Whole),
    ("linear_attn.conv1d.weight", "ssm_conv1d.weight", Transform::Taps),
    ("linear_attn.in_proj_ba.weight", "ssm_ba.weight", Transform::Whole),
    ("linear_attn.in_proj_qkvz.weight", "attn_qkv.weight", Transform::DeltaQkv),
    ("linear_attn.in_proj_qkvz.weight", "attn_gate.weight", Transform::DeltaGate),
    ("linear_attn.norm.weight", "ssm_norm.weight", Transform::Whole),
    ("linear_attn.out_proj.weight", "ssm_out.weight", Transform::Whole),
    ("mlp.experts.gate_up_proj", "ffn_gate_exps.weight", Transform::Half(0)),
    ("mlp.experts.gate_up_proj", "ffn_up_exps.weight", Transform::Half(1)),
    ("mlp.experts.down_proj", "ffn_down_exps.weight", Transform::Whole),
];

const PER_HEAD: Transform = Transform::Tiled { behind_keys: false, per_value: false };
const PER_VALUE: Transform = Transform::Tiled { behind_keys: false, per_value: true };
const BEHIND_KEYS: Transform = Transform::Tiled { behind_keys: true, per_value: true };
const QWEN35_TENSORS: &[Tensor] = &[
    ("linear_attn.A_log", "ssm_a", PER_HEAD),
    ("linear_attn.dt_bias", "ssm_dt.bias", PER_HEAD),
    ("linear_attn.conv1d.weight", "ssm_conv1d.weight", BEHIND_KEYS),
    ("linear_attn.in_proj_a.weight", "ssm_alpha.weight", PER_HEAD),
    ("linear_attn.in_proj_b.weight", "ssm_beta.weight", PER_HEAD),
    ("linear_attn.in_proj_qkv.weight", "attn_qkv.weight", BEHIND_KEYS),
    ("linear_attn.in_proj_z.weight", "attn_gate.weight", PER_VALUE),
    ("linear_attn.norm.weight", "ssm_norm.weight", Transform::Whole),
    ("linear_attn.out_proj.weight", "ssm_out.weight", Transform::TiledColumns),
    ("mlp.experts.gate_up_proj", "ffn_gate_exps.weight", Transform::Half(0)),
    ("mlp.experts.gate_up_proj", "ffn_up_exps.weight", Transform::Half(1)),
    ("mlp.experts.down_proj", "ffn_down_exps.weight", Transform::Whole),
];

pub(super) const QWEN35: Family = Family {
    class: "Qwen3_5ForCausalLM",
    arch: "qwen35",
    norms_minus_one: true,
    has_post_attention_norm: true,
    rotary_fraction: 0.25,
    sections: &[11, 11, 10, 0],
    layers: Layers::Delta,
    tensors: QWEN35_TENSORS,
    fixed: &[("attn_output_gate", 1.0)],
    ..QWEN2
};

pub(super) const QWEN35_MOE: Family = Family { arch: "qwen35moe", experts: Some(EXPERTS), ..QWEN35 };

/// What Qwen4-Exp has beside the tensors of Qwen3.5.
const STREAMS_AND_NGRAMS: &[Tensor] = &[
    ("attn_hyper_connection.hc_norm.weight", "hc_attn_norm.weight", Transform::Whole),
    ("attn_hyper_connection.input_mix_weight_down.weight", "hc_attn_down.weight", Transform::Whole),
    ("attn_hyper_connection.input_mix_weight_up.weight", "hc_attn_up.weight", Transform::Whole),
    ("attn_hyper_connection.block_inject_weight.weight", "hc_attn_inject.weight", Transform::Whole),
    ("mlp_hyper_connection.hc_norm.weight", "hc_ffn_norm.weight", Transform::Whole),
    ("mlp_hyper_connection.input_mix_weight_down.weight", "hc_ffn_down.weight", Transform::Whole),
    ("mlp_hyper_connection.input_mix_weight_up.weight", "hc_ffn_up.weight", Transform::Whole),
    ("mlp_hyper_connection.block_inject_weight.weight", "hc_ffn_inject.weight", Transform::Whole),
    ("self_attn.indexer.index_qk_proj.weight", "indexer.q_proj.weight", Transform::IndexRows { keys: false }),
    ("self_attn.indexer.index_qk_proj.weight", "indexer.k_proj.weight", Transform::IndexRows { keys: true }),
    ("self_attn.indexer.q_layernorm.weight", "indexer.q_norm.weight", Transform::Whole),
    ("self_attn.indexer.k_layernorm.weight", "indexer.k_norm.weight", Transform::Whole),
    ("ple.key_proj.weight", "ple_key.weight", Transform::Whole),
    ("ple.value_proj.weight", "ple_value.weight", Transform::Whole),
    ("ple.norm_key.weight", "ple_norm_key.weight", Transform::Whole),
    ("ple.norm_query.weight", "ple_norm_query.weight", Transform::Whole),
    ("ple.norm_conv.weight", "ple_norm_conv.weight", Transform::Whole),
    ("ple.conv1d.weight", "ple_conv1d.weight", Transform::Taps),
];

/// Qwen3.8-Flash-Next.
pub(super) const QWEN4_EXP: Family = Family {
    class: "Qwen4ExpForCausalLM",
    arch: "qwen4exp",
    layers: Layers::DeltaStreams,
    tensors: &joined::<{ QWEN35_TENSORS.len() + STREAMS_AND_NGRAMS.len() }>(
        QWEN35_TENSORS,
        STREAMS_AND_NGRAMS,
    ),
    fixed: &[("attention_bias", 0.0), ("indexer_kv_heads", 1.0)],
    words: &[("output_gate_type", "sigmoid")],
    ..QWEN35_MOE
};
