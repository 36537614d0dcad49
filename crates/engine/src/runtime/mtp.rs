//! The multi-token prediction (MTP) layer, which drafts the token after the next, on the model's
//! device.
//!
//! It follows each sequence with a KV cache of its own. Its input at a position is the token there
//! and the model's final hidden state of the token before. It prefills along with the model; during
//! decode, tokens wait until a prediction is requested. Its predictions affect speed alone, so a
//! sequence that it cannot follow (one that was restored, or ran out of memory) just gets no draft
//! tokens.

use std::collections::HashMap;
use std::sync::Arc;

use kvant_backend::{Backend, Candidate, Page, TOKENS_PER_BLOCK};
use kvant_generate::speculative::MAX_DRAFT_TOKENS;
use kvant_kv::{BlockKey, BlockPool, Cache, KvShape, Layout, Plan};
use kvant_model::{Activations, BatchSequence, Decoder, Entry, LogitsFor, Outputs, Weights};

use super::{BatchEntry, MAX_ROWS, SequenceId};
use crate::Error;

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

/// The MTP layer, and the sequences that it follows.
pub(super) struct Mtp<B: Backend> {
    layer: Layer<B>,
    followed: HashMap<SequenceId, MtpSequence<B::Page>>,
    /// Final hidden states of a step, `[rows, n_embd]`.
    streams: Vec<f32>,
}

/// The layer with its buffers.
struct Layer<B: Backend> {
    decoder: Decoder<B>,
    act: Activations<B>,
    /// Logits of one row.
    logits: B::Buffer,
    candidates: Vec<Candidate>,
}

/// The state of the layer for one sequence.
struct MtpSequence<P: Page> {
    cache: Cache<P>,
    /// Tokens behind the cached ones, not processed yet.
    pending: Vec<u32>,
    /// The hidden state before each of them, and the one before the next token, `[waiting + 1,
    /// n_embd]`.
    streams: Vec<f32>,
}

impl<B: Backend> Mtp<B> {
    /// Creates the MTP layer of `model`; `None` for a model without one.
    pub fn new(device: &B, model: &Decoder<B>, weights: Option<Weights<B>>) -> Result<Option<Self>, Error> {
        let Some((config, weights)) = model.config().of_mtp().zip(weights) else { return Ok(None) };
        let decoder = Decoder::new(config, weights).with_soft_tokens(model.extra());
        let act = decoder.activations(device, MAX_ROWS)?;
        let logits = device.buffer(decoder.n_vocab())?;
        let layer = Layer { decoder, act, logits, candidates: Vec::new() };
        Ok(Some(Self { layer, followed: HashMap::new(), streams: Vec::new() }))
    }

    /// Returns the bytes of its weights, without those shared with the model.
    pub fn weight_bytes(&self) -> usize {
        self.layer.decoder.weight_bytes()
    }

    /// Returns the layout of its cache, with the KV types of the model's last attention layer.
    pub fn layout(&self, plan: &Plan) -> Layout {
        let shape = self.layer.decoder.kv_shape();
        Layout::new(&shape, own_plan(&shape, plan))
    }

    /// Follows a sequence from its beginning.
    pub fn start(&mut self, id: SequenceId, plan: &Plan, n_ctx: usize) {
        let cache = Cache::new(Arc::new(self.layout(plan)), n_ctx);
        self.followed.insert(id, MtpSequence::new(cache, self.layer.n_embd()));
    }

    /// Copies the state of `from` to `to`.
    pub fn fork(&mut self, from: SequenceId, to: SequenceId) {
        if let Some(followed) = self.followed.get(&from).cloned() {
            self.followed.insert(to, followed);
        }
    }

    /// Releases a sequence.
    pub fn release(&mut self, id: SequenceId) {
        self.followed.remove(&id);
    }

    /// Applies a change of the model's cache to the layer's cache.
    pub fn with(&mut self, id: SequenceId, f: impl FnOnce(&mut Cache<B::Page>)) {
        if let Some(followed) = self.followed.get_mut(&id) {
            f(&mut followed.cache);
        }
    }

    /// Truncates to the first `n` tokens. Tokens fed again behind them must be the same, unless
    /// this is called again.
    pub fn truncate(&mut self, id: SequenceId, n: usize) {
        if let Some(followed) = self.followed.get_mut(&id) {
            followed.cut(n, self.layer.n_embd());
        }
    }

