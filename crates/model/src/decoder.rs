//! The decoder that all families share, from tokens to logits.
//!
//! Transformer with norms, rotary embeddings, grouped-query attention and a gated feed-forward layer. Families differ in
//! data only ([`LayerSpec`]): biases, where there are norms and which, windows, pair order, activation, bounds, tied output.
//!
//! A step is a batch: rows of any number of sequences, each with as many tokens as it likes, go through the layers together,
//! in one pass over the weights. What a row becomes does not depend on the others.

use std::sync::Arc;

use kvant_backend::{
    Backend, BackendError, Gate, Heads, Input, KvPart, Norm, Output, Page, Rope, RopeParams, Rows,
};
use kvant_codec::random::Random;
use kvant_kv::{Cache, KvShape, Pool};

use crate::weights::{AnyAttention, Attention, KvWeights, Weights};
use crate::{Config, ExtraRows, ExtraTokens, HeadNorms, LayerSpec, LayerState, ModelError, NormKind, Place};

mod activations;
mod entry;
mod feed_forward;
mod latent;
mod mtp;
mod per_layer;
mod products;
mod recurrent;

pub use activations::Activations;
pub use entry::Entry;
use products::{Branch, Low, Product};

/// Random numbers that [`Decoder::append_random`] draws at a time; odd, so that no two rows become alike.
const RANDOM_PERIOD: usize = 65_537;

/// A model, or a part of one, on a device.
pub struct Decoder<B: Backend> {
    config: Config,
    weights: Weights<B>,
    /// Where what each layer that is here keeps lies among that of all of them.
    places: Vec<Kept>,
    extra: Arc<ExtraTokens>,
}

/// Where what a layer keeps of past tokens lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Kept {
    /// The number of the keys and values that it meets.
    kv: Option<usize>,
    /// That of the first of its states.
    state: Option<usize>,
}

/// What a step gives.
pub struct Outputs<'a, B: Backend> {
    /// Logits of the wanted rows, `[wanted rows, n_vocab]`.
    pub logits: Option<&'a mut B::Buffer>,
    /// Told the queries that each layer's attention went by.
    pub queries: OnQueries<'a>,
}

impl<'a, B: Backend> Outputs<'a, B> {
    /// Logits alone, if any.
    pub fn logits(logits: Option<&'a mut B::Buffer>) -> Self {
        Self { logits, queries: None }
    }
}

/// Told the KV layer whose keys a layer's queries met, and the queries after RoPE, `[rows, n_heads * k_head_dim]`, layer by
/// layer: what statistics are made of. Steps wait for the device then.
pub type OnQueries<'a> = Option<&'a mut dyn FnMut(usize, &[f32])>;

/// Which rows of a sequence get logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Want {
    /// None: the step only fills the cache.
    Nothing,
    /// The last row.
    Last,
    /// Every row from this one on.
    From(usize),
}

impl Want {
    /// The first wanted row of a sequence with `rows` rows in the step (`rows` when there is none).
    fn first(self, rows: usize) -> usize {
        match self {
            Self::Nothing => rows,
            Self::Last => rows.saturating_sub(1),
            Self::From(row) => row.min(rows),
        }
    }

    /// Rows that are wanted of a sequence with `rows` rows in the step.
    pub fn count(self, rows: usize) -> usize {
        rows - self.first(rows)
    }
}

/// One sequence of a step.
#[derive(Debug)]
pub struct StepPart<'a, P: Page> {
    /// Its cache; the rows go after what it holds.
    pub cache: &'a mut Cache<P>,
    /// Its rows, at least one; those of the first sequence come first.
    pub n: usize,
    /// Which of them get logits.
    pub want: Want,
    /// How much of each [adapter](crate::Part::with_loras) they get; as much as that was loaded with where nothing is said.
    pub strengths: Option<&'a [f32]>,
    /// Where its rows are, for models whose heads are turned by more than the position; there where nothing is said.
    pub places: Option<&'a [Place]>,
}

impl<B: Backend> Decoder<B> {
    /// A decoder from its parts.
    pub fn new(config: Config, weights: Weights<B>) -> Self {
        let layers = weights.part.layers();
        let place = |index| Kept {
            kv: config.kv_ordinal(layers.start, index),
            state: config.state_ordinal(layers.start, index),
        };
        let places = layers.clone().map(place).collect();
        let extra = Arc::new(ExtraTokens::new(weights.n_vocab, config.n_embd));
        Self { config, weights, places, extra }
    }

