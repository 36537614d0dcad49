//! KL divergence of cache configurations from the f16 cache (or from a base-logits file), token by
//! token.
//!
//! Perplexity can fall while a cache gets worse; the divergence from the same model with an
//! uncompressed cache cannot. All configurations are measured against one pass of the base, step by
//! step, so that only the logits of a single step are in memory.

use std::ops::Range;
use std::path::Path;

use kvant::{DType, KvOptions, Model, Plan, Policies, Policy, Session};
use kvant_codec::Side;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::base_file::BaseReader;
use crate::chunk_eval;
use crate::chunks::Chunks;
use crate::config::KvConfig;
use crate::error::EvalError;
use crate::progress::{OnProgress, Progress};
use crate::run_state::RunState;
use crate::score::{Row, TokenScore};
use crate::stats::{Estimate, KldStats};

/// The reference distribution.
#[derive(Debug)]
pub enum Base {
    /// The same model with an f16 cache, run alongside.
    F16,
    /// Another model of the same vocabulary with an f16 cache, run alongside; see [`Base::model`].
    Model(Model),
    /// A base-logits file; the chunks must be those of [`Base::chunks`].
    File(Box<BaseReader>),
}

impl Base {
    /// Opens a base-logits file of `model`, or of one with the same vocabulary, such as the
    /// unquantized model.
    ///
    /// # Errors
    ///
    /// [`EvalError::File`] for an invalid file, or another vocabulary.
    pub fn open(path: &Path, model: &Model) -> Result<Self, EvalError> {
        let reader = BaseReader::open(path)?;
        let (expected, got) = (model.n_vocab(), reader.n_vocab());
        if got != expected {
            let what =
                format!("the base of another model: {got} tokens in its vocabulary, expected {expected}");
            return Err(EvalError::file(path, what));
        }
        Ok(Self::File(Box::new(reader)))
    }

    /// Uses another model as the base of `model`: the same with other weight types, or the one that
    /// it was derived from.
    ///
    /// # Errors
    ///
    /// [`EvalError::Setting`] when a token of its vocabulary differs.
    pub fn model(other: Model, model: &Model) -> Result<Self, EvalError> {
        let (ours, theirs) = (model.tokenizer()?, other.tokenizer()?);
        let setting = |expected, got| Err(EvalError::Setting { name: "against", expected, got });
        if ours.n_vocab() != theirs.n_vocab() || model.n_vocab() != other.n_vocab() {
            let expected = format!("a model with {} tokens in its vocabulary", model.n_vocab());
            return setting(expected, other.n_vocab().to_string());
        }
        match (0..ours.n_vocab() as u32).find(|&id| ours.token_bytes(id) != theirs.token_bytes(id)) {
            None => Ok(Self::Model(other)),
            Some(id) => setting("a model of the same vocabulary".to_owned(), format!("another token {id}")),
        }
    }

    /// Identifies the base, for a state file.
    fn identity(&self) -> Result<String, EvalError> {
        match self {
            Self::F16 => Ok("f16".to_owned()),
            Self::Model(other) => Ok(other.compute_fingerprint()),
            Self::File(file) => file.identity(),
        }
    }

    /// Returns the chunks of a base file, at most `max`; `None` for a model.
    ///
    /// # Errors
    ///
    /// When the model does not support chunks of that length.
    pub fn chunks(&self, model: &Model, max: Option<usize>) -> Result<Option<Chunks>, EvalError> {
        match self {
            Self::F16 | Self::Model(_) => Ok(None),
            Self::File(file) => {
                Chunks::from_tokens(model, file.tokens().to_vec(), file.n_ctx(), max).map(Some)
            }
        }
    }
}

/// Options of the measurement.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct KldOptions {
    /// The configurations.
    pub configs: Vec<KvOptions>,
    /// Tokens per batch; as many as memory allows when `None`. See the crate's notes on the f16
    /// tail.
    pub step: Option<usize>,
}

/// One measured configuration.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Kld {
    /// The cache configuration.
    pub kv: KvConfig,
    /// Tokens per chunk.
    pub n_ctx: usize,
    /// The scored tokens of each chunk, positions n_ctx/2 .. n_ctx - 1.
    pub chunks: Vec<Vec<TokenScore>>,
}

impl Kld {
    /// Returns the statistics over all chunks.
    pub fn stats(&self) -> KldStats {
        KldStats::new(&self.chunks.concat())
    }

