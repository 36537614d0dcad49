//! The decoder that Llama, Mistral, Qwen2 and Qwen3 share, from tokens to logits.
//!
//! Pre-norm transformer with RMS norms, rotary embeddings, grouped-query attention and a SiLU-gated feed-forward
//! layer. Families differ in data only: biases, per-head norms, pair order, tied output.

use kvant_backend::{AttendParams, Backend, Candidate, Heads, Input, KvLayer, Norm, Output, Rope};
use kvant_codec::random::Random;
use kvant_kv::{Cache, KvShape};

use crate::weights::{Layer, Weights};
use crate::{Config, ModelError};

/// A model, or a part of one, on a device.
pub struct Decoder<B: Backend> {
    config: Config,
    weights: Weights<B>,
}

/// The activations of one step. Made once per session; a step allocates nothing.
///
/// Every buffer has room for `max_rows` rows; a step uses the first of them.
pub struct Activations<B: Backend> {
    max_rows: usize,
    /// Residual stream, `[rows, n_embd]`.
    x: B::Buffer,
    /// Queries, `[rows, n_heads * k_head_dim]`.
    q: B::Buffer,
    /// Keys, `[rows, n_kv_heads * k_head_dim]`.
    k: B::Buffer,
    /// Values, `[rows, n_kv_heads * v_head_dim]`.
    v: B::Buffer,
    /// Attention output, `[rows, n_heads * v_head_dim]`.
    attended: B::Buffer,
    /// Gated feed-forward activations, `[rows, n_ff]`.
    hidden: B::Buffer,
    /// RoPE cosines and sines, `[rows, n_rot / 2, 2]`, and the same on the host.
    angles: (B::Buffer, Vec<f32>),
    /// Logits of the wanted rows, `[logit_rows, n_vocab]`, and how many rows it has room for.
    logits: (B::Buffer, usize),
}

/// What enters a step.
#[derive(Debug, Clone, Copy)]
pub enum Entry<'a> {
    /// Tokens, where the model begins.
    Tokens(&'a [u32]),
    /// The residual stream that the layers before have left, `[rows, n_embd]`.
    Residual(&'a [f32]),
}

impl Entry<'_> {
    /// Tokens that enter, in a model of width `n_embd`.
    pub fn rows(&self, n_embd: usize) -> usize {
        match self {
            Self::Tokens(tokens) => tokens.len(),
            Self::Residual(x) => x.len() / n_embd,
        }
    }
}

/// Which rows of a step get logits.
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
    /// The first wanted row of a step with `rows` rows (`rows` when there is none).
    fn first(self, rows: usize) -> usize {
        match self {
            Self::Nothing => rows,
            Self::Last => rows - 1,
            Self::From(row) => row.min(rows),
        }
    }
}

impl<B: Backend> Decoder<B> {
    /// A decoder from its parts.
    pub fn new(config: Config, weights: Weights<B>) -> Self {
        Self { config, weights }
    }

    /// The hyper-parameters.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The KV heads of the layers that are here.
    pub fn kv_shape(&self) -> KvShape {
        KvShape { n_layers: self.weights.layers.len(), ..self.config.kv_shape() }
    }

    /// Size of the vocabulary.
    pub fn n_vocab(&self) -> usize {
        self.weights.n_vocab
    }

    /// Bytes of weights in the file's types.
    pub fn weight_bytes(&self) -> usize {
        self.weights.n_bytes
    }

    /// Bytes of weights that one decoded token reads: all but an embedding that is only looked up.
    pub fn weight_bytes_per_token(&self) -> usize {
        self.weights.n_bytes - self.weights.lookup_bytes
    }

    /// Activations for steps of up to `max_rows` tokens.
    ///
    /// # Errors
    /// When the device has no memory left.
    pub fn activations(&self, backend: &B, max_rows: usize) -> Result<Activations<B>, ModelError> {
        let c = &self.config;
        let buffer = |cols: usize| backend.buffer(max_rows * cols);
        Ok(Activations {
            max_rows,
            x: buffer(c.n_embd)?,
            q: buffer(c.n_heads * c.k_head_dim)?,
            k: buffer(c.n_kv_heads * c.k_head_dim)?,
            v: buffer(c.n_kv_heads * c.v_head_dim)?,
            attended: buffer(c.n_heads * c.v_head_dim)?,
            hidden: buffer(c.n_ff)?,
            angles: (buffer(c.rope.params.n_rot)?, Vec::with_capacity(max_rows * c.rope.params.n_rot)),
            logits: (backend.buffer(self.n_vocab())?, 1),
        })
    }

    /// Runs what enters (at most `max_rows` rows, at least one) after what `cache` holds, and appends it there.
    ///
    /// Logits of the wanted rows can then be read with [`Decoder::logits`]; where the last layer is elsewhere, none
    /// can be wanted, and [`Decoder::residual`] is what enters there.
    ///
    /// # Errors
    /// A token out of range, a full context, or a device error. After an error the cache may hold some of the new
    /// tokens in some layers; truncate it to its former length before going on.
    ///
    /// # Panics
    /// When tokens enter and the first layer is elsewhere, or logits are wanted and the last one is.
    pub fn step(
        &self,
        backend: &B,
        cache: &mut Cache<B::Page>,
        act: &mut Activations<B>,
        entry: Entry<'_>,
        want: Want,
    ) -> Result<(), ModelError> {
        self.step_together(backend, &mut [cache], act, entry, want)
    }