    /// Sets a checkpoint: see [`Cache::mark`].
    pub fn set_checkpoint(&mut self, device: &B, pool: &BlockPool<B::Page>, id: SequenceId) {
        let Self { layer, followed, .. } = self;
        let Some(one) = followed.get_mut(&id) else { return };
        match layer.read(device, pool, one, one.pending.len()) {
            Ok(()) => one.cache.set_checkpoint(),
            // Out of memory, in most cases.
            Err(_) => _ = followed.remove(&id),
        }
    }

    /// Registers the prefix for other sequences.
    pub fn register_prefix(&mut self, pool: &BlockPool<B::Page>, id: SequenceId, tokens: &[u32]) {
        self.with(id, |cache| cache.register_prefix(pool, tokens));
    }

    /// Sets the key before the first block, see [`Cache::set_prefix_root`]; it differs from that of
    /// the model's cache.
    pub fn set_prefix_root(&mut self, id: SequenceId, root: BlockKey) {
        self.with(id, |cache| cache.set_prefix_root(root.child(&[])));
    }

    /// Attaches the longest prefix of `tokens` that other sequences hold; the model's cache has all
    /// of `tokens`.
    pub fn attach_prefix(&mut self, pool: &BlockPool<B::Page>, id: SequenceId, tokens: &[u32]) {
        let Some(followed) = self.followed.get_mut(&id) else { return };
        // Attaching always leaves the last token out.
        let held = [tokens, &[0]].concat();
        let n = followed.cache.attach_prefix(pool, &held);
        followed.queue_without_states(&tokens[n..], self.layer.n_embd());
        if tokens.len() - n > MAX_WITHOUT_STATE {
            self.followed.remove(&id);
        }
    }

    /// Returns the bytes allocated by a sequence.
    pub fn n_bytes(&self, id: SequenceId) -> usize {
        self.followed.get(&id).map_or(0, |followed| followed.cache.n_bytes())
    }

    /// Records a step of the model: its rows entered as `tokens`, those of each sequence at its
    /// position in `starts`.
    pub fn commit_step(
        &mut self,
        (device, pool): (&B, &BlockPool<B::Page>),
        model: (&Decoder<B>, &mut Activations<B>),
        (batch, starts): (&[BatchEntry], &[usize]),
        tokens: &[u32],
    ) -> Result<(), Error> {
        if !batch.iter().any(|row| self.followed.contains_key(&row.id)) {
            return Ok(());
        }
        let n_embd = self.layer.n_embd();
        self.streams.resize(tokens.len() * n_embd, 0.0);
        model.0.final_hidden(device, model.1, tokens.len(), &mut self.streams)?;
        let mut first = 0;
        for (row, &start) in batch.iter().zip(starts) {
            let rows = first..first + row.n;
            first = rows.end;
            let Some(followed) = self.followed.get_mut(&row.id) else { continue };
            let streams = &self.streams[rows.start * n_embd..rows.end * n_embd];
            let is_followed = followed.record(start, &tokens[rows], streams)
                && match followed.pending.len() {
                    n if n > MAX_PENDING => {
                        self.layer.read(device, pool, followed, n - MAX_UNVERIFIED).is_ok()
                    }
                    _ => true,
                };
            if !is_followed {
                self.followed.remove(&row.id);
            }
        }
        Ok(())
    }

    /// Passes predictions behind `next` to `on_prediction`, one token after the other until it
    /// returns `false`; `next` follows the `at` tokens of a sequence.
    pub fn predict(
        &mut self,
        (device, pool): (&B, &BlockPool<B::Page>),
        (id, at): (SequenceId, usize),
        next: u32,
        on_prediction: OnDraft<'_>,
    ) {
        let Self { layer, followed, .. } = self;
        let Some(one) = followed.get_mut(&id).filter(|one| one.len() == at) else { return };
        if layer.predict(device, pool, one, next, on_prediction).is_err() {
            followed.remove(&id);
        }
    }
}

/// Returns the plan of the layer's cache.
fn own_plan(shape: &KvShape, plan: &Plan) -> Plan {
    let n_kv_heads = shape.layers[0].n_kv_heads;
    let last = plan.types.last().expect("a model whose layers attend");
    let types = match last.len() == n_kv_heads {
        true => last.clone(),
        false => vec![last[0]; n_kv_heads],
    };
    Plan { types: vec![types], balance: None, notes: Vec::new(), ..plan.clone() }
}

impl<P: Page> Clone for MtpSequence<P> {
    fn clone(&self) -> Self {
        Self { cache: self.cache.clone(), pending: self.pending.clone(), streams: self.streams.clone() }
    }
}

impl<P: Page> MtpSequence<P> {
    fn new(cache: Cache<P>, n_embd: usize) -> Self {
        Self { cache, pending: Vec::new(), streams: vec![0.0; n_embd] }
    }

