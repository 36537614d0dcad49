//! The decoder that all families share, from tokens to logits.
//!
//! A transformer with norms, rotary embeddings, grouped-query attention and a gated feed-forward
//! layer. Families differ in data only ([`LayerSpec`]).
//!
//! A step processes a batch: tokens of any number of sequences pass the layers together, in one
//! pass over the weights. The result for a token does not depend on the others (batch invariance).

use std::f32::consts::FRAC_1_SQRT_2;
use std::sync::Arc;

use kvant_backend::{Backend, Heads, Input, KvBatchEntry, Norm, Output, Page, Rope};
use kvant_kv::{BlockPool, Cache, KvShape};

use crate::weights::{AnyAttention, Attention, KvWeights, Weights};
use crate::{Config, EmbeddingRows, LayerSpec, ModelError, NormKind, Position, QkNorm, SoftTokens};

mod activations;
mod batch_entries;
mod block_draft;
mod connections;
mod draft_head;
mod entry;
mod feed_forward;
mod gated_streams;
mod guarded;
mod index;
mod logits_for;
mod mla;
mod mtp;
mod ngrams;
mod per_layer;
mod products;
mod random;
mod recurrent;
mod rehearsal;
mod rwkv;
mod shared_kv;
mod stream_attention;
mod streams;

pub use activations::Activations;
use batch_entries::kv_entries;
use connections::connections_of;
pub use entry::Entry;
use entry::InputTokens;
pub use logits_for::LogitsFor;
use logits_for::ranges_with_logits;
use products::{Branch, LoraScratch, Product, Residual, gate_heads, normalize};

/// A model, or a part of one, on a device.
pub struct Decoder<B: Backend> {
    config: Config,
    weights: Weights<B>,
    /// Cache indices of each layer of this part.
    cache_indices: Vec<CacheIndex>,
    extra: Arc<SoftTokens>,
    /// Layers whose input a draft head reads.
    captures: Vec<usize>,
}

/// Cache indices of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct CacheIndex {
    /// Index of the K and V that it reads.
    kv: Option<usize>,
    /// Index of its first recurrent state.
    state: Option<usize>,
}

/// Outputs of a step.
pub struct Outputs<'a, B: Backend> {
    /// Logits of the requested rows, `[requested rows, n_vocab]`.
    pub logits: Option<&'a mut B::Buffer>,
    /// Receives the queries of each layer's attention.
    pub queries: OnQueries<'a>,
}

impl<'a, B: Backend> Outputs<'a, B> {
    /// Requests logits alone, if any.
    pub fn logits(logits: Option<&'a mut B::Buffer>) -> Self {
        Self { logits, queries: None }
    }
}

/// Callback with the index of the KV layer and the queries after RoPE, `[rows, n_heads *
/// k_head_dim]`, layer by layer, for activation statistics. The step then waits for the device
/// after each layer.
pub type OnQueries<'a> = Option<&'a mut dyn FnMut(usize, &[f32])>;

/// One sequence of a step.
#[derive(Debug)]
pub struct BatchSequence<'a, P: Page> {
    /// Its cache; the tokens are appended to it.
    pub cache: &'a mut Cache<P>,
    /// Its number of rows, at least one; rows of the first sequence come first.
    pub n: usize,
    /// Which of them get logits.
    pub logits_for: LogitsFor,
    /// Scale of each [adapter](crate::LayerRange::with_loras) for this sequence; the loaded scales
    /// when `None`.
    pub lora_scales: Option<&'a [f32]>,
    /// Positions of its rows, for models with M-RoPE, and before them as many as [their
    /// ropes](crate::Rope::angles_at) need; consecutive positions when `None`.
    pub places: Option<&'a [Position]>,
    /// Its last tokens before them, for models with [n-grams](crate::Ngrams): as many as these
    /// read.
    pub tokens_before: &'a [u32],
}