    /// [`Decoder::step`] of several sequences in one pass over the weights. As many rows enter for each, those of the
    /// first sequence first.
    ///
    /// # Errors
    /// As [`Decoder::step`].
    ///
    /// # Panics
    /// As [`Decoder::step`], and when the rows cannot be shared out evenly.
    pub fn step_together(
        &self,
        backend: &B,
        caches: &mut [&mut Cache<B::Page>],
        act: &mut Activations<B>,
        entry: Entry<'_>,
        want: Want,
    ) -> Result<(), ModelError> {
        let rows = entry.rows(self.config.n_embd);
        assert!(0 < rows && rows <= act.max_rows, "{rows} tokens in a step of at most {}", act.max_rows);
        assert!(rows.is_multiple_of(caches.len()), "{rows} rows for {} sequences", caches.len());
        let each = rows / caches.len();
        self.check_tokens(entry)?;
        act.angles.1.clear();
        for cache in caches.iter_mut() {
            cache.reserve(backend, each)?;
            self.config.rope.angles(cache.len(), each, &mut act.angles.1);
        }
        backend.write(&mut act.angles.0, &act.angles.1)?;
        match entry {
            Entry::Tokens(tokens) => {
                let embedding = self.weights.embedding.as_ref().expect("tokens enter where the model begins");
                backend.embed(embedding, tokens, &mut act.x)?;
            }
            Entry::Residual(x) => backend.write(&mut act.x, x)?,
        }
        backend.step(rows, || {
            for (index, layer) in self.weights.layers.iter().enumerate() {
                self.attention(backend, layer, caches, index, act, each)?;
                self.feed_forward(backend, layer, act, rows)?;
            }
            self.output(backend, act, rows, want)
        })
    }

    /// Appends `rows` tokens (at most `max_rows`) with random keys and values: a context of any depth in little time,
    /// to measure speed at it. What the model then says means nothing.
    ///
    /// # Errors
    /// A full context, or a device error.
    pub fn append_random(
        &self,
        backend: &B,
        cache: &mut Cache<B::Page>,
        act: &mut Activations<B>,
        rows: usize,
        random: &mut Random,
    ) -> Result<(), ModelError> {
        assert!(rows <= act.max_rows, "{rows} tokens in a step of at most {}", act.max_rows);
        cache.reserve(backend, rows)?;
        let c = &self.config;
        let mut k = vec![0.0; rows * c.n_kv_heads * c.k_head_dim];
        let mut v = vec![0.0; rows * c.n_kv_heads * c.v_head_dim];
        for index in 0..self.weights.layers.len() {
            random.fill_gaussian(&mut k, 1.0);
            random.fill_gaussian(&mut v, 1.0);
            backend.write(&mut act.k, &k)?;
            backend.write(&mut act.v, &v)?;
            backend.kv_append(cache.layer_mut(index), &act.k, &act.v, 0..rows)?;
        }
        Ok(())
    }

    /// `x += W_o attention(rope(W_q n), rope(W_k n), W_v n)`, `n = norm(x)`.
    fn attention(
        &self,
        backend: &B,
        layer: &Layer<B>,
        caches: &mut [&mut Cache<B::Page>],
        index: usize,
        act: &mut Activations<B>,
        each: usize,
    ) -> Result<(), ModelError> {
        let (c, rows) = (&self.config, each * caches.len());
        backend.project(
            Input { x: &act.x, norm: Some(self.norm(&layer.attn_norm)), first_row: 0, rows },
            &mut [
                Output { w: &layer.wq, bias: layer.bq.as_ref(), y: &mut act.q, accumulate: false },
                Output { w: &layer.wk, bias: layer.bk.as_ref(), y: &mut act.k, accumulate: false },
                Output { w: &layer.wv, bias: layer.bv.as_ref(), y: &mut act.v, accumulate: false },
            ],
        )?;
        let rope = Rope {
            params: c.rope.params,
            angles: &act.angles.0,
            q_heads: Heads { n: c.n_heads, dim: c.k_head_dim },
            k_heads: Heads { n: c.n_kv_heads, dim: c.k_head_dim },
            q_norm: layer.q_norm.as_ref().map(|weight| self.norm(weight)),
            k_norm: layer.k_norm.as_ref().map(|weight| self.norm(weight)),
        };
        for (first_row, cache) in (0..rows).step_by(each).zip(caches.iter_mut()) {
            let rows = first_row..first_row + each;
            backend.rope_append(cache.layer_mut(index), &rope, &mut act.q, &mut act.k, &act.v, rows)?;
        }
        let part = |(first_row, layer): (usize, &KvLayer<B::Page>)| AttendParams {
            n_heads: c.n_heads,
            n_kv_heads: c.n_kv_heads,
            k_head_dim: c.k_head_dim,
            v_head_dim: c.v_head_dim,
            scale: 1.0 / (c.k_head_dim as f32).sqrt(),
            first_row,
            start: layer.len() - each,
            rows: each,
        };
        match caches {
            // Decoding one sequence allocates nothing.
            [cache] => {
                let layer = cache.layer(index);
                backend.attend(&part((0, layer)), &act.q, layer, &mut act.attended)?;
            }
            caches => {
                let layers = caches.iter().map(|cache| cache.layer(index));
                let parts =
                    (0..rows).step_by(each).zip(layers).map(|(row, layer)| (part((row, layer)), layer));
                backend.attend_together(&parts.collect::<Vec<_>>(), &act.q, &mut act.attended)?;
            }
        }
        backend.project(
            Input { x: &act.attended, norm: None, first_row: 0, rows },
            &mut [Output { w: &layer.wo, bias: layer.bo.as_ref(), y: &mut act.x, accumulate: true }],
        )?;
        Ok(())
    }