    /// Returns the number of tokens of the sequence.
    fn len(&self) -> usize {
        self.cache.len() + self.pending.len()
    }

    /// Queues `tokens` whose hidden states are unknown.
    fn queue_without_states(&mut self, tokens: &[u32], n_embd: usize) {
        self.pending = tokens.to_vec();
        self.streams = vec![0.0; (tokens.len() + 1) * n_embd];
    }

    fn cut(&mut self, n: usize, n_embd: usize) {
        match n.checked_sub(self.cache.len()) {
            Some(waiting) => {
                self.pending.truncate(waiting);
                self.streams.truncate((self.pending.len() + 1) * n_embd);
            }
            None => {
                self.cache.truncate(n);
                self.queue_without_states(&[], n_embd);
            }
        }
    }

    /// Records tokens from position `start` on and their final hidden states; known ones are
    /// skipped. Returns whether they connect to the known tokens.
    fn record(&mut self, start: usize, tokens: &[u32], streams: &[f32]) -> bool {
        let n_embd = streams.len() / tokens.len();
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

    /// Removes the first `n` waiting tokens once they have been processed.
    fn drain(&mut self, n: usize, n_embd: usize) {
        self.pending.drain(..n);
        self.streams.drain(..n * n_embd);
    }
}

impl<B: Backend> Layer<B> {
    fn n_embd(&self) -> usize {
        self.decoder.config().n_embd
    }

    /// Processes the first `n` waiting tokens.
    fn read(
        &mut self,
        device: &B,
        pool: &BlockPool<B::Page>,
        followed: &mut MtpSequence<B::Page>,
        n: usize,
    ) -> Result<(), Error> {
        let n_embd = self.n_embd();
        let MtpSequence { cache, pending: waiting, streams } = followed;
        for (tokens, streams) in waiting[..n].chunks(MAX_ROWS).zip(streams.chunks(MAX_ROWS * n_embd)) {
            let streams = &streams[..tokens.len() * n_embd];
            self.step(device, pool, cache, (tokens, streams), LogitsFor::None)?;
        }
        followed.drain(n, n_embd);
        Ok(())
    }

    fn predict(
        &mut self,
        device: &B,
        pool: &BlockPool<B::Page>,
        followed: &mut MtpSequence<B::Page>,
        next: u32,
        on_prediction: OnDraft<'_>,
    ) -> Result<(), Error> {
        let n_embd = self.n_embd();
        let MtpSequence { cache, pending: waiting, streams } = followed;
        let capacity = cache.reserve_draft(device, pool, waiting.len(), MAX_DRAFT_TOKENS);
        if capacity == 0 {
            return Ok(());
        }
        let n_waiting = waiting.len();
        let len = cache.len() + n_waiting;
        waiting.push(next);
        let step = self.step(device, pool, cache, (waiting, streams), LogitsFor::Last);
        waiting.pop();
        step?;
        let mut rows = n_waiting + 1;
        let mut stream = vec![0.0; n_embd];
        for n_predicted in 1.. {
            let (token, lead) = self.likeliest(device)?;
            if !on_prediction(token, lead) || n_predicted == capacity {
                break;
            }
            self.decoder.final_hidden(device, &mut self.act, rows, &mut stream)?;
            self.step(device, pool, cache, (&[token], &stream), LogitsFor::Last)?;
            rows = 1;
        }
        // Cached predictions derive from predicted hidden states, so they are discarded.
        cache.truncate(len);
        followed.drain(n_waiting, n_embd);
        Ok(())
    }

    /// Returns the most probable token of the last row, and the margin of its logit.
    fn likeliest(&mut self, device: &B) -> Result<(u32, f32), Error> {
        device.top_k(&self.logits, 0, self.decoder.n_vocab(), 2, &mut self.candidates)?;
        Ok(top_with_margin(&self.candidates))
    }

    fn step(
        &mut self,
        device: &B,
        pool: &BlockPool<B::Page>,
        cache: &mut Cache<B::Page>,
        (tokens, streams): (&[u32], &[f32]),
        want: LogitsFor,
    ) -> Result<(), Error> {
        let out = Outputs::logits((want != LogitsFor::None).then_some(&mut self.logits));
        let part =
            BatchSequence { cache, n: tokens.len(), logits_for: want, lora_scales: None, places: None };
        let entry = Entry::Pairs(tokens, streams);
        let step = self.decoder.step(device, pool, &mut [part], &mut self.act, entry, out);
        step.map_err(|error| super::device_model::roll_back(error, [cache]))
    }
}