/// What all layers of a step share.
struct StepContext<'a, 's, B: Backend> {
    backend: &'a B,
    /// The sequences, in the order of their rows.
    parts: &'a mut [BatchSequence<'s, B::Page>],
    act: &'a mut Activations<B>,
    /// Number of rows of all parts.
    rows: usize,
    /// Whether the guard compares a sequence of this step.
    compares: bool,
}

/// Rows of a step that must be finite.
struct StepRows<'a, B: Backend> {
    /// Their name in an error.
    what: &'static str,
    /// `[n, width]`
    x: &'a B::Buffer,
    width: usize,
    n: usize,
}

impl<B: Backend> Decoder<B> {
    /// Creates a decoder from its configuration and weights.
    pub fn new(config: Config, weights: Weights<B>) -> Self {
        let layers = weights.part.layers();
        let place = |index| CacheIndex {
            kv: config.kv_ordinal(layers.start, index),
            state: config.state_ordinal(layers.start, index),
        };
        let places = layers.clone().map(place).collect();
        let extra = Arc::new(SoftTokens::new(weights.n_vocab, config.n_embd));
        Self { config, weights, cache_indices: places, extra, captures: Vec::new() }
    }

    /// Returns the decoder with the soft tokens of another part of the model.
    #[must_use]
    pub fn with_soft_tokens(self, extra: &Arc<SoftTokens>) -> Self {
        Self { extra: Arc::clone(extra), ..self }
    }

    /// Returns the soft tokens: those beyond the vocabulary.
    pub fn extra(&self) -> &Arc<SoftTokens> {
        &self.extra
    }

    /// Returns the hyper-parameters.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Returns the specifications of the layers of this part.
    pub fn layers(&self) -> &[LayerSpec] {
        &self.config.layers[self.weights.part.layers()]
    }

    /// Returns the cache index of the K and V that layer `index` of this part reads; `None` if it
    /// has no attention.
    pub fn kv_layer(&self, index: usize) -> Option<usize> {
        self.cache_indices[index].kv
    }

    /// Iterates over the KV indices of all attention layers.
    fn kv_layers(&self) -> impl Iterator<Item = usize> {
        (0..self.cache_indices.len()).filter_map(|index| self.kv_layer(index))
    }

    /// Returns the KV heads of the layers of this part.
    pub fn kv_shape(&self) -> KvShape {
        self.config.kv_shape_of(self.weights.part.layers())
    }

    /// Returns the size of the vocabulary.
    pub fn n_vocab(&self) -> usize {
        self.weights.n_vocab
    }

    /// Returns the bytes of weights in the types of their storage.
    pub fn weight_bytes(&self) -> usize {
        self.weights.n_bytes
    }

    /// Returns the bytes of weights that decoding one token reads: all except an embedding that is
    /// not the output matrix, and unselected experts; layers as often as they run.
    pub fn weight_bytes_per_token(&self) -> usize {
        self.weights.n_bytes - self.weights.idle_bytes + self.weights.repeated_bytes
    }

