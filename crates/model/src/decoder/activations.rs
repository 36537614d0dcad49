//! What a step works with.

use kvant_backend::{Backend, BackendError, StateHeads};

use super::{Decoder, Low};
use crate::config::Recurrence;
use crate::weights::{FeedForward, Layer};
use crate::{LayerSpec, ModelError, SharedExpert};

/// The activations of a step. They belong to the device, not to a sequence; a step allocates nothing.
///
/// Every buffer has room for `max_rows` rows; a step uses the first of them.
pub struct Activations<B: Backend> {
    pub(super) max_rows: usize,
    /// Residual stream, `[rows, n_embd]`.
    pub(super) x: B::Buffer,
    /// Queries, `[rows, n_heads * k_head_dim]`.
    pub(super) q: B::Buffer,
    /// Keys, `[rows, n_kv_heads * k_head_dim]`.
    pub(super) k: B::Buffer,
    /// Values, `[rows, n_kv_heads * v_head_dim]`.
    pub(super) v: B::Buffer,
    /// What attention or a state gives, `[rows, n_heads * v_head_dim]`.
    pub(super) attended: B::Buffer,
    /// Of latent attention: what queries are made of, `[rows, q_rank]`.
    pub(super) of_queries: B::Buffer,
    /// The parts of queries that are not turned, and then values, `[rows, n_heads * k_dim or v_dim]`.
    pub(super) plain: B::Buffer,
    /// The parts of queries that are turned, `[rows, n_heads * n_rot]`.
    pub(super) turned: B::Buffer,
    /// The part of a key that is, `[rows, n_rot]`.
    pub(super) turned_key: B::Buffer,
    /// Gated feed-forward activations, `[rows, n_ff]`.
    pub(super) hidden: B::Buffer,
    /// How much each expert is wanted, `[rows, n_experts]`.
    pub(super) router: B::Buffer,
    /// What experts give that stand beside a feed-forward layer, `[rows, n_embd]`, or see less of rows, `[rows, latent]`.
    pub(super) from_experts: B::Buffer,
    /// What those see, `[rows, latent]`.
    pub(super) latent: B::Buffer,
    /// How much the expert is wanted that all rows share, `[rows]`.
    pub(super) shared_gate: B::Buffer,
    /// What enters a convolution, `[rows, n_in of it]`.
    pub(super) entering: B::Buffer,
    /// Queries, keys and values that a convolution gives, `[rows, channels]`.
    pub(super) convolved: B::Buffer,
    /// Gates of what attention or a state gives, as wide as that, and those of a feed-forward layer with biases or
    /// adapters, `[rows, n_ff]`.
    pub(super) gates: B::Buffer,
    /// How long a step is for each head that keeps a state, `[rows, n_v_heads]`.
    pub(super) steps: B::Buffer,
    /// How much of a value it writes there, `[rows, n_v_heads]`.
    pub(super) writes: B::Buffer,
    /// What each layer is given of each token, `[rows, n]` for each of them that is given something.
    pub(super) per_layer: Vec<B::Buffer>,
    /// What that is made of, and gates of it, `[rows, n]`.
    pub(super) narrow: B::Buffer,
    /// Where the parts of tokens lie in the table of a layer.
    pub(super) rows_of_table: Vec<u32>,
    /// RoPE cosines and sines, `[rows, n_rot / 2, 2]`, and the same on the host, of each of [`Config::ropes`].
    pub(super) angles: Vec<(B::Buffer, Vec<f32>)>,
    /// What enters a layer, normalised, where no product does that on the way; a branch before its norm; and then the rows of `x`
    /// that are wanted, side by side, `[rows, n_embd]`.
    pub(super) spare: B::Buffer,
    /// What adapters make of an input on the way to what they add.
    pub(super) low: Low<B>,
    /// f16 tiles of the step that older rows see and the tail no longer holds.
    pub(super) band: Option<B::Page>,
    /// Where those of each layer's keys and values begin, in bytes, `[layers that keep some]`: all in one place, but for those that
    /// later layers meet too.
    pub(super) bands: Vec<usize>,
}

