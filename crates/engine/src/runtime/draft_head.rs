//! A draft head, which predicts the token after the next, on the model's device: the model's own
//! multi-token prediction (MTP) layer, or a head of another file: EAGLE-3, or DFlash, which
//! predicts several tokens at once.
//!
//! It follows each sequence with a KV cache of its own. Its input at a position is the token there
//! and the model's hidden states of the token before: the final one, or those of a few layers. It
//! prefills along with the model; during decode, tokens wait until a prediction is requested. Its
//! predictions affect speed alone, so a sequence that it cannot follow (one that was restored, or
//! ran out of memory) just gets no draft tokens.

use std::sync::Arc;

use kvant_backend::{Backend, Candidate, Page, TOKENS_PER_BLOCK, TopK};
use kvant_codec::DType;
use kvant_generate::speculative::MAX_DRAFT_TOKENS;
use kvant_kv::{BlockPool, Cache, KvShape, Layout, Plan, Policies};
use kvant_model::{
    Activations, BatchSequence, Decoder, DraftHeadConfig, Drafting, Entry, LogitsFor, Outputs, SoftTokens,
    Weights,
};

use super::cache::PooledDevice;
use super::device_model::roll_back;
use crate::error::Error;

/// Maximum of rows in a step of the head.
const MAX_ROWS: usize = 512;
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

/// Returns the tokens that blocks of `len` tokens draft.
fn n_drafted(len: usize) -> usize {
    MAX_DRAFT_TOKENS.min(len - 1)
}

/// What the head of a model reads of it.
enum HeadKind {
    /// An MTP layer: the final hidden state.
    Mtp,
    /// A head of another file: features.
    OfFile {
        n_features: usize,
        /// The model's token for each of its own; `None` if they are the same.
        target_ids: Option<Vec<u32>>,
        drafting: Drafting,
    },
}

/// Blocks that a DFlash head drafts.
struct BlockShape {
    /// The token that stands for one to be drafted.
    mask: u32,
    /// Tokens that a block drafts.
    n_drafted: usize,
}

/// A draft head with its buffers.
pub(super) struct DraftHead<B: Backend> {
    kind: HeadKind,
    decoder: Decoder<B>,
    act: Activations<B>,
    /// Logits of one row, or of the drafted tokens of a block.
    logits: B::Buffer,
    candidates: Vec<Vec<Candidate>>,
}

/// The state of the head for one sequence.
pub(super) struct HeadSequence<P: Page> {
    pub cache: Cache<P>,
    /// Whether the first token is skipped, before which there is no hidden state: a head of another
    /// file has no row for it, an MTP layer one of zeros.
    skips_first: bool,
    /// Number of skipped tokens.
    n_skipped: usize,
    /// Tokens behind the cached ones, not processed yet.
    pending: Vec<u32>,
    /// The hidden states before each of them, and those before the next token,
    /// `[pending + 1, width]`.
    streams: Vec<f32>,
}

/// Returns the plan of an MTP layer's cache.
fn mtp_plan(shape: &KvShape, plan: &Plan) -> Plan {
    let n_kv_heads = shape.layers[0].n_kv_heads;
    let last = plan.types.last().expect("a model whose layers attend");
    let types = match last.len() == n_kv_heads {
        true => last.clone(),
        false => vec![last[0]; n_kv_heads],
    };
    Plan { types: vec![types], channel_scales: None, notes: Vec::new(), ..plan.clone() }
}

impl<P: Page> Clone for HeadSequence<P> {
    fn clone(&self) -> Self {
        let (cache, pending, streams) = (self.cache.clone(), self.pending.clone(), self.streams.clone());
        Self { cache, pending, streams, ..*self }
    }
}

impl<P: Page> HeadSequence<P> {
    /// Returns the number of tokens of the sequence.
    pub fn len(&self) -> usize {
        self.n_skipped + self.cache.len() + self.pending.len()
    }

    /// Returns the number of tokens that are not processed yet.
    pub fn n_pending(&self) -> usize {
        self.pending.len()
    }

    /// Returns the hidden states of a token in values.
    fn width(&self) -> usize {
        self.streams.len() / (self.pending.len() + 1)
    }

    /// Queues `tokens` whose hidden states are unknown.
    fn queue_without_states(&mut self, tokens: &[u32]) {
        self.streams = vec![0.0; (tokens.len() + 1) * self.width()];
        self.pending = tokens.to_vec();
    }

