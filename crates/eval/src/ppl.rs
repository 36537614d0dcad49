//! Perplexity, by llama.cpp's method: exp of the mean negative log-probability over the second half
//! of each chunk.

use std::path::Path;

use kvant::{KvOptions, Model, files};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::base_file::BaseWriter;
use crate::chunk_eval;
use crate::chunks::Chunks;
use crate::config::KvConfig;
use crate::error::EvalError;
use crate::progress::{OnProgress, Progress};
use crate::run_state::RunState;
use crate::score::LogProbs;
use crate::stats::Estimate;

/// Options of the measurement.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct PplOptions {
    /// The KV cache options.
    pub kv: KvOptions,
    /// Tokens per batch; as many as memory allows when `None`.
    pub step: Option<usize>,
}

/// A measured perplexity.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Ppl {
    /// Perplexity over all chunks.
    pub ppl: f64,
    /// Its standard error.
    pub stderr: f64,
    /// Tokens per chunk.
    pub n_ctx: usize,
    /// Chunks measured.
    pub chunks: usize,
    /// Tokens scored.
    pub tokens: usize,
    /// The cache configuration.
    #[serde(flatten)]
    pub kv: KvConfig,
    /// Perplexity after each chunk.
    pub running: Vec<f64>,
}

impl Ppl {
    fn new(n_ctx: usize, kv: KvConfig, nll: &[Vec<f64>]) -> Self {
        let Estimate { value: ppl, stderr } = Estimate::mean(nll.iter().flatten().copied()).exp();
        let running = (1..=nll.len()).map(|n| running_ppl(&nll[..n])).collect();
        let tokens = nll.iter().map(Vec::len).sum();
        Self { ppl, stderr, n_ctx, chunks: nll.len(), tokens, kv, running }
    }

    /// Returns llama.cpp's last line.
    pub fn final_line(&self) -> String {
        format!("Final estimate: PPL = {:.4} +/- {:.5}", self.ppl, self.stderr)
    }
}

fn running_ppl(nll: &[Vec<f64>]) -> f64 {
    Estimate::mean(nll.iter().flatten().copied()).value.exp()
}

/// Measures the perplexity of `chunks`. With a `state` file, an interrupted run resumes.
///
/// # Errors
///
/// Logits that are not finite, a state file of another run, an engine error.
pub fn ppl(
    model: &Model,
    chunks: &Chunks,
    options: &PplOptions,
    state: Option<&Path>,
    progress: OnProgress<'_>,
) -> Result<Ppl, EvalError> {
    let kv = KvConfig::new(model, &options.kv, chunks.n_ctx())?;
    let what = || {
        json!({
            "measure": "ppl", "version": 1, "model": model.compute_fingerprint(), "text": chunks.fingerprint(),
            "chunks": chunks.len(), "kv": kv.identity(), "step": options.step,
        })
    };
    let (mut state, mut nll) = RunState::open(state, what)?;
    nll.truncate(chunks.len());
    let resumed = nll.len();
    let mut session = chunk_eval::session(model, &options.kv, chunks.n_ctx())?;
    progress(&step_done(&nll, chunks, resumed));
    for chunk in resumed..chunks.len() {
        let scores = score_chunk(model, chunks, options, &mut session, chunk, &mut |_| Ok(()))?;
        state.push(&scores)?;
        nll.push(scores);
        progress(&step_done(&nll, chunks, resumed));
    }
    Ok(Ppl::new(chunks.n_ctx(), kv, &nll))
}

/// Measures the perplexity and atomically writes llama.cpp's base-logits file.
///
/// # Errors
///
/// As [`ppl`], and when the file cannot be written.
pub fn ppl_saving_base(
    model: &Model,
    chunks: &Chunks,
    options: &PplOptions,
    path: &Path,
    progress: OnProgress<'_>,
) -> Result<Ppl, EvalError> {
    let kv = KvConfig::new(model, &options.kv, chunks.n_ctx())?;
    let mut session = chunk_eval::session(model, &options.kv, chunks.n_ctx())?;
    let mut nll = Vec::new();
    files::write_atomic(
        path,
        |error| EvalError::io(path)(error),
        |file| {
            let head = BaseWriter::new(file, chunks.n_ctx(), model.n_vocab(), chunks.tokens());
            let mut base = head.map_err(EvalError::io(path))?;
            progress(&step_done(&nll, chunks, 0));
            for chunk in 0..chunks.len() {
                let mut write = |logits: &[f32]| base.row(logits).map_err(EvalError::io(path));
                nll.push(score_chunk(model, chunks, options, &mut session, chunk, &mut write)?);
                progress(&step_done(&nll, chunks, 0));
            }
            base.finish(&model.compute_fingerprint(), kv.name() == "f16").map_err(EvalError::io(path))
        },
    )?;
    Ok(Ppl::new(chunks.n_ctx(), kv, &nll))
}

fn step_done(nll: &[Vec<f64>], chunks: &Chunks, resumed: usize) -> Progress {
    let note = if nll.is_empty() { String::new() } else { format!("[{}]{:.4}", nll.len(), running_ppl(nll)) };
    Progress { done: nll.len(), total: chunks.len(), resumed, note }
}

/// Returns the negative log-probability of every scored token of a chunk; passes its rows of logits
/// to `write`.
fn score_chunk(
    model: &Model,
    chunks: &Chunks,
    options: &PplOptions,
    session: &mut kvant::Session,
    chunk: usize,
    write: &mut dyn FnMut(&[f32]) -> Result<(), EvalError>,
) -> Result<Vec<f64>, EvalError> {
    let (input, scored) = (chunks.input(chunk), chunks.scored());
    let mut nll = Vec::with_capacity(scored.len());
    let mut failed = Ok(());
    session.clear();
    for step in chunk_eval::steps(chunks.n_ctx(), model.n_vocab(), options.step)? {
        chunk_eval::feed(session, chunk, &input, &step, &scored, &mut |position, row| {
            nll.push(-row.log_prob(input[position + 1] as usize));
            if failed.is_ok() {
                failed = write(row.logits());
            }
        })?;
        std::mem::replace(&mut failed, Ok(()))?;
    }
    Ok(nll)
}
