//! Feeds chunks to a session in batches, and passes on the logits at scored positions.

use std::ops::Range;

use kvant::{KvOptions, Model, Session, SessionOptions};

use crate::error::EvalError;
use crate::score::Row;

/// Maximum tokens of a batch.
const MAX_STEP: usize = 512;
/// Maximum logits in memory per batch: 256 MiB of f32.
const MAX_LOGITS: usize = 1 << 26;

/// Returns the batches of a chunk: `requested` tokens each, or as many as the memory for logits
/// allows.
pub(crate) fn steps(
    n_ctx: usize,
    n_vocab: usize,
    requested: Option<usize>,
) -> Result<Vec<Range<usize>>, EvalError> {
    let size = match requested {
        Some(size) if (1..=MAX_STEP).contains(&size) => size,
        Some(size) => {
            let expected = format!("1 to {MAX_STEP} tokens");
            return Err(EvalError::Setting { name: "step", expected, got: size.to_string() });
        }
        None => (MAX_LOGITS / n_vocab / 16 * 16).clamp(16, MAX_STEP),
    };
    Ok((0..n_ctx).step_by(size).map(|start| start..(start + size).min(n_ctx)).collect())
}

pub(crate) fn session(model: &Model, kv: &KvOptions, n_ctx: usize) -> Result<Session, EvalError> {
    Ok(model.session(SessionOptions { n_ctx: Some(n_ctx), kv: kv.clone() })?)
}

/// Feeds `input[step]` and passes the rows at scored positions to `visit`.
pub(crate) fn feed(
    session: &mut Session,
    chunk: usize,
    input: &[u32],
    step: &Range<usize>,
    scored: &Range<usize>,
    visit: &mut dyn FnMut(usize, Row<'_>),
) -> Result<(), EvalError> {
    let from = scored.start.saturating_sub(step.start).min(step.len());
    let mut fault = None;
    session.feed_scored(&input[step.clone()], from, &mut |index, logits| {
        let position = step.start + index;
        if !scored.contains(&position) || fault.is_some() {
            return;
        }
        match Row::new(logits) {
            Ok(row) => visit(position, row),
            Err(value) => fault = Some(EvalError::NotFinite { chunk, position, value }),
        }
    })?;
    fault.map_or(Ok(()), Err)
}