    /// Truncates to the first `n` tokens. Tokens fed again behind them must be the same, unless
    /// this is called again.
    pub fn truncate(&mut self, n: usize) {
        match n.checked_sub(self.n_skipped + self.cache.len()) {
            Some(pending) => {
                let width = self.width();
                self.pending.truncate(pending);
                self.streams.truncate((self.pending.len() + 1) * width);
            }
            None => {
                self.n_skipped = self.n_skipped.min(n);
                self.cache.truncate(n - self.n_skipped);
                self.queue_without_states(&[]);
            }
        }
    }

    /// Registers the complete blocks of a sequence that begins with `tokens`, so that others can
    /// share them.
    pub fn register_prefix(&mut self, pool: &BlockPool<P>, tokens: &[u32]) {
        self.cache.register_prefix(pool, tokens.get(self.n_skipped..).unwrap_or_default());
    }

    /// Attaches the longest prefix of `tokens` that other sequences hold; the model's cache has the
    /// first `n` of them, and at least one more follows. Returns whether the head can follow the
    /// sequence.
    pub fn attach_prefix(&mut self, pool: &BlockPool<P>, tokens: &[u32], n: usize) -> bool {
        self.n_skipped = usize::from(self.skips_first).min(n);
        // The head of a sequence without its first token is ahead by the next one, so that its
        // blocks are complete with the model's.
        let tokens = &tokens[self.n_skipped..self.n_skipped + n];
        // Attaching always leaves the last token out.
        let held = [tokens, &[0]].concat();
        let n = self.cache.attach_prefix(pool, &held);
        self.queue_without_states(&tokens[n..]);
        tokens.len() - n <= MAX_WITHOUT_STATE
    }

    /// Records tokens from position `start` on and their hidden states; known ones are ignored.
    /// Returns whether they connect to the known tokens.
    fn record(&mut self, start: usize, tokens: &[u32], streams: &[f32]) -> bool {
        let width = self.width();
        let Some(known) = self.len().checked_sub(start) else { return false };
        let new = tokens.get(known..).unwrap_or_default();
        self.pending.extend_from_slice(new);
        if let Some(last) = known.checked_sub(1)
            && let Some(stream) = streams.chunks_exact(width).nth(last)
        {
            let at = self.streams.len() - width;
            self.streams[at..].copy_from_slice(stream);
        }
        self.streams.extend_from_slice(streams.get(known * width..).unwrap_or_default());
        if self.skips_first && self.n_skipped == 0 && !self.pending.is_empty() {
            self.drain(1);
            self.n_skipped = 1;
        }
        true
    }

    /// Removes the first `n` pending tokens once they have been processed.
    fn drain(&mut self, n: usize) {
        let width = self.width();
        self.pending.drain(..n);
        self.streams.drain(..n * width);
    }
}

impl<B: Backend> DraftHead<B> {
    /// Creates the MTP layer of `model` from its weights.
    pub fn mtp(device: &B, model: &Decoder<B>, weights: Weights<B>) -> Result<Self, Error> {
        let config = model.config().of_mtp().expect("weights of an MTP layer belong to a model with one");
        Self::new(device, HeadKind::Mtp, Decoder::new(config, weights).with_soft_tokens(model.extra()))
    }

    /// Creates a head of `model` from another file, from its weights.
    pub fn of_file(
        device: &B,
        model: &Decoder<B>,
        head: DraftHeadConfig,
        weights: Weights<B>,
    ) -> Result<Self, Error> {
        // Rows of images have the width of the model.
        let extra = match head.config.n_embd == model.config().n_embd {
            true => Arc::clone(model.extra()),
            false => Arc::new(SoftTokens::new(model.n_vocab(), head.config.n_embd)),
        };
        let DraftHeadConfig { config, n_features, target_ids, drafting, .. } = head;
        let decoder = Decoder::new(config, weights).with_soft_tokens(&extra);
        Self::new(device, HeadKind::OfFile { n_features, target_ids, drafting }, decoder)
    }

    fn new(device: &B, kind: HeadKind, decoder: Decoder<B>) -> Result<Self, Error> {
        let act = decoder.activations(device, MAX_ROWS)?;
        let n_rows = match kind {
            HeadKind::OfFile { drafting: Drafting::Block { len, .. }, .. } => n_drafted(len),
            _ => 1,
        };
        let logits = device.buffer(n_rows * decoder.n_vocab())?;
        Ok(Self { kind, decoder, act, logits, candidates: Vec::new() })
    }

    /// Returns the bytes of its weights, without those shared with the model.
    pub fn weight_bytes(&self) -> usize {
        self.decoder.weight_bytes()
    }