    /// Returns the mean divergence by position in the chunk, in `bins` bins of equal width: the
    /// bin's first position and the mean.
    pub fn by_position(&self, bins: usize) -> Vec<(usize, f64)> {
        let n = self.chunks.first().map_or(0, Vec::len);
        let start = self.n_ctx / 2;
        let edges = (0..=bins.min(n)).map(|i| i * n / bins.min(n).max(1)).collect::<Vec<_>>();
        let mean = |range: Range<usize>| {
            Estimate::mean(self.chunks.iter().flat_map(|chunk| &chunk[range.clone()]).map(|s| s.kld)).value
        };
        edges.windows(2).map(|edge| (start + edge[0], mean(edge[0]..edge[1]))).collect()
    }
}

/// Measures every configuration. With a `state` file, an interrupted run resumes.
///
/// # Errors
///
/// Logits that are not finite, chunks that differ from those of the base file, a state file of
/// another run, an engine error.
pub fn kld(
    model: &Model,
    chunks: &Chunks,
    mut base: Base,
    options: &KldOptions,
    state: Option<&Path>,
    progress: OnProgress<'_>,
) -> Result<Vec<Kld>, EvalError> {
    let n_ctx = chunks.n_ctx();
    if let Base::File(file) = &base
        && (file.n_ctx() != n_ctx || !file.tokens().starts_with(chunks.tokens()))
    {
        return Err(EvalError::file(file.path(), "the base of another text or of another chunk length"));
    }
    let configs = options.configs.iter().map(|kv| KvConfig::new(model, kv, n_ctx));
    let configs = configs.collect::<Result<Vec<_>, _>>()?;
    let base_identity = state.map(|_| base.identity()).transpose()?;
    let what = || {
        json!({
            "measure": "kld", "version": 1, "model": model.compute_fingerprint(), "text": chunks.fingerprint(),
            "base": base_identity,
            "kv": configs.iter().map(KvConfig::identity).collect::<Vec<_>>(), "step": options.step,
        })
    };
    let (mut state, mut done) = RunState::<Vec<Vec<TokenScore>>>::open(state, what)?;
    done.truncate(chunks.len());
    let resumed = done.len();

    progress(&step_done(&done, &configs, chunks.len(), resumed));
    let reference = if let Base::Model(other) = &base { other } else { model };
    let mut run = LockstepRun::new([reference, model], chunks, options)?;
    for chunk in 0..chunks.len() {
        if let Base::File(file) = &mut base {
            file.next_chunk(chunk >= resumed)?;
        }
        if chunk < resumed {
            continue;
        }
        let scores = run.chunk(&base, chunk)?;
        state.push(&scores)?;
        done.push(scores);
        progress(&step_done(&done, &configs, chunks.len(), resumed));
    }
    let of_config = |i: usize| done.iter().map(|chunk| chunk[i].clone()).collect();
    let results = configs.into_iter().enumerate();
    Ok(results.map(|(i, kv)| Kld { kv, n_ctx, chunks: of_config(i) }).collect())
}

fn step_done(done: &[Vec<Vec<TokenScore>>], configs: &[KvConfig], total: usize, resumed: usize) -> Progress {
    let mean = |i: usize| Estimate::mean(done.iter().flat_map(|chunk| &chunk[i]).map(|s| s.kld)).value;
    let means = configs.iter().enumerate().map(|(i, kv)| format!("{} {:.6}", kv.name(), mean(i)));
    let note = if configs.len() > 8 || done.is_empty() {
        String::new()
    } else {
        means.collect::<Vec<_>>().join("  ")
    };
    Progress { done: done.len(), total, resumed, note }
}

/// The sessions of a run, advanced in lockstep.
struct LockstepRun<'a> {
    chunks: &'a Chunks,
    steps: Vec<Range<usize>>,
    f16: Session,
    sessions: Vec<Session>,
    /// Logits of the base's scored rows of a step, `[rows, n_vocab]`, and their log sums.
    logits: Vec<f32>,
    log_sums: Vec<f64>,
}

impl<'a> LockstepRun<'a> {
    /// The f16 session belongs to the first model.
    fn new(
        [reference, model]: [&Model; 2],
        chunks: &'a Chunks,
        options: &KldOptions,
    ) -> Result<Self, EvalError> {
        let n_ctx = chunks.n_ctx();
        let f16 = KvOptions { policies: Policies::none(), ..KvOptions::symmetric(DType::F16) };
        let sessions = options.configs.iter().map(|kv| chunk_eval::session(model, kv, n_ctx));
        Ok(Self {
            chunks,
            steps: chunk_eval::steps(n_ctx, model.n_vocab(), options.step)?,
            f16: chunk_eval::session(reference, &f16, n_ctx)?,
            sessions: sessions.collect::<Result<_, _>>()?,
            logits: Vec::new(),
            log_sums: Vec::new(),
        })
    }

