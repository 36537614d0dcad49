//! Residual streams that every sublayer reads and writes (hyper-connections), as Hunyuan 4 has
//! them.

use crate::error::HfError;
use crate::folder::Object;
use crate::metadata::Keys;

/// Parts of the names of checkpoints, and those of `transformers`, which saves other parts of its
/// tensors under the former.
const RENAMED: [(&str, &str); 6] = [
    ("hc_pre.", ""),
    ("hc_attn_layer.hc_", "attn_hc."),
    ("hc_mlp_layer.hc_", "ffn_hc."),
    ("hc_head_", "hc_"),
    ("linear_gate", "gate_proj"),
    ("learnable_sink_param", "sinks"),
];

/// Returns the name of a tensor in `transformers`.
pub(crate) fn usual_name(name: &str) -> String {
    RENAMED.iter().fold(name.to_owned(), |name, (theirs, usual)| name.replace(theirs, usual))
}

/// Returns the GGUF name of a tensor behind the last layer.
pub(crate) fn behind_layers(name: &str) -> Option<&'static str> {
    match name.strip_prefix("model.")? {
        "hc_head.hc_fn" => Some("output_hc_fn.weight"),
        "hc_head.hc_scale" => Some("output_hc_scale.weight"),
        "hc_head.hc_base" => Some("output_hc_base.weight"),
        "hyper_connection_mixer.hc_norm.weight" => Some("output_hc_norm.weight"),
        "hyper_connection_mixer.input_mix_weight_down.weight" => Some("output_hc_down.weight"),
        "hyper_connection_mixer.input_mix_weight_up.weight" => Some("output_hc_up.weight"),
        _ => None,
    }
}

/// Whether a module projects the streams, in f32.
pub(crate) fn is_projection(module: &str) -> bool {
    ["hc_attn_fn", "hc_ffn_fn", "output_hc_fn"].contains(&module)
}

/// Writes the streams, and the limit of the experts' gates.
pub(crate) fn write(keys: &mut Keys<'_>, config: Object<'_>) -> Result<(), HfError> {
    keys.set("hyper_connection.count", config.size("hc_mult")?)?;
    for (theirs, ours, usual) in [("hc_eps", "epsilon", 1e-6), ("hc_magnitude", "magnitude", 2.0)] {
        let number = config.find_float(theirs)?.unwrap_or(usual);
        keys.set(&format!("hyper_connection.{ours}"), number as f32)?;
    }
    match config.find_float("swiglu_limit")? {
        Some(limit) if limit > 0.0 => keys.set("swiglu_clamp_exp", limit as f32),
        _ => Ok(()),
    }
}