    /// Runs the layers on the entry: the rows of all `parts` in order, each appended to its cache.
    /// Writes the logits of the requested rows of all parts, in order, to `out`. If the last layer
    /// is on another device, no logits can be requested, and [`Decoder::hidden_states`] returns its
    /// input.
    ///
    /// # Errors
    ///
    /// An unknown token, a full context or insufficient memory: the caches are unchanged then.
    /// After a device error in the middle of a step, [undo it](Cache::undo_step) in every cache.
    ///
    /// # Panics
    ///
    /// With more rows than the activations hold, with tokens where the first layer is elsewhere, or
    /// with requested logits where the last layer is elsewhere or the buffer is too short.
    pub fn step(
        &self,
        backend: &B,
        pool: &BlockPool<B::Page>,
        parts: &mut [BatchSequence<'_, B::Page>],
        act: &mut Activations<B>,
        entry: Entry<'_>,
        Outputs { logits, mut queries }: Outputs<'_, B>,
    ) -> Result<(), StepError> {
        let rows = parts.iter().map(|part| part.n).sum();
        assert!(0 < rows && rows <= act.max_rows, "{rows} rows in a step of at most {}", act.max_rows);
        let extra = self.prepare(backend, pool, parts, act, entry).map_err(StepError::Refused)?;
        let shown = match entry {
            Entry::Tokens(tokens) if !extra.is_empty() => Some(InputTokens { tokens, extra: &extra }),
            _ => None,
        };
        // A step that reads back from the device in between cannot be recorded.
        let is_decode = queries.is_none() && shown.is_none() && parts.iter().all(|part| part.n == 1);
        let compares = self.begin_guarded(parts);
        let mut step = StepContext { backend, parts, act, rows, compares };
        let run = || {
            for (index, (layer, spec)) in self.weights.layers.iter().zip(self.layers()).enumerate() {
                self.capture(&mut step, index)?;
                if let Some(weights) = &layer.altup {
                    self.predict(&mut step, index, weights)?;
                }
                self.inject_ngrams(&mut step, index)?;
                let [of_mixer, of_ffn] = connections_of(layer);
                self.connect(&mut step, of_mixer, |step| self.token_mixer(step, index))?;
                if layer.altup.is_some() {
                    backend.scale(&mut step.act.x, rows * self.config.n_embd, FRAC_1_SQRT_2)?;
                }
                if let (Some(on_queries), Some(kv)) = (&mut queries, self.kv_layer(index)) {
                    let mut q = vec![0.0; rows * spec.n_q()];
                    backend.read(&step.act.q, 0, &mut q)?;
                    on_queries(kv, &q);
                }
                self.connect(&mut step, of_ffn, |step| self.feed_forward(step, index))?;
                match (&layer.altup, &layer.per_layer) {
                    (None, None) => {}
                    (None, Some(weights)) => self.per_layer_embeddings(&mut step, index, weights)?,
                    (Some(weights), of) => self.correct(&mut step, index, weights, of.as_ref())?,
                }
                if let Some(by) = layer.out_scale {
                    backend.scale(&mut step.act.x, rows * self.config.n_embd, by)?;
                }
                if self.config.loops.is_normed_after(index) {
                    self.norm_run(&mut step)?;
                }
                if let Some(shown) = shown {
                    let layer = self.weights.part.layers().start + index;
                    self.deepstack(backend, layer, shown, &mut step.act.x)?;
                }
            }
            if let Some(weights) = &self.weights.streams {
                self.leave_streams(&mut step, weights)?;
            }
            if let Some(weights) = &self.weights.last_connection {
                self.read_streams(&mut step, weights)?;
            }
            self.capture(&mut step, self.weights.layers.len())?;
            match logits {
                Some(logits) => self.output(&mut step, logits),
                None => Ok(()),
            }
        };
        backend.step(is_decode, run).map_err(StepError::Broken)?;
        step.parts.iter_mut().for_each(|part| part.cache.commit(part.n));
        Ok(())
    }

    /// Checks what can fail before any cache is written: tokens, context, memory. Then writes the
    /// input to the residual stream. Returns the rows of the soft tokens.
    fn prepare(
        &self,
        backend: &B,
        pool: &BlockPool<B::Page>,
        parts: &mut [BatchSequence<'_, B::Page>],
        act: &mut Activations<B>,
        entry: Entry<'_>,
    ) -> Result<Vec<Arc<EmbeddingRows>>, ModelError> {
        let extra = self.check_tokens(entry)?;
        for part in parts.iter_mut() {
            part.cache.reserve(backend, pool, part.n)?;
        }
        let angles = act.angles.iter_mut().zip(&mut act.angle_tables);
        for (rope, ((on_device, angles), table)) in self.config.ropes.iter().zip(angles) {
            angles.clear();
            for BatchSequence { cache, n, places, .. } in parts.iter() {
                match places {
                    Some(places) => rope.angles_at(cache.n_ctx(), cache.len(), *n, places, angles),
                    None => table.append(rope, cache.n_ctx(), cache.len(), *n, angles),
                }
            }
            backend.write(on_device, angles)?;
        }
        let n_bytes = self.place_step_tiles(parts, &mut act.step_tile_offsets);
        if act.step_tiles.as_ref().map_or(0, Page::n_bytes) < n_bytes {
            act.step_tiles = Some(backend.page(n_bytes)?);
        }
        act.low.prepare(backend, &self.weights, parts)?;
        if let (Some(ngrams), Entry::Tokens(tokens)) = (&self.config.ngrams, entry) {
            act.ngrams.enter(ngrams, parts, tokens, |token| self.extra.is_soft(token))?;
        }
        self.enter_model(backend, entry, &extra, act)?;
        Ok(extra)
    }

    /// Computes the byte offset of each KV layer's step tiles; returns the bytes of all of them.
    fn place_step_tiles(
        &self,
        parts: &mut [BatchSequence<'_, B::Page>],
        step_tile_offsets: &mut Vec<usize>,
    ) -> usize {
        let n_kv = self.kv_layers().max().map_or(0, |last| last + 1);
        step_tile_offsets.clear();
        if !parts.iter().any(|part| part.cache.rows(0, part.n).spans_tiles()) {
            step_tile_offsets.resize(n_kv, 0);
            return 0;
        }
        let mut n_bytes = |kv| kv_entries(parts, kv, 0).iter().map(KvBatchEntry::step_bytes).sum::<usize>();
        let mut end = (0..n_kv).map(&mut n_bytes).max().unwrap_or(0);
        for kv in 0..n_kv {
            let is_shared = self.kv_layers().filter(|&of| of == kv).count() > 1;
            step_tile_offsets.push(if is_shared { end } else { 0 });
            end += if is_shared { n_bytes(kv) } else { 0 };
        }
        end
    }

    /// Normalizes the residual stream between two runs of the layers.
    fn norm_run(&self, step: &mut StepContext<'_, '_, B>) -> Result<(), ModelError> {
        let (rope, act) = (self.config.ropes[0].params, &mut *step.act);
        let row = Heads { n: 1, dim: self.config.n_embd };
        let norm = self.norm(&self.weights.output_norm);
        Ok(normalize(step.backend, &mut act.x, step.rows, row, norm, rope, &act.angles[0].0)?)
    }

    /// Runs the token mixers of layer `index`: attention, a recurrent state, or both.
    fn token_mixer(&self, step: &mut StepContext<'_, '_, B>, index: usize) -> Result<(), ModelError> {
        let (layer, CacheIndex { kv, state }) = (&self.weights.layers[index], self.cache_indices[index]);
        // A recurrent mixer beside attention reads the same residual stream, before attention adds
        // to it.
        if let Some(weights) = &layer.recurrent {
            self.enter_state(step, index, weights)?;
        }
        if let (Some(attention), Some(kv)) = (&layer.attention, kv) {
            match attention {
                AnyAttention::Usual(weights) => self.attention(step, index, kv, weights)?,
                AnyAttention::Latent(weights) => self.attend_mla(step, index, kv, weights)?,
                AnyAttention::SharedKv(weights) => self.attend_shared_kv(step, index, kv, weights)?,
            }
        }
        match (&layer.recurrent, &layer.rwkv, state) {
            (Some(weights), _, Some(state)) => self.recurrent_mixer(step, index, state, weights),
            (None, Some(weights), Some(state)) => self.time_mix(step, index, state, weights),
            _ => Ok(()),
        }
    }

    /// Computes `x += W_o attention(rope(W_q n), rope(W_k n), W_v n)`, `n = norm(x)`, of layer
    /// `index`, whose K and V have the index `kv`; norms and gates if the layer has them.
    fn attention(
        &self,
        step: &mut StepContext<'_, '_, B>,
        index: usize,
        kv: usize,
        weights: &Attention<B>,
    ) -> Result<(), ModelError> {
        self.select_blocks(step, index, kv, weights.index.as_ref())?;
        let (backend, act, rows) = (step.backend, &mut *step.act, step.rows);
        let (layer, spec) = (&self.weights.layers[index], &self.layers()[index]);
        let (rope, heads) = (self.config.ropes[spec.rope].params, &spec.heads);
        let [angles, q_angles] = [spec.rope, spec.q_rope].map(|rope| &act.angles[rope].0);
        let is_apart = self.config.family.reads_tokens || layer.altup.is_some();
        let x = if is_apart { &act.attention_in } else { &act.x };
        let input = match (spec.norms.shared, spec.norms.kind, self.norm(&layer.attn_norm)) {
            // The feed-forward layer reads it from there.
            (true, NormKind::Rms, Some(norm)) => {
                backend.copy(x, 0, &mut act.spare, 0, rows * self.config.n_embd)?;
                let row = Heads { n: 1, dim: self.config.n_embd };
                normalize(backend, &mut act.spare, rows, row, Some(norm), rope, angles)?;
                Input { x: &act.spare, norm: None, first_row: 0, rows }
            }
            _ => self.normed_input(backend, spec.norms.kind, &layer.attn_norm, x, &mut act.spare, rows)?,
        };
        let queries = Output { w: &weights.wq, bias: weights.bq.as_ref(), y: &mut act.q, accumulate: false };
        let q_heads = Heads { n: heads.n_heads, dim: heads.k_head_dim };
        let mut q_norm = self.norm(&weights.q_norm);
        let are_together = spec.norms.heads == QkNorm::Together;
        let norms_after_rope = spec.norms.heads == QkNorm::QkNormAfterRope;
        let norm_heads = |x: &mut B::Buffer, norm: &mut Option<Norm<'_, B::Buffer>>, heads: Heads| {
            normalize(backend, x, rows, heads, norm.take(), rope, angles)
        };
        let norm_row = |x: &mut B::Buffer, norm: &mut Option<Norm<'_, B::Buffer>>, dim: usize| {
            norm_heads(x, norm, Heads { n: 1, dim })
        };
        let (params, first_offset) = (spec.attend_params(), act.step_tile_offsets[kv]);
        let [of_input, of_output] = weights.low_rank.each_ref().map(Option::as_ref);
        let project = |outputs: &mut [Output<'_, B>]| {
            self.project(backend, Product { input, low_rank: of_input }, outputs, &mut act.low)
        };
        match &weights.kv {
            Some(KvWeights { wk, wv, bk, bv, k_norm, v_norm }) => {
                let keys = Output { w: wk, bias: bk.as_ref(), y: &mut act.k, accumulate: false };
                let values = wv.as_ref().map(|w| (w, &mut act.v));
                let values = values.map(|(w, y)| Output { w, bias: bv.as_ref(), y, accumulate: false });
                match (values, &weights.gate) {
                    (Some(values), None) => project(&mut [queries, keys, values])?,
                    (Some(values), Some(w)) => {
                        let gates = Output { w, bias: None, y: &mut act.gates, accumulate: false };
                        project(&mut [queries, keys, values, gates])?;
                    }
                    // No layer with gates has V = K.
                    (None, _) => {
                        project(&mut [queries, keys])?;
                        backend.copy(&act.k, 0, &mut act.v, 0, rows * spec.n_v())?;
                    }
                }
                for (what, x, width) in [("keys", &act.k, spec.n_k()), ("values", &act.v, spec.n_v())] {
                    self.check_rows(backend, step.parts, index, StepRows { what, x, width, n: rows })?;
                }
                let k_heads = Heads { n: heads.n_kv_heads, dim: heads.k_head_dim };
                let mut k_norm = self.norm(k_norm);
                if are_together {
                    norm_row(&mut act.q, &mut q_norm, spec.n_q())?;
                    norm_row(&mut act.k, &mut k_norm, spec.n_k())?;
                }
                let v_heads = Heads { n: heads.n_kv_heads, dim: heads.v_head_dim };
                norm_heads(&mut act.v, &mut self.norm(v_norm), v_heads)?;
                let (q, k, v, step_tiles) = (&mut act.q, &mut act.k, &act.v, act.step_tiles.as_mut());
                if norms_after_rope {
                    backend.rope(q, rows, q_heads, None, rope, q_angles)?;
                    backend.rope(k, rows, k_heads, None, rope, angles)?;
                    normalize(backend, q, rows, q_heads, q_norm, rope, angles)?;
                    normalize(backend, k, rows, k_heads, k_norm, rope, angles)?;
                    let entries = &mut kv_entries(step.parts, kv, first_offset);
                    backend.kv_append(entries, k, v, step_tiles)?;
                } else if spec.q_rope == spec.rope && self.guard().is_none() {
                    let rope = Rope { params: rope, angles, q_heads, k_heads, q_norm, k_norm };
                    let entries = &mut kv_entries(step.parts, kv, first_offset);
                    backend.rope_append(entries, &rope, q, k, v, step_tiles)?;
                } else {
                    // Unlike the fused op, these leave the keys in their buffer, where a guard
                    // finds them.
                    backend.rope(q, rows, q_heads, q_norm, rope, q_angles)?;
                    backend.rope(k, rows, k_heads, k_norm, rope, angles)?;
                    let entries = &mut kv_entries(step.parts, kv, first_offset);
                    backend.kv_append(entries, k, v, step_tiles)?;
                }
            }
            None => {
                project(&mut [queries])?;
                if are_together {
                    norm_row(&mut act.q, &mut q_norm, spec.n_q())?;
                }
                backend.rope(&mut act.q, rows, q_heads, q_norm, rope, q_angles)?;
            }
        }
        if let Some(of) = spec.index {
            self.attend_to_selected(step, index, kv, of, weights.sinks.as_ref())?;
        } else {
            let entries = &mut kv_entries(step.parts, kv, first_offset);
            let (sinks, step_tiles) = (weights.sinks.as_ref(), act.step_tiles.as_ref());
            match self.drafts_blocks() {
                true => self.attend_block(backend, &params, entries, &act.q, &mut act.attended)?,
                false => backend.attend(&params, entries, &act.q, sinks, step_tiles, &mut act.attended)?,
            }
        }
        if let Some(guard) = self.guard().filter(|_| weights.kv.is_some()) {
            guarded::follow_rows(guard, step, kv, spec)?;
        }
        let act = &mut *step.act;
        if let Some(by) = spec.value_scale {
            backend.scale(&mut act.attended, rows * spec.n_out(), by)?;
        }
        let gate = spec.gate.filter(|_| weights.gate.is_some());
        let of_heads = Heads { n: rows * heads.n_heads, dim: heads.v_head_dim };
        gate_heads(backend, gate, &mut act.attended, of_heads, &act.gates)?;
        let (w, bias) = (&weights.wo, weights.bo.as_ref());
        let branch = Branch { of: &act.attended, w, low_rank: of_output, bias, norm: &layer.attn_after };
        let Activations { x, spare, low, .. } = act;
        self.add(backend, branch, Residual { x, spare, low, rows })
    }

    /// Rejects rows of layer `index` with NaN or infinities: the cache would quantize them to
    /// finite numbers, and a recurrent state would stay NaN.
    fn check_rows(
        &self,
        backend: &B,
        parts: &[BatchSequence<'_, B::Page>],
        index: usize,
        StepRows { what, x, width, n }: StepRows<'_, B>,
    ) -> Result<(), ModelError> {
        let Some(mut row) = backend.find_non_finite_row(x, n, width)? else { return Ok(()) };
        let layer = self.weights.part.layers().start + index;
        for part in parts {
            if row < part.n {
                return Err(ModelError::RowNotFinite { what, layer, position: part.cache.len() + row });
            }
            row -= part.n;
        }
        Ok(())
    }

    /// Computes `logits = W_out norm(x)` for the requested rows, with the model's soft cap.
    fn output(&self, step: &mut StepContext<'_, '_, B>, logits: &mut B::Buffer) -> Result<(), ModelError> {
        let (backend, act) = (step.backend, &mut *step.act);
        let n_embd = self.config.n_embd;
        let parts = step.parts.iter().map(|part| (part.n, part.logits_for));
        let n_rows: usize = parts.clone().map(|(n, _)| n).sum();
        let n_logit_rows: usize = parts.clone().map(|(n, logits_for)| logits_for.count(n)).sum();
        if n_logit_rows == 0 {
            return Ok(());
        }
        // All rows of a decode step are used where they are.
        let are_all = n_logit_rows == n_rows;
        let mut to = 0;
        for rows in ranges_with_logits(parts).filter(|_| !are_all) {
            let [from, len] = [rows.start, rows.len()].map(|rows| rows * n_embd);
            backend.copy(&act.x, from, &mut act.spare, to, len)?;
            to += len;
        }
        let Weights { output, output_low_rank, output_bias, embedding, output_norm, .. } = &self.weights;
        assert!(self.weights.ends_model(), "logits belong to the last part of the model");
        let w = output.as_deref().or(embedding.as_deref()).expect("the last part has an output matrix");
        // The residual stream ends here.
        let (x, spare) = if are_all { (&act.x, &mut act.spare) } else { (&act.spare, &mut act.x) };
        let kind = self.config.output_norm;
        let input = self.normed_input(backend, kind, output_norm, x, spare, n_logit_rows)?;
        let product = Product { input, low_rank: output_low_rank.as_deref() };
        let logits_of = Output { w, bias: output_bias.as_ref(), y: &mut *logits, accumulate: false };
        self.project(backend, product, &mut [logits_of], &mut act.low)?;
        if let Some(cap) = self.config.logit_soft_cap {
            backend.soft_cap(logits, n_logit_rows * self.n_vocab(), cap)?;
        }
        Ok(())
    }

    /// Copies the hidden states of the last step's `rows` rows to `out` `[rows, n_embd]`: the input
    /// of the next part of the model or, in the last part, the [final hidden
    /// states](Self::final_hidden).
    ///
    /// # Errors
    ///
    /// When the device cannot be read.
    pub fn hidden_states(
        &self,
        backend: &B,
        act: &mut Activations<B>,
        rows: usize,
        out: &mut [f32],
    ) -> Result<(), ModelError> {
        match self.weights.output_norm {
            Some(_) => self.final_hidden(backend, act, rows, out),
            None => Ok(backend.read(&act.x, 0, out)?),
        }
    }

    /// Returns the normalized input of a sublayer: the norm is fused into the GEMM, or its result
    /// is stored in `spare` if the GEMM cannot fuse it.
    fn normed_input<'a>(
        &self,
        backend: &B,
        kind: NormKind,
        weight: &'a Option<B::Buffer>,
        x: &'a B::Buffer,
        spare: &'a mut B::Buffer,
        rows: usize,
    ) -> Result<Input<'a, B>, ModelError> {
        match (kind, self.norm(weight)) {
            (NormKind::Layer, Some(norm)) => {
                backend.layer_norm(x, rows, norm, None, spare)?;
                Ok(Input { x: spare, norm: None, first_row: 0, rows })
            }
            (_, norm) => Ok(Input { x, norm, first_row: 0, rows }),
        }
    }

    /// Returns a norm after a sublayer.
    fn after_norm<'a>(&self, weight: &'a Option<B::Buffer>) -> Option<Norm<'a, B::Buffer>> {
        weight.as_ref().map(|weight| Norm { weight, eps: self.config.after_eps })
    }

    fn norm<'a>(&self, weight: &'a Option<B::Buffer>) -> Option<Norm<'a, B::Buffer>> {
        weight.as_ref().map(|weight| self.normed(weight))
    }

    fn normed<'a>(&self, weight: &'a B::Buffer) -> Norm<'a, B::Buffer> {
        Norm { weight, eps: self.config.norm_eps }
    }
}

/// Why a step failed.
#[derive(Debug)]
pub enum StepError {
    /// The caches are unchanged.
    Refused(ModelError),
    /// Some layers may have written: call [`Cache::undo_step`] on every cache.
    Broken(ModelError),
}