/// The heads of a layer that keep a state.
fn state_heads(layer: &LayerSpec) -> Option<StateHeads> {
    layer.recurrence.as_ref().and_then(Recurrence::heads)
}

impl<B: Backend> Decoder<B> {
    /// Values of the gates of a row that stand in a buffer of their own.
    fn widest_gates(&self) -> usize {
        let of_layer = |(weights, spec): (&Layer<B>, &LayerSpec)| {
            let of_state = state_heads(spec).map_or(0, |heads| heads.n_out());
            let is_apart = weights.ffn.as_ref().is_some_and(FeedForward::is_apart);
            let of_attention = if spec.gated { spec.n_out() } else { 0 };
            of_attention.max(of_state).max(if is_apart { spec.n_ff } else { 0 })
        };
        self.weights.layers.iter().zip(self.layers()).map(of_layer).max().unwrap_or(0)
    }

    /// Activations for steps of up to `max_rows` rows.
    ///
    /// # Errors
    /// When the device has no memory left.
    pub fn activations(&self, backend: &B, max_rows: usize) -> Result<Activations<B>, ModelError> {
        let c = &self.config;
        let buffer = |cols: usize| backend.buffer(max_rows * cols);
        let angles = |n_rot: usize| Ok((buffer(n_rot)?, Vec::with_capacity(max_rows * n_rot)));
        let widest = |cols: fn(&LayerSpec) -> usize| buffer(c.layers.iter().map(cols).max().unwrap_or(0));
        let given = self.weights.per_layer.as_ref().map_or(0, |of| of.projections.len());
        let n_given = c.n_per_layer.unwrap_or(0);
        let shares =
            |how| c.layers.iter().any(|layer| layer.experts.is_some_and(|experts| experts.shared == how));
        let latent = c.layers.iter().filter_map(|layer| layer.experts?.latent).max().unwrap_or(0);
        let of_heads = || widest(|layer| state_heads(layer).map_or(0, |heads| heads.n_v_heads));
        Ok(Activations {
            max_rows,
            x: buffer(c.n_embd)?,
            q: widest(LayerSpec::n_q)?,
            k: widest(LayerSpec::n_k)?,
            v: widest(LayerSpec::n_v)?,
            attended: widest(|layer| layer.n_out().max(layer.recurrence.map_or(0, |of| of.n_out())))?,
            of_queries: widest(|layer| layer.latent.and_then(|of| of.q_rank).unwrap_or(0))?,
            plain: widest(|layer| layer.latent.map_or(0, |of| layer.heads.n_heads * of.k_dim.max(of.v_dim)))?,
            turned: widest(|layer| layer.latent.map_or(0, |of| layer.heads.n_heads * of.n_rot))?,
            turned_key: widest(|layer| layer.latent.map_or(0, |of| of.n_rot))?,
            hidden: widest(|layer| layer.n_ff)?,
            router: widest(|layer| layer.experts.map_or(0, |experts| experts.n))?,
            from_experts: buffer(if shares(SharedExpert::Beside) { c.n_embd } else { latent })?,
            latent: buffer(latent)?,
            shared_gate: buffer(usize::from(shares(SharedExpert::Gated)))?,
            entering: widest(|layer| layer.recurrence.map_or(0, |of| of.conv().n_in()))?,
            convolved: widest(|layer| state_heads(layer).map_or(0, |heads| heads.n_qkv()))?,
            gates: buffer(self.widest_gates())?,
            steps: of_heads()?,
            writes: of_heads()?,
            per_layer: (0..given).map(|_| buffer(n_given)).collect::<Result<_, BackendError>>()?,
            narrow: buffer(n_given)?,
            rows_of_table: Vec::with_capacity(if given > 0 { max_rows } else { 0 }),
            angles: c
                .ropes
                .iter()
                .map(|rope| angles(rope.params.n_rot))
                .collect::<Result<_, BackendError>>()?,
            spare: buffer(c.n_embd)?,
            low: Low::new(backend, &self.weights.ranks, max_rows)?,
            band: None,
            bands: Vec::new(),
        })
    }
}
