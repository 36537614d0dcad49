//! Runs a model over a text for statistics of the inputs of its matrices.

use kvant::{KvOptions, Model};

use crate::chunk_eval;
use crate::chunks::Chunks;
use crate::error::EvalError;
use crate::progress::{OnProgress, Progress};

/// Feeds each of `chunks` to `model`, as a text of its own; the statistics that the model was
/// [opened with](kvant::OpenOptions::input_statistics) then cover them.
///
/// # Errors
///
/// An engine error.
pub fn feed_chunks(model: &Model, chunks: &Chunks, progress: OnProgress<'_>) -> Result<(), EvalError> {
    let mut session = chunk_eval::session(model, &KvOptions::default(), chunks.n_ctx())?;
    let mut report = |done| {
        progress(&Progress { done, total: chunks.len(), resumed: 0, note: String::new() });
    };
    report(0);
    for chunk in 0..chunks.len() {
        session.clear();
        session.feed(&chunks.input(chunk), &mut |_| true)?;
        report(chunk + 1);
    }
    Ok(())
}
