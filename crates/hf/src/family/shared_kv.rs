//! Families of attention with one KV head and pooled keys.

use super::{Default, EXPERTS, Family, Layers, NORM_TOPK_PROB, QWEN2, Tensor, WINDOW, Windows};
use crate::tensor_transform::Transform;

const WHOLE: Transform = Transform::Whole;
/// The names of published checkpoints, and a norm's of `transformers`.
const DEEPSEEK4_TENSORS: &[Tensor] = &[
    ("attn_norm.weight", "attn_norm.weight", WHOLE),
    ("attn.attn_sink", "attn_sinks.weight", WHOLE),
    ("attn.wq_a.weight", "attn_q_a.weight", WHOLE),
    ("attn.q_norm.weight", "attn_q_a_norm.weight", WHOLE),
    ("attn.wq_b.weight", "attn_q_b.weight", WHOLE),
    ("attn.wkv.weight", "attn_kv.weight", WHOLE),
    ("attn.kv_norm.weight", "attn_kv_a_norm.weight", WHOLE),
    ("attn.norm.weight", "attn_kv_a_norm.weight", WHOLE),
    ("attn.wo_a.weight", "attn_output_a.weight", WHOLE),
    ("attn.wo_b.weight", "attn_output_b.weight", WHOLE),
    ("attn.compressor.wkv.weight", "attn_compressor_kv.weight", WHOLE),
    ("attn.compressor.wgate.weight", "attn_compressor_gate.weight", WHOLE),
    ("attn.compressor.ape", "attn_compressor_ape.weight", WHOLE),
    ("attn.compressor.norm.weight", "attn_compressor_norm.weight", WHOLE),
    ("attn.indexer.wq_b.weight", "indexer.attn_q_b.weight", WHOLE),
    ("attn.indexer.weights_proj.weight", "indexer.proj.weight", WHOLE),
    ("attn.indexer.compressor.wkv.weight", "indexer_compressor_kv.weight", WHOLE),
    ("attn.indexer.compressor.wgate.weight", "indexer_compressor_gate.weight", WHOLE),
    ("attn.indexer.compressor.ape", "indexer_compressor_ape.weight", WHOLE),
    ("attn.indexer.compressor.norm.weight", "indexer_compressor_norm.weight", WHOLE),
    ("ffn_norm.weight", "ffn_norm.weight", WHOLE),
    ("ffn.gate.weight", "ffn_gate_inp.weight", WHOLE),
    ("ffn.gate.bias", "exp_probs_b.bias", WHOLE),
    ("ffn.gate.tid2eid", "ffn_gate_tid2eid.weight", Transform::Integers),
    ("ffn.shared_experts.w1.weight", "ffn_gate_shexp.weight", WHOLE),
    ("ffn.shared_experts.w3.weight", "ffn_up_shexp.weight", WHOLE),
    ("ffn.shared_experts.w2.weight", "ffn_down_shexp.weight", WHOLE),
    ("hc_attn_fn", "hc_attn_fn.weight", WHOLE),
    ("hc_attn_scale", "hc_attn_scale.weight", WHOLE),
    ("hc_attn_base", "hc_attn_base.weight", WHOLE),
    ("hc_ffn_fn", "hc_ffn_fn.weight", WHOLE),
    ("hc_ffn_scale", "hc_ffn_scale.weight", WHOLE),
    ("hc_ffn_base", "hc_ffn_base.weight", WHOLE),
];

/// Its routers always normalize weights.
pub(super) const DEEPSEEK4: Family = Family {
    class: "DeepseekV4ForCausalLM",
    arch: "deepseek4",
    defaults: &[(NORM_TOPK_PROB, Default::Flag(true)), (WINDOW, Default::Size(128))],
    windows: Windows::All,
    rotary_fraction: 0.125,
    experts: Some(EXPERTS),
    layers: Layers::SharedKv,
    tensors: DEEPSEEK4_TENSORS,
    fixed: &[(NORM_TOPK_PROB, 1.0), ("attention_bias", 0.0), ("mlp_bias", 0.0)],
    words: &[("scoring_func", "sqrtsoftplus")],
    ..QWEN2
};
