//! Tensor names in folders, and those in GGUF.

use crate::connections;
use crate::family::{Family, Layers};
use crate::metadata::Sizes;
use crate::ngrams;
use crate::shared_kv;
use crate::streams;
use crate::tensor_transform::Transform;

/// GGUF names of the modules of a layer. Modules of experts have the same names in each expert.
const MODULES: &[(&str, &str)] = &[
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.qkv_proj", "attn_qkv"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("post_self_attn_layernorm", "post_attention_norm"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
    ("post_mlp_layernorm", "post_ffw_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.gate_up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("mlp.gate", ROUTER),
    ("mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_expert.up_proj", "ffn_up_shexp"),
    ("mlp.shared_expert.down_proj", "ffn_down_shexp"),
    ("mlp.shared_expert_gate", SHARED_ROUTER),
    ("block_sparse_moe.gate", ROUTER),
    ("self_attn.q_a_proj", "attn_q_a"),
    ("self_attn.q_a_layernorm", "attn_q_a_norm"),
    ("self_attn.q_b_proj", "attn_q_b"),
    ("self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa"),
    ("self_attn.kv_a_layernorm", "attn_kv_a_norm"),
    ("self_attn.indexer.wq_b", "indexer.attn_q_b"),
    ("self_attn.indexer.wk", "indexer.attn_k"),
    ("self_attn.indexer.k_norm", "indexer.k_norm"),
    ("self_attn.indexer.weights_proj", "indexer.proj"),
    ("mlp.shared_experts.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_experts.up_proj", "ffn_up_shexp"),
    ("mlp.shared_experts.down_proj", "ffn_down_shexp"),
    ("self_attn.out_proj", "attn_output"),
    ("self_attn.q_layernorm", "attn_q_norm"),
    ("self_attn.query_layernorm", "attn_q_norm"),
    ("self_attn.key_layernorm", "attn_k_norm"),
    ("self_attn.k_layernorm", "attn_k_norm"),
    ("feed_forward.w1", "ffn_gate"),
    ("feed_forward.w3", "ffn_up"),
    ("feed_forward.w2", "ffn_down"),
    ("feed_forward.gate", ROUTER),
];

/// Modules of an expert, by the prefix of experts.
const EXPERTS: &[(&str, &str, &str)] = &[
    ("mlp.experts.", "gate_proj", "ffn_gate_exps"),
    ("mlp.experts.", "up_proj", "ffn_up_exps"),
    ("mlp.experts.", "down_proj", "ffn_down_exps"),
    ("ffn.experts.", "w1", "ffn_gate_exps"),
    ("ffn.experts.", "w3", "ffn_up_exps"),
    ("ffn.experts.", "w2", "ffn_down_exps"),
    ("block_sparse_moe.experts.", "w1", "ffn_gate_exps"),
    ("block_sparse_moe.experts.", "w3", "ffn_up_exps"),
    ("block_sparse_moe.experts.", "w2", "ffn_down_exps"),
    ("mixer.experts.", "up_proj", "ffn_up_exps"),
    ("mixer.experts.", "down_proj", "ffn_down_exps"),
    ("feed_forward.experts.", "w1", "ffn_gate_exps"),
    ("feed_forward.experts.", "w3", "ffn_up_exps"),
    ("feed_forward.experts.", "w2", "ffn_down_exps"),
];

/// The router, stored in f32 as in llama.cpp.
pub(crate) const ROUTER: &str = "ffn_gate_inp";
pub(crate) const SHARED_ROUTER: &str = "ffn_gate_inp_shexp";
pub(crate) const EMBEDDING: &str = "token_embd.weight";
pub(crate) const OUTPUT: &str = "output.weight";

/// The layer, counted from 1, and the name within it; global tensors have layer 0.
pub(crate) type TensorKey = (usize, String);

/// The GGUF counterpart of a folder tensor.
pub(crate) struct Target {
    pub place: TensorKey,
    /// The index of the expert or of the part of a table, or 1 for scales of blocks and second
    /// factors.
    pub part: usize,
    pub cut: Transform,
}

/// Returns the name in GGUF.
pub(crate) fn full_name((layer, name): &TensorKey) -> String {
    match layer.checked_sub(1) {
        Some(layer) => format!("blk.{layer}.{name}"),
        None => name.clone(),
    }
}

/// Whether a tensor belongs to the multi-token prediction (MTP) layers, which are not converted.
pub(crate) fn draft_tokens(name: &str, sizes: &Sizes) -> bool {
    // ERNIE and K-EXAONE store them separately.
    if ["model.mtp_", "model.mtp.", "mtp."].iter().any(|start| name.starts_with(start)) {
        return true;
    }
    let layer = name.strip_prefix("model.layers.").and_then(|rest| number(rest.split_once('.')?.0));
    layer.is_some_and(|layer| (sizes.n_layers..sizes.n_layers + sizes.n_mtp_layers).contains(&layer))
}

/// Whether a tensor belongs to the vision or audio encoder of a multimodal model.
pub(crate) fn is_encoder_tensor(name: &str) -> bool {
    let name = name.strip_prefix("model.").unwrap_or(name);
    let prefixes = [
        "vision_tower.",
        "vision_model.",
        "vit_large_projector.",
        "patch_merge_mlp.",
        "multi_modal_projector.",
        "visual.",
        "audio_tower.",
        "embed_vision.",
        "embed_audio.",
        "mm_projector.",
        "vision_encoder.",
        "audio_encoder.",
    ];
    prefixes.iter().any(|prefix| name.starts_with(prefix))
}

/// Returns the GGUF counterparts of a tensor; empty if unknown.
pub(crate) fn targets(name: &str, family: &Family) -> Vec<Target> {
    let name = match family.layers {
        Layers::Halved | Layers::StateSpaces => &*name.replacen("backbone.", "model.", 1),
        Layers::Connected => &*connections::usual_name(name),
        Layers::SharedKv => &*shared_kv::usual_name(name),
        _ if family.is_multimodal => &*name.replacen("language_model.", "", 1),
        // Models saved without an output head omit the prefix `model.`.
        _ if ["embed_tokens.", "layers.", "norm."].iter().any(|start| name.starts_with(start)) => {
            &*format!("model.{name}")
        }
        _ => name,
    };
    let of_layer = name.strip_prefix("model.layers.").and_then(|rest| {
        let (layer, name) = rest.split_once('.')?;
        Some((number(layer)? + 1, name))
    });
    let (layer, name) = of_layer.unwrap_or((0, name));
    if let Some(part) = ngrams::part_of_table(name).filter(|_| family.layers == Layers::DeltaStreams) {
        return vec![Target { place: (0, ngrams::TABLE.to_owned()), part, cut: Transform::Whole }];
    }
    let own = family.tensors.iter().filter(|(theirs, ..)| *theirs == name).map(|(_, ours, cut)| Target {
        place: (layer, (*ours).to_owned()),
        part: cut.part(),
        cut: *cut,
    });
    let own: Vec<Target> = own.filter(|_| layer > 0 || name.starts_with("model.")).collect();
    match layer {
        _ if !own.is_empty() => own,
        0 => whole(name, family).into_iter().collect(),
        _ => module(layer, name, family).into_iter().collect(),
    }
}

/// Maps a global tensor.
fn whole(name: &str, family: &Family) -> Option<Target> {
    if let Some((ours, part)) = streams::stacked(name) {
        return Some(Target { place: (0, ours.to_owned()), part, cut: Transform::Whole });
    }
    if let Some(ours) = connections::behind_layers(name) {
        return Some(Target { place: (0, ours.to_owned()), part: 0, cut: Transform::Whole });
    }
    let ours = match name {
        "lm_head.weight" => OUTPUT,
        "lm_head.bias" => "output.bias",
        "model.norm.bias" | "model.final_layernorm.bias" => "output_norm.bias",
        "model.final_layernorm.weight" => "output_norm.weight",
        "model.embed_tokens.weight" | "model.embeddings.weight" | "model.word_embeddings.weight" => EMBEDDING,
        "model.norm.weight" | "model.embedding_norm.weight" | "model.norm_f.weight" => output_norm(family),
        "model.embed_tokens_per_layer.weight" => ngrams::TABLE,
        "model.per_layer_model_projection.weight" => "per_layer_model_proj.weight",
        "model.per_layer_projection_norm.weight" => "per_layer_proj_norm.weight",
        _ => return None,
    };
    Some(Target { place: (0, ours.to_owned()), part: 0, cut: Transform::Whole })
}

/// Returns the name of the final norm.
pub(crate) fn output_norm(family: &Family) -> &'static str {
    match family.layers {
        Layers::Convolving => "token_embd_norm.weight",
        Layers::DeltaStreams => "output_hc_norm.weight",
        _ => "output_norm.weight",
    }
}

/// Maps a weight or bias of a layer that most families have.
fn module(layer: usize, name: &str, family: &Family) -> Option<Target> {
    let (module, kind) = name.rsplit_once('.').filter(|(_, kind)| ["weight", "bias"].contains(kind))?;
    let target =
        |ours: &str, part| Target { place: (layer, format!("{ours}.{kind}")), part, cut: Transform::Whole };
    if module == "post_attention_layernorm" {
        return Some(target(
            if family.has_post_attention_norm { "post_attention_norm" } else { "ffn_norm" },
            0,
        ));
    }
    if let Some((_, ours)) = MODULES.iter().find(|(theirs, _)| *theirs == module) {
        return Some(target(ours, 0));
    }
    EXPERTS.iter().find_map(|(folder, theirs, ours)| {
        let (expert, module) = module.strip_prefix(folder)?.split_once('.')?;
        (module == *theirs).then_some(target(ours, number(expert)?))
    })
}

/// Parses a number in canonical spelling, small enough to increment.
fn number(text: &str) -> Option<usize> {
    let number: u32 = text.parse().ok()?;
    (number.to_string() == text).then_some(number as usize)
}