    /// This decoder, which takes the same tokens beyond the vocabulary as another.
    #[must_use]
    pub fn with_extra(self, extra: &Arc<ExtraTokens>) -> Self {
        Self { extra: Arc::clone(extra), ..self }
    }

    /// The tokens beyond the vocabulary.
    pub fn extra(&self) -> &Arc<ExtraTokens> {
        &self.extra
    }

    /// The hyper-parameters.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The shapes of the layers that are here.
    pub fn layers(&self) -> &[LayerSpec] {
        &self.config.layers[self.weights.part.layers()]
    }

    /// Which keys and values layer `index` of those that are here meets, as the cache counts them; `None` where it does not attend.
    pub fn kv_layer(&self, index: usize) -> Option<usize> {
        self.places[index].kv
    }

    /// The keys and values that each layer meets that meets some.
    fn kv_layers(&self) -> impl Iterator<Item = usize> {
        (0..self.places.len()).filter_map(|index| self.kv_layer(index))
    }

    /// The KV heads of the layers that are here.
    pub fn kv_shape(&self) -> KvShape {
        self.config.kv_shape_of(self.weights.part.layers())
    }

    /// Size of the vocabulary.
    pub fn n_vocab(&self) -> usize {
        self.weights.n_vocab
    }

    /// Bytes of weights in the file's types.
    pub fn weight_bytes(&self) -> usize {
        self.weights.n_bytes
    }

    /// Bytes of weights that one decoded token reads: all but an embedding that is only looked up, and experts that it does not
    /// choose.
    pub fn weight_bytes_per_token(&self) -> usize {
        self.weights.n_bytes - self.weights.idle_bytes
    }

