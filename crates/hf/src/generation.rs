//! Sampling defaults: from `generation_config.json` to GGUF keys.

use kvant_gguf::GgufWriter;

use crate::error::HfError;
use crate::folder::Object;

const FLOATS: [(&str, &str); 4] = [
    ("temperature", "general.sampling.temp"),
    ("top_p", "general.sampling.top_p"),
    ("min_p", "general.sampling.min_p"),
    ("repetition_penalty", "general.sampling.penalty_repeat"),
];

/// Writes the recommended sampling settings; none if sampling is disabled.
///
/// # Errors
/// A value that is not a number.
pub(crate) fn write(writer: &mut GgufWriter, generation: Object<'_>) -> Result<(), HfError> {
    if generation.find_bool("do_sample")? == Some(false) {
        return Ok(());
    }
    for (theirs, ours) in FLOATS {
        if let Some(value) = generation.find_float(theirs)? {
            writer.set(ours, value as f32)?;
        }
    }
    if let Some(k) = generation.find_float("top_k")? {
        writer.set("general.sampling.top_k", k as i32)?;
    }
    Ok(())
}