    /// Returns the layout of its cache: f16, or for an MTP layer the KV types of the model's last
    /// attention layer.
    pub fn layout(&self, plan: &Plan) -> Layout {
        let shape = self.decoder.kv_shape();
        let plan = match self.kind {
            HeadKind::Mtp => mtp_plan(&shape, plan),
            HeadKind::OfFile { .. } => Plan::new(&shape, DType::F16, DType::F16, &Policies::default())
                .expect("every cache can be in f16"),
        };
        Layout::new(&shape, plan)
    }

    /// Follows a sequence from its beginning.
    pub fn start(&self, plan: &Plan, n_ctx: usize) -> HeadSequence<B::Page> {
        let cache = Cache::new(Arc::new(self.layout(plan)), n_ctx);
        let skips_first = matches!(self.kind, HeadKind::OfFile { .. });
        HeadSequence {
            cache,
            skips_first,
            n_skipped: 0,
            pending: Vec::new(),
            streams: vec![0.0; self.width()],
        }
    }

    /// Returns the values that it reads of the model's hidden states for a token.
    fn width(&self) -> usize {
        match self.kind {
            HeadKind::Mtp => self.decoder.config().n_embd,
            HeadKind::OfFile { n_features, .. } => n_features,
        }
    }

    /// Reads what it needs of the last step of `model`, of `rows` rows, into `out` `[rows, width]`.
    /// Returns the width.
    pub fn read_states(
        &self,
        device: &B,
        model: &Decoder<B>,
        act: &mut Activations<B>,
        rows: usize,
        out: &mut Vec<f32>,
    ) -> Result<usize, Error> {
        let width = self.width();
        out.resize(rows * width, 0.0);
        match self.kind {
            HeadKind::Mtp => model.final_hidden(device, act, rows, out)?,
            HeadKind::OfFile { .. } => model.captured(device, act, out)?,
        }
        Ok(width)
    }

    /// Records `tokens` of a sequence from position `start` on, which the model has processed, and
    /// their hidden states `streams` `[tokens, width]`. Returns whether the head can follow the
    /// sequence.
    pub fn record(
        &mut self,
        device: &PooledDevice<B>,
        followed: &mut HeadSequence<B::Page>,
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
        followed: &mut HeadSequence<B::Page>,
        n: usize,
    ) -> Result<(), Error> {
        let width = self.width();
        let HeadSequence { cache, pending, streams, .. } = followed;
        for (tokens, streams) in pending[..n].chunks(MAX_ROWS).zip(streams.chunks(MAX_ROWS * width)) {
            let streams = &streams[..tokens.len() * width];
            match self.block() {
                Some(_) => self.cache_features(device, cache, tokens, streams)?,
                None => {
                    let entry = self.entry(tokens, streams);
                    self.step(device, cache, entry, tokens.len(), LogitsFor::None)?;
                }
            }
        }
        followed.drain(n);
        Ok(())
    }

    /// Returns the blocks that it drafts; `None` if it drafts one token after the other.
    fn block(&self) -> Option<BlockShape> {
        match self.kind {
            HeadKind::OfFile { drafting: Drafting::Block { mask, len, .. }, .. } => {
                Some(BlockShape { mask, n_drafted: n_drafted(len) })
            }
            _ => None,
        }
    }

    /// Returns the input of a step over tokens, with the model's hidden states before them.
    fn entry<'e>(&self, tokens: &'e [u32], streams: &'e [f32]) -> Entry<'e> {
        match self.kind {
            HeadKind::Mtp => Entry::Pairs(tokens, streams),
            HeadKind::OfFile { .. } => Entry::Features(tokens, streams),
        }
    }

    /// Passes predictions behind `next` to `on_prediction`, one token after the other until it
    /// returns `false`; `next` follows all tokens of the sequence.
    pub fn predict(
        &mut self,
        device: &PooledDevice<B>,
        followed: &mut HeadSequence<B::Page>,
        next: u32,
        on_prediction: OnDraft<'_>,
    ) -> Result<(), Error> {
        // The hidden states before the first token of a sequence are unknown.
        if followed.skips_first && followed.n_skipped == 0 {
            return Ok(());
        }
        if let Some(shape) = self.block() {
            return self.predict_block(device, followed, next, shape, on_prediction);
        }
        let HeadSequence { cache, pending, streams, .. } = followed;
        let PooledDevice { backend, pool } = device;
        let capacity = cache.reserve_draft(&**backend, pool, pending.len(), MAX_DRAFT_TOKENS);
        if capacity == 0 {
            return Ok(());
        }
        let n_pending = pending.len();
        let len = cache.len() + n_pending;
        let mut rows = n_pending + 1;
        pending.push(next);
        let step = self.step(device, cache, self.entry(pending, streams), rows, LogitsFor::Last);
        pending.pop();
        step?;
        let mut stream = vec![0.0; self.decoder.config().n_embd];
        for n_predicted in 1.. {
            self.select(backend, 1)?;
            let (token, lead) = self.most_probable(0);
            if !on_prediction(token, lead) || n_predicted == capacity {
                break;
            }
            self.read_own_state(backend, rows, &mut stream)?;
            self.step(device, cache, Entry::Pairs(&[token], &stream), 1, LogitsFor::Last)?;
            rows = 1;
        }
        // Cached predictions derive from predicted hidden states, so they are discarded.
        cache.truncate(len);
        followed.drain(n_pending);
        Ok(())
    }