    /// Runs what enters, the rows of all `parts` one after the other, each after what its cache holds, and appends it there.
    /// Logits of the wanted rows of all parts, one after the other, come to lie in those of `out`; where the last layer is
    /// elsewhere, none can be wanted, and [`Decoder::left`] is what enters there.
    ///
    /// # Errors
    /// A token out of range, a full context or no memory: nothing has been changed then. A device error in the middle of a step:
    /// [undo it](Cache::undo_step) in every cache before going on.
    ///
    /// # Panics
    /// When there are more rows than the activations have room for, tokens enter and the first layer is elsewhere, or logits are
    /// wanted and the last one is, or their buffer is too short.
    pub fn step(
        &self,
        backend: &B,
        pool: &Pool<B::Page>,
        parts: &mut [StepPart<'_, B::Page>],
        act: &mut Activations<B>,
        entry: Entry<'_>,
        out: Outputs<'_, B>,
    ) -> Result<(), StepError> {
        let rows = parts.iter().map(|part| part.n).sum();
        assert!(0 < rows && rows <= act.max_rows, "{rows} rows in a step of at most {}", act.max_rows);
        let extra = self.prepare(backend, pool, parts, act, entry).map_err(StepError::Refused)?;
        let shown = match entry {
            Entry::Tokens(tokens) if !extra.is_empty() => Some((tokens, &extra[..])),
            _ => None,
        };
        let Outputs { logits, mut queries } = out;
        // What is read back in between cannot be recorded.
        let is_decode = queries.is_none() && shown.is_none() && parts.iter().all(|part| part.n == 1);
        let run = || {
            for (index, (layer, spec)) in self.weights.layers.iter().zip(self.layers()).enumerate() {
                self.mix(backend, index, parts, act, rows)?;
                if let (Some(tell), Some(kv)) = (&mut queries, self.kv_layer(index)) {
                    let mut q = vec![0.0; rows * spec.n_q()];
                    backend.read(&act.q, 0, &mut q)?;
                    tell(kv, &q);
                }
                self.feed_forward(backend, (layer, spec), act, rows)?;
                if let Some(weights) = &layer.per_layer {
                    self.take_given(backend, (index, weights), act, rows)?;
                }
                if let Some(by) = layer.out_scale {
                    backend.scale(&mut act.x, rows * self.config.n_embd, by)?;
                }
                if let Some(shown) = shown {
                    self.add_deep(backend, self.weights.part.layers().start + index, shown, &mut act.x)?;
                }
            }
            match logits {
                Some(logits) => self.output(backend, act, parts, logits),
                None => Ok(()),
            }
        };
        backend.step(is_decode, run).map_err(StepError::Broken)?;
        parts.iter_mut().for_each(|part| part.cache.commit(part.n));
        Ok(())
    }

    /// What can be refused before anything is written: tokens, room, memory. Then the rows enter. Gives what tokens beyond the vocabulary belong to.
    fn prepare(
        &self,
        backend: &B,
        pool: &Pool<B::Page>,
        parts: &mut [StepPart<'_, B::Page>],
        act: &mut Activations<B>,
        entry: Entry<'_>,
    ) -> Result<Vec<Arc<ExtraRows>>, ModelError> {
        let extra = self.check_tokens(entry)?;
        for part in parts.iter_mut() {
            part.cache.reserve(backend, pool, part.n)?;
        }
        for (rope, (on_device, angles)) in self.config.ropes.iter().zip(&mut act.angles) {
            angles.clear();
            for StepPart { cache, n, places, .. } in parts.iter() {
                match places {
                    Some(places) => rope.angles_at(cache.n_ctx(), places, angles),
                    None => rope.angles(cache.n_ctx(), cache.len(), *n, angles),
                }
            }
            backend.write(on_device, angles)?;
        }
        let n_bytes = self.place_bands(parts, &mut act.bands);
        if act.band.as_ref().map_or(0, Page::n_bytes) < n_bytes {
            act.band = Some(backend.page(n_bytes)?);
        }
        act.low.prepare(backend, &self.weights, parts)?;
        self.enter_model(backend, entry, &extra, act)?;
        Ok(extra)
    }

    /// Where the band of each layer's keys and values begins; gives the bytes of all of them.
    fn place_bands(&self, parts: &mut [StepPart<'_, B::Page>], bands: &mut Vec<usize>) -> usize {
        let n_kv = self.kv_layers().max().map_or(0, |last| last + 1);
        let mut n_bytes =
            |kv| for_parts(parts, kv, 0, |parts| parts.iter().map(KvPart::band_bytes).sum::<usize>());
        let mut end = (0..n_kv).map(&mut n_bytes).max().unwrap_or(0);
        bands.clear();
        for kv in 0..n_kv {
            let is_shared = self.kv_layers().filter(|&of| of == kv).count() > 1;
            bands.push(if is_shared { end } else { 0 });
            end += if is_shared { n_bytes(kv) } else { 0 };
        }
        end
    }

    /// Appends `rows` tokens (at most `max_rows`) with random keys and values: a context of any depth in little time,
    /// to measure speed at it. What the model then says means nothing.
    ///
    /// # Errors
    /// As [`Decoder::step`].
    pub fn append_random(
        &self,
        backend: &B,
        pool: &Pool<B::Page>,
        part: StepPart<'_, B::Page>,
        act: &mut Activations<B>,
        random: &mut Random,
    ) -> Result<(), StepError> {
        let rows = part.n;
        assert!(rows <= act.max_rows, "{rows} tokens in a step of at most {}", act.max_rows);
        let parts = &mut [part];
        self.prepare(backend, pool, parts, act, Entry::Residual(&[])).map_err(StepError::Refused)?;
        self.append_cuts(backend, parts, act, random).map_err(|error| StepError::Broken(error.into()))?;
        parts[0].cache.commit(rows);
        Ok(())
    }

    /// Appends to each layer keys and values cut from one buffer of random numbers, anywhere in it: to draw as many would take
    /// longer than a device takes to store them.
    fn append_cuts(
        &self,
        backend: &B,
        parts: &mut [StepPart<'_, B::Page>],
        act: &mut Activations<B>,
        random: &mut Random,
    ) -> Result<(), BackendError> {
        let rows = parts[0].n;
        let own = self.layers().iter().enumerate().filter(|(_, spec)| spec.state == LayerState::Own);
        let own: Vec<_> = own.filter_map(|(index, spec)| Some((self.kv_layer(index)?, spec))).collect();
        let most = rows * own.iter().map(|(_, spec)| spec.n_k().max(spec.n_v())).max().unwrap_or(0);
        let (mut numbers, mut drawn) = (backend.buffer(2 * most)?, vec![0.0; RANDOM_PERIOD.min(2 * most)]);
        random.fill_gaussian(&mut drawn, 1.0);
        let repeated: Vec<f32> = drawn.iter().copied().cycle().take(2 * most).collect();
        backend.write(&mut numbers, &repeated)?;
        for (kv, spec) in own {
            for (width, buffer) in [(spec.n_k(), &mut act.k), (spec.n_v(), &mut act.v)] {
                let start = (random.uniform() * most as f64) as usize;
                backend.copy(&numbers, start, buffer, 0, rows * width)?;
            }
            let (k, v, band) = (&act.k, &act.v, act.band.as_mut());
            for_parts(parts, kv, act.bands[kv], |parts| backend.kv_append(parts, k, v, band))?;
        }
        Ok(())
    }

    /// Lets the rows of each sequence meet what layer `index` keeps of those before, where it does.
    fn mix(
        &self,
        backend: &B,
        index: usize,
        parts: &mut [StepPart<'_, B::Page>],
        act: &mut Activations<B>,
        rows: usize,
    ) -> Result<(), ModelError> {
        let (layer, Kept { kv, state }) = (&self.weights.layers[index], self.places[index]);
        // What is kept beside attention meets the stream as attention does, before that has changed it.
        if let Some(weights) = &layer.recurrent {
            self.enter_state(backend, index, weights, parts, act, rows)?;
        }
        if let (Some(attention), Some(kv)) = (&layer.attention, kv) {
            self.attend(backend, (index, kv), attention, parts, act, rows)?;
        }
        match (&layer.recurrent, state) {
            (Some(weights), Some(state)) => {
                self.keep_state(backend, (index, state), weights, parts, act, rows)
            }
            _ => Ok(()),
        }
    }

    /// Attention of layer `index`, whose keys and values are number `kv`.
    fn attend(
        &self,
        backend: &B,
        (index, kv): (usize, usize),
        attention: &AnyAttention<B>,
        parts: &mut [StepPart<'_, B::Page>],
        act: &mut Activations<B>,
        rows: usize,
    ) -> Result<(), ModelError> {
        match attention {
            AnyAttention::Usual(weights) => self.attention(backend, (index, kv), weights, parts, act, rows),
            AnyAttention::Latent(weights) => {
                self.attend_latent(backend, (index, kv), weights, parts, act, rows)
            }
        }
    }

    /// `x += W_o attention(rope(W_q n), rope(W_k n), W_v n)`, `n = norm(x)`; norms and gates where the layer has them.
    fn attention(
        &self,
        backend: &B,
        (index, kv): (usize, usize),
        weights: &Attention<B>,
        parts: &mut [StepPart<'_, B::Page>],
        act: &mut Activations<B>,
        rows: usize,
    ) -> Result<(), ModelError> {
        let (layer, spec) = (&self.weights.layers[index], &self.layers()[index]);
        let (rope, heads) = (self.config.ropes[spec.rope].params, &spec.heads);
        let [angles, q_angles] = [spec.rope, spec.q_rope].map(|rope| &act.angles[rope].0);
        let input = self.enter(backend, spec.norms.kind, &layer.attn_norm, (&act.x, &mut act.spare), rows)?;
        let queries = Output { w: &weights.wq, bias: weights.bq.as_ref(), y: &mut act.q, accumulate: false };
        let q_heads = Heads { n: heads.n_heads, dim: heads.k_head_dim };
        let mut q_norm = self.norm(&weights.q_norm);
        let are_together = spec.norms.heads == HeadNorms::Together;
        let first_turned = spec.norms.heads == HeadNorms::EachTurned;
        let norm_heads = |x: &mut B::Buffer, norm: &mut Option<Norm<'_, B::Buffer>>, heads: Heads| {
            self.normalise(backend, (x, rows, heads), norm.take(), (rope, angles))
        };
        let norm_row = |x: &mut B::Buffer, norm: &mut Option<Norm<'_, B::Buffer>>, dim: usize| {
            norm_heads(x, norm, Heads { n: 1, dim })
        };
        let (params, first_band) = (spec.attend_params(), act.bands[kv]);
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
                    // No layer with gates makes its values so.
                    (None, _) => {
                        project(&mut [queries, keys])?;
                        backend.copy(&act.k, 0, &mut act.v, 0, rows * spec.n_v())?;
                    }
                }
                for (what, x, width) in [("keys", &act.k, spec.n_k()), ("values", &act.v, spec.n_v())] {
                    self.check_rows(backend, parts, index, (what, x, width), rows)?;
                }
                let k_heads = Heads { n: heads.n_kv_heads, dim: heads.k_head_dim };
                let mut k_norm = self.norm(k_norm);
                if are_together {
                    norm_row(&mut act.q, &mut q_norm, spec.n_q())?;
                    norm_row(&mut act.k, &mut k_norm, spec.n_k())?;
                }
                let v_heads = Heads { n: heads.n_kv_heads, dim: heads.v_head_dim };
                norm_heads(&mut act.v, &mut self.norm(v_norm), v_heads)?;
                let (q, k, v, band) = (&mut act.q, &mut act.k, &act.v, act.band.as_mut());
                if first_turned {
                    backend.rope(q, rows, q_heads, None, rope, q_angles)?;
                    backend.rope(k, rows, k_heads, None, rope, angles)?;
                    self.normalise(backend, (q, rows, q_heads), q_norm, (rope, angles))?;
                    self.normalise(backend, (k, rows, k_heads), k_norm, (rope, angles))?;
                    for_parts(parts, kv, first_band, |parts| backend.kv_append(parts, k, v, band))?;
                } else if spec.q_rope == spec.rope {
                    let rope = Rope { params: rope, angles, q_heads, k_heads, q_norm, k_norm };
                    for_parts(parts, kv, first_band, |parts| {
                        backend.rope_append(parts, &rope, q, k, v, band)
                    })?;
                } else {
                    backend.rope(q, rows, q_heads, q_norm, rope, q_angles)?;
                    backend.rope(k, rows, k_heads, k_norm, rope, angles)?;
                    for_parts(parts, kv, first_band, |parts| backend.kv_append(parts, k, v, band))?;
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
        for_parts(parts, kv, first_band, |parts| {
            let (sinks, band) = (weights.sinks.as_ref(), act.band.as_ref());
            backend.attend(&params, parts, &act.q, sinks, band, &mut act.attended)
        })?;
        if weights.gate.is_some() {
            backend.gate(&mut act.attended, rows * spec.n_out(), &act.gates, Gate::Sigmoid)?;
        }
        let (w, bias) = (&weights.wo, weights.bo.as_ref());
        let branch = Branch { of: &act.attended, w, low_rank: of_output, bias, norm: &layer.attn_after };
        self.add(backend, &mut act.x, branch, (&mut act.spare, &mut act.low), rows)
    }

    /// Refuses rows `[rows, width]` of what layer `index` keeps that are no numbers: the cache, which holds numbers only, would
    /// make some of them, and a state would be none from there on.
    fn check_rows(
        &self,
        backend: &B,
        parts: &[StepPart<'_, B::Page>],
        index: usize,
        (what, x, width): (&'static str, &B::Buffer, usize),
        rows: usize,
    ) -> Result<(), ModelError> {
        let Some(mut row) = backend.broken_row(x, rows, width)? else { return Ok(()) };
        let layer = self.weights.part.layers().start + index;
        for part in parts {
            if row < part.n {
                return Err(ModelError::RowNotFinite { what, layer, position: part.cache.len() + row });
            }
            row -= part.n;
        }
        Ok(())
    }

    /// `logits = W_out norm(x)` for the wanted rows, bounded where the model bounds them.
    fn output(
        &self,
        backend: &B,
        act: &mut Activations<B>,
        parts: &[StepPart<'_, B::Page>],
        logits: &mut B::Buffer,
    ) -> Result<(), ModelError> {
        let n_embd = self.config.n_embd;
        let (mut wanted, mut before) = (0, 0);
        for part in parts {
            let (first, n) = (before + part.want.first(part.n), part.want.count(part.n));
            backend.copy(&act.x, first * n_embd, &mut act.spare, wanted * n_embd, n * n_embd)?;
            (wanted, before) = (wanted + n, before + part.n);
        }
        if wanted == 0 {
            return Ok(());
        }
        let Weights { output, output_low_rank, embedding, output_norm, .. } = &self.weights;
        assert!(output_norm.is_some(), "logits come out where the model ends");
        let w = output.as_deref().or(embedding.as_deref()).expect("a model that ends has an output matrix");
        // The residual stream ends here.
        let kind = self.config.output_norm;
        let input = self.enter(backend, kind, output_norm, (&act.spare, &mut act.x), wanted)?;
        let product = Product { input, low_rank: output_low_rank.as_deref() };
        let logits_of = Output { w, bias: None, y: &mut *logits, accumulate: false };
        self.project(backend, product, &mut [logits_of], &mut act.low)?;
        if let Some(cap) = self.config.logit_soft_cap {
            backend.soft_cap(logits, wanted * self.n_vocab(), cap)?;
        }
        Ok(())
    }

    /// Copies what the `rows` rows of the last step have left into `out` `[rows, n_embd]`: what enters the next part of the model or, where it
    /// ends here, their [streams](Self::stream).
    ///
    /// # Errors
    /// When the device cannot be read.
    pub fn left(
        &self,
        backend: &B,
        act: &mut Activations<B>,
        rows: usize,
        out: &mut [f32],
    ) -> Result<(), ModelError> {
        match self.weights.output_norm {
            Some(_) => self.stream(backend, act, rows, out),
            None => Ok(backend.read(&act.x, 0, out)?),
        }
    }

    /// What enters a layer of `x`: normalised on the way, or in `spare` where products cannot do that.
    fn enter<'a>(
        &self,
        backend: &B,
        kind: NormKind,
        weight: &'a Option<B::Buffer>,
        (x, spare): (&'a B::Buffer, &'a mut B::Buffer),
        rows: usize,
    ) -> Result<Input<'a, B>, ModelError> {
        match (kind, self.norm(weight)) {
            (NormKind::Layer, Some(norm)) => {
                backend.layer_norm(x, rows, norm, spare)?;
                Ok(Input { x: spare, norm: None, first_row: 0, rows })
            }
            (_, norm) => Ok(Input { x, norm, first_row: 0, rows }),
        }
    }

    /// Normalises the heads of rows where they are: as RoPE does, which turns nothing here.
    fn normalise(
        &self,
        backend: &B,
        (x, rows, heads): (&mut B::Buffer, usize, Heads),
        norm: Option<Norm<'_, B::Buffer>>,
        (rope, angles): (RopeParams, &B::Buffer),
    ) -> Result<(), BackendError> {
        match norm {
            Some(norm) => backend.rope(x, rows, heads, Some(norm), RopeParams { n_rot: 0, ..rope }, angles),
            None => Ok(()),
        }
    }

    fn norm<'a>(&self, weight: &'a Option<B::Buffer>) -> Option<Norm<'a, B::Buffer>> {
        weight.as_ref().map(|weight| self.normed(weight))
    }

    fn normed<'a>(&self, weight: &'a B::Buffer) -> Norm<'a, B::Buffer> {
        Norm { weight, eps: self.config.norm_eps }
    }
}

/// A step that did not happen.
#[derive(Debug)]
pub enum StepError {
    /// Nothing has been changed.
    Refused(ModelError),
    /// Some layers may have written: the caches want [`Cache::undo_step`].
    Broken(ModelError),
}

/// Hands the parts of a step to `f` with the keys and values number `kv`, whose band begins at byte `first_band`.
fn for_parts<P: Page, T>(
    parts: &mut [StepPart<'_, P>],
    kv: usize,
    first_band: usize,
    f: impl FnOnce(&mut [KvPart<'_, P>]) -> T,
) -> T {
    let (mut first, mut band) = (0, first_band);
    let mut part = |part: &mut StepPart<'_, P>| -> (Rows, usize) {
        let at = (part.cache.rows(first, part.n), band);
        first += part.n;
        band += part.cache.part(kv, at.0, 0).band_bytes();
        at
    };
    match parts {
        // Decoding one sequence allocates nothing.
        [one] => {
            let (rows, band) = part(one);
            f(&mut [one.cache.part(kv, rows, band)])
        }
        parts => {
            let parts = parts.iter_mut().map(|one| {
                let (rows, band) = part(one);
                one.cache.part(kv, rows, band)
            });
            f(&mut parts.collect::<Vec<_>>())
        }
    }
}
