//! Gemma.

use super::{CAPS, Default, EXPERTS, Family, GELU, Layers, MILLION, QWEN2, WINDOW, Windows};
use crate::tensor_transform::Transform;

pub(super) const GEMMA: Family =
    Family { class: "GemmaForCausalLM", arch: "gemma", norms_minus_one: true, activations: GELU, ..QWEN2 };

pub(super) const GEMMA3: Family = Family {
    class: "Gemma3ForCausalLM",
    arch: "gemma3",
    has_post_attention_norm: true,
    defaults: &[
        ("num_attention_heads", Default::Size(8)),
        ("num_key_value_heads", Default::Size(4)),
        ("head_dim", Default::Size(256)),
        ("query_pre_attn_scalar", Default::Size(256)),
        ("max_position_embeddings", Default::Size(131_072)),
        ("rms_norm_eps", Default::Number(1e-6)),
        (WINDOW, Default::Size(4096)),
        MILLION,
    ],
    windows: Windows::Every(6),
    scaled_by_width: 62,
    factors: CAPS,
    ..GEMMA
};

pub(super) const GEMMA4: Family = Family {
    class: "Gemma4ForCausalLM",
    arch: "gemma4",
    defaults: &[(WINDOW, Default::Size(512)), ("hidden_size_per_layer_input", Default::Size(256)), MILLION],
    norms_minus_one: false,
    has_post_attention_norm: true,
    windows: Windows::Named,
    factors: &[("final_logit_softcapping", "final_logit_softcapping")],
    experts: Some(EXPERTS),
    layers: Layers::OwnHeads,
    tensors: &[
        ("layer_scalar", "layer_output_scale.weight", Transform::Whole),
        ("per_layer_input_gate.weight", "inp_gate.weight", Transform::Whole),
        ("per_layer_projection.weight", "proj.weight", Transform::Whole),
        ("post_per_layer_input_norm.weight", "post_norm.weight", Transform::Whole),
        ("router.proj.weight", "ffn_gate_inp.weight", Transform::Whole),
        ("router.scale", "ffn_gate_inp.scale", Transform::Whole),
        ("router.per_expert_scale", "ffn_down_exps.scale", Transform::Whole),
        ("experts.gate_up_proj", "ffn_gate_up_exps.weight", Transform::Whole),
        ("experts.down_proj", "ffn_down_exps.weight", Transform::Whole),
        ("pre_feedforward_layernorm_2.weight", "pre_ffw_norm_2.weight", Transform::Whole),
        ("post_feedforward_layernorm_1.weight", "post_ffw_norm_1.weight", Transform::Whole),
        ("post_feedforward_layernorm_2.weight", "post_ffw_norm_2.weight", Transform::Whole),
    ],
    fixed: &[("attention_bias", 0.0)],
    ..GEMMA
};

pub(super) const GEMMA3N: Family = Family {
    class: "Gemma3nForCausalLM",
    arch: "gemma3n",
    defaults: &[
        ("num_attention_heads", Default::Size(8)),
        ("num_key_value_heads", Default::Size(2)),
        ("head_dim", Default::Size(256)),
        ("rms_norm_eps", Default::Number(1e-6)),
        ("max_position_embeddings", Default::Size(32_768)),
        ("altup_num_inputs", Default::Size(4)),
        ("hidden_size_per_layer_input", Default::Size(256)),
        ("num_kv_shared_layers", Default::Size(15)),
        (WINDOW, Default::Size(512)),
        MILLION,
    ],
    norms_minus_one: false,
    has_post_attention_norm: true,
    windows: Windows::Named,
    factors: &[("final_logit_softcapping", "final_logit_softcapping")],
    layers: Layers::Streams,
    tensors: &[
        ("altup.correct_output_scale", "altup_correct_scale.weight", Transform::Whole),
        ("altup.correction_coefs.weight", "altup_correct_coef.weight", Transform::Whole),
        ("altup.prediction_coefs.weight", "altup_predict_coef.weight", Transform::Whole),
        ("altup.modality_router.weight", "altup_router.weight", Transform::Whole),
        ("altup.router_norm.weight", "altup_router_norm.weight", Transform::Whole),
        ("laurel.linear_left.weight", "laurel_l.weight", Transform::Whole),
        ("laurel.linear_right.weight", "laurel_r.weight", Transform::Whole),
        ("laurel.post_laurel_norm.weight", "laurel_post_norm.weight", Transform::Whole),
        ("per_layer_input_gate.weight", "inp_gate.weight", Transform::Whole),
        ("per_layer_projection.weight", "proj.weight", Transform::Whole),
        ("post_per_layer_input_norm.weight", "post_norm.weight", Transform::Whole),
    ],
    fixed: &[("altup_correct_scale", 1.0), ("attention_bias", 0.0)],
    ..GEMMA
};