    /// Passes the predictions of a block behind `next` to `on_prediction`, until it returns
    /// `false`.
    fn predict_block(
        &mut self,
        device: &PooledDevice<B>,
        followed: &mut HeadSequence<B::Page>,
        next: u32,
        BlockShape { mask, n_drafted }: BlockShape,
        on_prediction: OnDraft<'_>,
    ) -> Result<(), Error> {
        let PooledDevice { backend, pool } = device;
        self.process(device, followed, followed.n_pending())?;
        let HeadSequence { cache, streams, .. } = followed;
        let known = cache.len();
        let capacity = cache.reserve_draft(&**backend, pool, 2, n_drafted);
        if capacity == 0 {
            return Ok(());
        }
        // Of the token before `next`, which gets its place with `next`.
        self.cache_features(device, cache, &[next], streams)?;
        let mut block = vec![mask; capacity + 1];
        block[0] = next;
        let drafted = self.step(device, cache, Entry::Tokens(&block), block.len(), LogitsFor::From(1));
        cache.truncate(known);
        drafted?;
        self.select(backend, capacity)?;
        for row in 0..capacity {
            let (token, lead) = self.most_probable(row);
            if !on_prediction(token, lead) {
                break;
            }
        }
        Ok(())
    }

    /// Caches the features `streams` of the tokens before `tokens`, of a head that drafts blocks.
    fn cache_features(
        &mut self,
        device: &PooledDevice<B>,
        cache: &mut Cache<B::Page>,
        tokens: &[u32],
        streams: &[f32],
    ) -> Result<(), Error> {
        let logits_for = LogitsFor::None;
        let part = BatchSequence {
            cache,
            n: tokens.len(),
            logits_for,
            lora_scales: None,
            places: None,
            tokens_before: &[],
        };
        let PooledDevice { backend, pool } = device;
        let entry = Entry::Features(tokens, streams);
        let cached = self.decoder.cache_features(&**backend, pool, part, &mut self.act, entry);
        cached.map_err(|error| roll_back(error, [cache]))
    }

    /// Reads the head's own hidden state of the last row of its last step, of `rows` rows, which
    /// takes the place of the model's.
    fn read_own_state(&mut self, device: &B, rows: usize, out: &mut [f32]) -> Result<(), Error> {
        match self.kind {
            HeadKind::Mtp => self.decoder.final_hidden(device, &mut self.act, rows, out)?,
            HeadKind::OfFile { .. } => self.decoder.last_residual(device, &self.act, rows, out)?,
        }
        Ok(())
    }

    /// Selects the two most probable tokens of each of the first `n` rows of the logits.
    fn select(&mut self, backend: &B, n: usize) -> Result<(), Error> {
        self.candidates.resize_with(n, Vec::new);
        let rows = self.candidates.iter_mut().enumerate();
        let mut rows: Vec<_> = rows.map(|(row, out)| TopK { row, k: 2, out }).collect();
        Ok(backend.top_k(&self.logits, self.decoder.n_vocab(), &mut rows)?)
    }

    /// Returns the most probable token of a selected row, and the margin of its logit.
    fn most_probable(&self, row: usize) -> (u32, f32) {
        let (token, lead) = top_with_margin(&self.candidates[row]);
        match &self.kind {
            HeadKind::OfFile { target_ids: Some(ids), .. } => (ids[token as usize], lead),
            _ => (token, lead),
        }
    }

    /// Runs the head over `n` rows.
    fn step(
        &mut self,
        device: &PooledDevice<B>,
        cache: &mut Cache<B::Page>,
        entry: Entry<'_>,
        n: usize,
        logits_for: LogitsFor,
    ) -> Result<(), Error> {
        let out = Outputs::logits((logits_for != LogitsFor::None).then_some(&mut self.logits));
        let part =
            BatchSequence { cache, n, logits_for, lora_scales: None, places: None, tokens_before: &[] };
        let PooledDevice { backend, pool } = device;
        let step = self.decoder.step(&**backend, pool, &mut [part], &mut self.act, entry, out);
        step.map_err(|error| roll_back(error, [cache]))
    }
}
