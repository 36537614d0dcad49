//! The multi-token prediction (MTP) layer, which drafts the token after the next, on the model's
//! device.
//!
//! It follows each sequence with a KV cache of its own. Its input at a position is the token there
//! and the model's final hidden state of the token before. It prefills along with the model; during
//! decode, tokens wait until a prediction is requested. Its predictions affect speed alone, so a
//! sequence that it cannot follow (one that was restored, or ran out of memory) just gets no draft
//! tokens.

use std::sync::Arc;

use kvant_backend::{Backend, Candidate, Page, TOKENS_PER_BLOCK};
use kvant_generate::speculative::MAX_DRAFT_TOKENS;
use kvant_kv::{BlockPool, Cache, KvShape, Layout, Plan};
use kvant_model::{Activations, BatchSequence, Decoder, Entry, LogitsFor, Outputs, Weights};

use super::MAX_ROWS;
use super::cache::PooledDevice;
use super::device_model::roll_back;
use crate::error::Error;

/// Maximum of tokens that wait to be processed in one batch while no prediction is requested.
/// Beyond it, all but the last [`MAX_UNVERIFIED`] are processed: those may be draft tokens.
const MAX_PENDING: usize = 16;
const MAX_UNVERIFIED: usize = MAX_DRAFT_TOKENS + 1;
/// Maximum of tokens without the hidden state before them at the start of a sequence with an
/// attached prefix: those of a block that was complete in the model's cache but not in this one.
const MAX_WITHOUT_STATE: usize = TOKENS_PER_BLOCK;

/// Receives a predicted token and the margin of its logit over the next best; returns whether to
/// predict another one.
pub(crate) type OnDraft<'a> = &'a mut dyn FnMut(u32, f32) -> bool;

/// Returns the most probable token, and the margin of its logit over the next.
pub(crate) fn top_with_margin(likeliest: &[Candidate]) -> (u32, f32) {
    match likeliest {
        [first, second, ..] => (first.id, first.logit - second.logit),
        [first] => (first.id, f32::INFINITY),
        [] => unreachable!("a vocabulary has tokens"),
    }
}

/// The MTP layer with its buffers.
pub(super) struct MtpLayer<B: Backend> {
    decoder: Decoder<B>,
    act: Activations<B>,
    /// Logits of one row.
    logits: B::Buffer,
    candidates: Vec<Candidate>,
}

/// The state of the layer for one sequence.
pub(super) struct MtpSequence<P: Page> {
    pub cache: Cache<P>,
    /// Tokens behind the cached ones, not processed yet.
    pending: Vec<u32>,
    /// The hidden state before each of them, and the one before the next token,
    /// `[pending + 1, n_embd]`.
    streams: Vec<f32>,
}

/// Returns the plan of the layer's cache.
fn own_plan(shape: &KvShape, plan: &Plan) -> Plan {
    let n_kv_heads = shape.layers[0].n_kv_heads;
    let last = plan.types.last().expect("a model whose layers attend");
    let types = match last.len() == n_kv_heads {
        true => last.clone(),
        false => vec![last[0]; n_kv_heads],
    };
    Plan { types: vec![types], channel_scales: None, notes: Vec::new(), ..plan.clone() }
}

impl<P: Page> Clone for MtpSequence<P> {
    fn clone(&self) -> Self {
        Self { cache: self.cache.clone(), pending: self.pending.clone(), streams: self.streams.clone() }
    }
}

impl<P: Page> MtpSequence<P> {
    /// Returns the number of tokens of the sequence.
    pub fn len(&self) -> usize {
        self.cache.len() + self.pending.len()
    }

    /// Returns the number of tokens that are not processed yet.
    pub fn n_pending(&self) -> usize {
        self.pending.len()
    }

    fn n_embd(&self) -> usize {
        self.streams.len() / (self.pending.len() + 1)
    }

    /// Queues `tokens` whose hidden states are unknown.
    fn queue_without_states(&mut self, tokens: &[u32]) {
        self.streams = vec![0.0; (tokens.len() + 1) * self.n_embd()];
        self.pending = tokens.to_vec();
    }

    /// Truncates to the first `n` tokens. Tokens fed again behind them must be the same, unless
    /// this is called again.
    pub fn truncate(&mut self, n: usize) {
        match n.checked_sub(self.cache.len()) {
            Some(pending) => {
                let n_embd = self.n_embd();
                self.pending.truncate(pending);
                self.streams.truncate((self.pending.len() + 1) * n_embd);
            }
            None => {
                self.cache.truncate(n);
                self.queue_without_states(&[]);
            }
        }
    }

    /// Attaches the longest prefix of `tokens` that other sequences hold; the model's cache has all
    /// of `tokens`. Returns whether the layer can follow the sequence.
    pub fn attach_prefix(&mut self, pool: &BlockPool<P>, tokens: &[u32]) -> bool {
        // Attaching always leaves the last token out.
        let held = [tokens, &[0]].concat();
        let n = self.cache.attach_prefix(pool, &held);
        self.queue_without_states(&tokens[n..]);
        tokens.len() - n <= MAX_WITHOUT_STATE
    }

    /// Records tokens from position `start` on and their final hidden states; known ones are
    /// skipped. Returns whether they connect to the known tokens.
    fn record(&mut self, start: usize, tokens: &[u32], streams: &[f32]) -> bool {
        let n_embd = self.n_embd();
        let Some(known) = self.len().checked_sub(start) else { return false };
        let new = tokens.get(known..).unwrap_or_default();
        self.pending.extend_from_slice(new);
        if let Some(last) = known.checked_sub(1)
            && let Some(stream) = streams.chunks_exact(n_embd).nth(last)
        {
            let at = self.streams.len() - n_embd;
            self.streams[at..].copy_from_slice(stream);
        }
        self.streams.extend_from_slice(streams.get(known * n_embd..).unwrap_or_default());
        true
    }