    /// Returns the scores of a chunk, `[configs][scored positions]`.
    fn chunk(&mut self, base: &Base, chunk: usize) -> Result<Vec<Vec<TokenScore>>, EvalError> {
        let (input, scored) = (self.chunks.input(chunk), self.chunks.scored());
        self.f16.clear();
        self.sessions.iter_mut().for_each(Session::clear);
        let mut scores = vec![Vec::with_capacity(scored.len()); self.sessions.len()];
        for step in self.steps.clone() {
            let first = step.start.max(scored.start);
            if !matches!(base, Base::File(_)) {
                self.base_step(chunk, &input, &step)?;
            }
            for (session, scores) in self.sessions.iter_mut().zip(&mut scores) {
                let (logits, log_sums) = (&self.logits, &self.log_sums);
                let mut failed = Ok(());
                chunk_eval::feed(session, chunk, &input, &step, &scored, &mut |position, row| {
                    let token = input[position + 1] as usize;
                    let score = match base {
                        Base::F16 | Base::Model(_) => {
                            let (i, n) = (position - first, row.logits().len());
                            let base = Row::with_log_sum_exp(&logits[i * n..][..n], log_sums[i]);
                            Ok(TokenScore::new(&base, &row, token))
                        }
                        Base::File(file) => {
                            let base = file.row(position - scored.start);
                            base.map(|base| TokenScore::new(&base, &row, token))
                        }
                    };
                    match score {
                        Ok(score) => scores.push(score),
                        Err(error) => failed = Err(error),
                    }
                })?;
                failed?;
            }
        }
        Ok(scores)
    }

    /// Runs a step of the base and stores its scored rows.
    fn base_step(&mut self, chunk: usize, input: &[u32], step: &Range<usize>) -> Result<(), EvalError> {
        let (logits, log_sums) = (&mut self.logits, &mut self.log_sums);
        logits.clear();
        log_sums.clear();
        chunk_eval::feed(&mut self.f16, chunk, input, step, &self.chunks.scored(), &mut |_, row| {
            logits.extend_from_slice(row.logits());
            log_sums.push(row.log_sum_exp());
        })
    }
}

/// Divergence that one layer's keys or values add.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LayerKld {
    /// KV layer, from 0.
    pub layer: usize,
    /// Mean divergence with only this layer's keys in the measured type, in nats.
    pub k: f64,
    /// Mean divergence with only this layer's values in it, in nats.
    pub v: f64,
}

/// Measures each layer's keys and values alone as in `kv` (its types, policies or a plan), with all
/// others in f16.
///
/// # Errors
///
/// As [`kld`].
pub fn kld_by_layer(
    model: &Model,
    chunks: &Chunks,
    kv: &KvOptions,
    step: Option<usize>,
    progress: OnProgress<'_>,
) -> Result<Vec<LayerKld>, EvalError> {
    let shape = model.config().kv_shape();
    let stored = kv.plan(&shape).map_err(kvant::Error::from)?;
    let sides = (0..shape.layers.len()).flat_map(|layer| [(layer, Side::K), (layer, Side::V)]);
    let configs = sides.map(|(layer, side)| alone(kv, &stored, layer, side));
    let configs = configs.collect::<Result<Vec<_>, EvalError>>()?;
    let results = kld(model, chunks, Base::F16, &KldOptions { configs, step }, None, progress)?;
    let mean = |result: &Kld| result.stats().mean_kld.value;
    let pairs = results.as_chunks::<2>().0.iter().enumerate();
    Ok(pairs.map(|(layer, [k, v])| LayerKld { layer, k: mean(k), v: mean(v) }).collect())
}

/// Returns options with one layer's keys or values as in `stored`, `kv` resolved, and all others in
/// f16.
fn alone(kv: &KvOptions, stored: &Plan, layer: usize, side: Side) -> Result<KvOptions, EvalError> {
    let types = stored.types[layer].iter().enumerate();
    let table = types.map(|(head, types)| format!("{layer} {head} {side:?} {}\n", types.of(side).name()));
    let rules =
        [Policy::Sink(stored.sink_tokens), Policy::Recent(stored.recent_tokens), Policy::Alpha(stored.alpha)];
    let policies =
        Policies(rules.to_vec()).with_table(&table.collect::<String>()).map_err(kvant::Error::from)?;
    Ok(KvOptions { policies, tail: kv.tail, balance: kv.balance.clone(), ..KvOptions::symmetric(DType::F16) })
}
