//! Steps of a whole model.

use kvant::{KvOptions, Model, OpenOptions, SessionOptions};
use kvant_codec::DType;
use kvant_quantize::synthetic::Shape;

use super::Link;
use crate::case;
use crate::exam::MAX_MODEL_TOKENS;
use crate::subject::Settings;
use crate::wire::{to_bytes, to_values};

/// Feeds tokens after those of the state: inputs are token ids, `[steps, rows]`, answers the logits
/// after each step, `[steps, n_vocab]`. Every request begins after the state.
pub(super) fn serve(
    case: &case::Model,
    state: &[u8],
    settings: &Settings,
    link: &mut Link<'_>,
) -> Result<(), String> {
    let failed = |error: kvant::Error| error.to_string();
    let model = open(&case.name, settings)?;
    let kv = KvOptions::symmetric(case.kv);
    let n_ctx = Some(case.depth + MAX_MODEL_TOKENS);
    let mut session = model.session(SessionOptions { n_ctx, kv }).map_err(failed)?;
    let before = tokens(&to_values(state).ok_or("state: expected token ids")?);
    if !before.is_empty() {
        session.feed(&before, &mut |_| true).map_err(failed)?;
    }
    link.serve(|inputs| {
        session.rewind(before.len()).map_err(failed)?;
        let mut answers = Vec::new();
        for step in tokens(inputs).chunks(case.rows) {
            session.feed(step, &mut |_| true).map_err(failed)?;
            answers.extend_from_slice(session.logits().map_err(failed)?);
        }
        Ok(to_bytes(&answers))
    })
}

/// Returns token ids, which f32 holds exactly.
fn tokens(values: &[f32]) -> Vec<u32> {
    values.iter().map(|&token| token as u32).collect()
}

fn open(name: &str, settings: &Settings) -> Result<Model, String> {
    let device = settings.device.parse().map_err(|error: kvant::Error| error.to_string())?;
    let options = OpenOptions { device, n_threads: Some(settings.threads), ..Default::default() };
    let opened = match name.split_once(':') {
        None => Model::bundled(options),
        Some((shape, dtype)) => {
            let dtype: DType = dtype.parse().map_err(|error| format!("{error}"))?;
            let shape = Shape::named(shape).map_err(|error| error.to_string())?;
            let gguf = shape.model(dtype, N_CTX).map_err(|error| error.to_string())?;
            Model::from_gguf(gguf, options)
        }
    };
    opened.map_err(|error| error.to_string())
}

/// Context of models with random weights.
const N_CTX: usize = 1 << 17;