    /// Removes the first `n` pending tokens once they have been processed.
    fn drain(&mut self, n: usize) {
        let n_embd = self.n_embd();
        self.pending.drain(..n);
        self.streams.drain(..n * n_embd);
    }
}

impl<B: Backend> MtpLayer<B> {
    /// Creates the MTP layer of `model`; `None` for a model without one.
    pub fn new(device: &B, model: &Decoder<B>, weights: Option<Weights<B>>) -> Result<Option<Self>, Error> {
        let Some((config, weights)) = model.config().of_mtp().zip(weights) else { return Ok(None) };
        let decoder = Decoder::new(config, weights).with_soft_tokens(model.extra());
        let act = decoder.activations(device, MAX_ROWS)?;
        let logits = device.buffer(decoder.n_vocab())?;
        Ok(Some(Self { decoder, act, logits, candidates: Vec::new() }))
    }

    /// Returns the bytes of its weights, without those shared with the model.
    pub fn weight_bytes(&self) -> usize {
        self.decoder.weight_bytes()
    }

    /// Returns the layout of its cache, with the KV types of the model's last attention layer.
    pub fn layout(&self, plan: &Plan) -> Layout {
        let shape = self.decoder.kv_shape();
        Layout::new(&shape, own_plan(&shape, plan))
    }

    /// Follows a sequence from its beginning.
    pub fn start(&self, plan: &Plan, n_ctx: usize) -> MtpSequence<B::Page> {
        let cache = Cache::new(Arc::new(self.layout(plan)), n_ctx);
        MtpSequence { cache, pending: Vec::new(), streams: vec![0.0; self.n_embd()] }
    }

    fn n_embd(&self) -> usize {
        self.decoder.config().n_embd
    }

    /// Records `tokens` of a sequence from position `start` on, which the model has processed, and
    /// their final hidden states `streams` `[tokens, n_embd]`. Returns whether the layer can follow
    /// the sequence.
    pub fn record(
        &mut self,
        device: &PooledDevice<B>,
        followed: &mut MtpSequence<B::Page>,
        start: usize,
        tokens: &[u32],
        streams: &[f32],
    ) -> bool {
        followed.record(start, tokens, streams)
            && match followed.n_pending() {
                n if n > MAX_PENDING => self.process(device, followed, n - MAX_UNVERIFIED).is_ok(),
                _ => true,
            }
    }

    /// Processes the first `n` pending tokens.
    pub fn process(
        &mut self,
        device: &PooledDevice<B>,
        followed: &mut MtpSequence<B::Page>,
        n: usize,
    ) -> Result<(), Error> {
        let n_embd = self.n_embd();
        let MtpSequence { cache, pending, streams } = followed;
        for (tokens, streams) in pending[..n].chunks(MAX_ROWS).zip(streams.chunks(MAX_ROWS * n_embd)) {
            let streams = &streams[..tokens.len() * n_embd];
            self.step(device, cache, Entry::Pairs(tokens, streams), tokens.len(), LogitsFor::None)?;
        }
        followed.drain(n);
        Ok(())
    }

    /// Passes predictions behind `next` to `on_prediction`, one token after the other until it
    /// returns `false`; `next` follows all tokens of the sequence.
    pub fn predict(
        &mut self,
        device: &PooledDevice<B>,
        followed: &mut MtpSequence<B::Page>,
        next: u32,
        on_prediction: OnDraft<'_>,
    ) -> Result<(), Error> {
        let n_embd = self.n_embd();
        let MtpSequence { cache, pending, streams } = followed;
        let PooledDevice { backend, pool } = device;
        let capacity = cache.reserve_draft(&**backend, pool, pending.len(), MAX_DRAFT_TOKENS);
        if capacity == 0 {
            return Ok(());
        }
        let n_pending = pending.len();
        let len = cache.len() + n_pending;
        let mut rows = n_pending + 1;
        pending.push(next);
        let step = self.step(device, cache, Entry::Pairs(pending, streams), rows, LogitsFor::Last);
        pending.pop();
        step?;
        let mut stream = vec![0.0; n_embd];
        for n_predicted in 1.. {
            let (token, lead) = self.most_probable(backend)?;
            if !on_prediction(token, lead) || n_predicted == capacity {
                break;
            }
            self.decoder.final_hidden(&**backend, &mut self.act, rows, &mut stream)?;
            self.step(device, cache, Entry::Pairs(&[token], &stream), 1, LogitsFor::Last)?;
            rows = 1;
        }
        // Cached predictions derive from predicted hidden states, so they are discarded.
        cache.truncate(len);
        followed.drain(n_pending);
        Ok(())
    }

    /// Returns the most probable token of the last row, and the margin of its logit.
    fn most_probable(&mut self, backend: &B) -> Result<(u32, f32), Error> {
        backend.top_k(&self.logits, 0, self.decoder.n_vocab(), 2, &mut self.candidates)?;
        Ok(top_with_margin(&self.candidates))
    }

    /// Runs the layer over `n` rows.
    fn step(
        &mut self,
        device: &PooledDevice<B>,
        cache: &mut Cache<B::Page>,
        entry: Entry<'_>,
        n: usize,
        logits_for: LogitsFor,
    ) -> Result<(), Error> {
        let out = Outputs::logits((logits_for != LogitsFor::None).then_some(&mut self.logits));
        let part = BatchSequence { cache, n, logits_for, lora_scales: None, places: None };
        let PooledDevice { backend, pool } = device;
        let step = self.decoder.step(&**backend, pool, &mut [part], &mut self.act, entry, out);
        step.map_err(|error| roll_back(error, [cache]))
    }
}