    /// `x += W_down (silu(W_gate n) * (W_up n))`, `n = norm(x)`.
    fn feed_forward(
        &self,
        backend: &B,
        layer: &Layer<B>,
        act: &mut Activations<B>,
        rows: usize,
    ) -> Result<(), ModelError> {
        let input = Input { x: &act.x, norm: Some(self.norm(&layer.ffn_norm)), first_row: 0, rows };
        backend.gated_ffn(input, &layer.gate, &layer.up, &mut act.hidden)?;
        backend.project(
            Input { x: &act.hidden, norm: None, first_row: 0, rows },
            &mut [Output { w: &layer.down, bias: None, y: &mut act.x, accumulate: true }],
        )?;
        Ok(())
    }

    /// `logits = W_out norm(x)` for the wanted rows.
    fn output(
        &self,
        backend: &B,
        act: &mut Activations<B>,
        rows: usize,
        want: Want,
    ) -> Result<(), ModelError> {
        let first_row = want.first(rows);
        let wanted = rows - first_row;
        if wanted == 0 {
            return Ok(());
        }
        if wanted > act.logits.1 {
            act.logits = (backend.buffer(wanted * self.n_vocab())?, wanted);
        }
        let Weights { output, embedding, output_norm, .. } = &self.weights;
        let norm = output_norm.as_ref().expect("logits come out where the model ends");
        let w = output.as_ref().or(embedding.as_ref()).expect("a model that ends has an output matrix");
        backend.project(
            Input { x: &act.x, norm: Some(self.norm(norm)), first_row, rows: wanted },
            &mut [Output { w, bias: None, y: &mut act.logits.0, accumulate: false }],
        )?;
        Ok(())
    }

    /// Copies the logits of the `row`-th wanted row of the last step into `out` `[n_vocab]`.
    ///
    /// # Errors
    /// When `out` has another length or the device cannot be read.
    pub fn logits(
        &self,
        backend: &B,
        act: &Activations<B>,
        row: usize,
        out: &mut [f32],
    ) -> Result<(), ModelError> {
        kvant_backend::BackendError::check("logits", "length of the output", self.n_vocab(), out.len())?;
        Ok(backend.read(&act.logits.0, row * self.n_vocab(), out)?)
    }

    /// Makes the logits of the `row`-th wanted row of the last step of `from` the first ones of `to`.
    ///
    /// # Errors
    /// When the device refuses.
    pub fn copy_logits(
        &self,
        backend: &B,
        from: &Activations<B>,
        row: usize,
        to: &mut Activations<B>,
    ) -> Result<(), ModelError> {
        let n_vocab = self.n_vocab();
        Ok(backend.copy(&from.logits.0, row * n_vocab, &mut to.logits.0, n_vocab)?)
    }

    /// The `k` likeliest tokens after the `row`-th wanted row of the last step into `out`.
    ///
    /// # Errors
    /// When the device cannot be read.
    pub fn top_k(
        &self,
        backend: &B,
        act: &Activations<B>,
        row: usize,
        k: usize,
        out: &mut Vec<Candidate>,
    ) -> Result<(), ModelError> {
        let n_vocab = self.n_vocab();
        Ok(backend.top_k(&act.logits.0, row * n_vocab, n_vocab, k, out)?)
    }

    /// Copies the residual stream that the last step left into `out` `[rows, n_embd]`.
    ///
    /// # Errors
    /// When the device cannot be read.
    pub fn residual(&self, backend: &B, act: &Activations<B>, out: &mut [f32]) -> Result<(), ModelError> {
        Ok(backend.read(&act.x, 0, out)?)
    }

    fn check_tokens(&self, entry: Entry<'_>) -> Result<(), ModelError> {
        let (Entry::Tokens(tokens), n_vocab) = (entry, self.n_vocab()) else { return Ok(()) };
        match tokens.iter().find(|&&token| token as usize >= n_vocab) {
            Some(&token) => Err(ModelError::Token { token, n_vocab }),
            None => Ok(()),
        }
    }

    fn norm<'a>(&self, weight: &'a B::Buffer) -> Norm<'a, B::Buffer> {
        Norm { weight, eps: self.config.rms_eps }
    }
}
