//! Activation buffers of a step.

use std::sync::Arc;

use kvant_backend::{Backend, BackendError, Matrix as _, StateHeads};

use super::gated_streams::GatedActivations;
use super::ngrams::NgramActivations;
use super::rwkv::RwkvActivations;
use super::shared_kv::PoolActivations;
use super::{Decoder, LoraScratch};
use crate::angle_table::AngleTable;
use crate::config::RecurrentMixer;
use crate::weights::{DraftEntry, FeedForward, Layer};
use crate::{LayerSpec, ModelError, ResidualStreams, SharedExpert};

/// The activations of a step. They belong to the device, not to a sequence; only a step with more
/// step tiles than any before it allocates memory.
///
/// Every buffer but the step tiles holds `max_rows` rows; a step uses the first of them.
pub struct Activations<B: Backend> {
    pub(super) max_rows: usize,
    /// Residual stream, `[rows, n_embd]`.
    pub(super) x: B::Buffer,
    /// Features that a draft head reads, `[rows, captured layers * n_embd]`.
    pub(super) captured: B::Buffer,
    /// In a draft head: features of its model, `[rows, features]`.
    pub(super) features: B::Buffer,
    /// Residual streams, of the model and as predicted or written, `[n_streams + 1, rows, n_embd]`,
    /// or with one more where they are gated; of streams that are attended to, the current one is
    /// written.
    pub(super) streams: B::Buffer,
    pub(super) predictions: B::Buffer,
    /// What their router makes of a row, `[rows, n_streams]`; or products of connected streams,
    /// `[rows, n_products]`.
    pub(super) modalities: B::Buffer,
    /// Coefficients of what a sublayer reads, `[rows, n_streams]`.
    pub(super) reads: B::Buffer,
    /// Their coefficients, `[rows, n_streams, n_streams + 1]`, or as many more.
    pub(super) coefs: B::Buffer,
    /// Gates of such streams.
    pub(super) gated: GatedActivations<B>,
    /// N-grams whose values are added to them.
    pub(super) ngrams: NgramActivations<B>,
    /// In a draft head: the normalized embedding and residual stream, `[rows, 2 n_embd]`. Of
    /// several residual streams the predicted first, `[rows, n_embd]`.
    pub(super) attention_in: B::Buffer,
    /// Queries, `[rows, n_heads * k_head_dim]`; or those that enter a state, as keys and values do.
    pub(super) q: B::Buffer,
    /// Keys, `[rows, n_kv_heads * k_head_dim]`.
    pub(super) k: B::Buffer,
    /// Values, `[rows, n_kv_heads * v_head_dim]`.
    pub(super) v: B::Buffer,
    /// Output of attention or of a recurrent mixer, `[rows, n_heads * v_head_dim]`.
    pub(super) attended: B::Buffer,
    /// MLA: low-rank input of the query projection, `[rows, q_rank]`.
    pub(super) q_low_rank: B::Buffer,
    /// MLA: query parts without RoPE, and later values, `[rows, n_heads * k_dim or v_dim]`. Shared
    /// KV: what the output projection makes of groups, `[rows, groups * rank]`.
    pub(super) q_without_rope: B::Buffer,
    /// MLA: query parts with RoPE, `[rows, n_heads * n_rot]`.
    pub(super) q_rope: B::Buffer,
    /// MLA: key part with RoPE, `[rows, n_rot]`.
    pub(super) k_rope: B::Buffer,
    /// Index: queries `[rows, n_heads * dim]`, the key before and after its norm `[rows, dim]`, and
    /// the weights of heads `[rows, n_heads]`, 1 where there are none.
    pub(super) index_q: B::Buffer,
    pub(super) index_k: [B::Buffer; 2],
    pub(super) index_heads: B::Buffer,
    /// Positions of the tokens that rows attend to, or numbers of blocks, `[rows, n_lists,
    /// n_used]`: those of the last layer that selected some.
    pub(super) selected: B::Buffer,
    /// What is pooled to keys of an index, and to those of attention.
    pub(super) pools: [PoolActivations<B>; 2],
    /// The experts of each row in leading layers with a table of them, `[rows, n_used]`.
    pub(super) chosen: Vec<B::Buffer>,
    /// Gated feed-forward activations, `[rows, n_ff]`.
    pub(super) hidden: B::Buffer,
    /// Router logits, `[rows, n_experts]`.
    pub(super) router: B::Buffer,
    /// Output of experts beside a feed-forward layer, before a norm or of the norm of attention,
    /// `[rows, n_embd]`, or in their latent space, `[rows, latent]`.
    pub(super) expert_output: B::Buffer,
    /// Latent input of the experts, `[rows, latent]`.
    pub(super) latent: B::Buffer,
    /// Gate logit of the shared expert, `[rows]`.
    pub(super) shared_gate: B::Buffer,
    /// Input of the convolution, `[rows, n_in of it]`.
    pub(super) entering: B::Buffer,
    /// Queries, keys and values after the convolution, `[rows, channels]`.
    pub(super) convolved: B::Buffer,
    /// Output gates of attention or a recurrent mixer, with the width of its output, and gates of a
    /// feed-forward layer with biases or adapters, `[rows, n_ff]`.
    pub(super) gates: B::Buffer,
    /// Time steps (decays) of the heads with a state, `[rows, n_steps]`.
    pub(super) steps: B::Buffer,
    /// Low-rank inputs of such steps and of gates, `[rows, rank]`.
    pub(super) state_low_rank: [B::Buffer; 2],
    /// Write strength (beta) of each such head, `[rows, n_v_heads]`.
    pub(super) writes: B::Buffer,
    /// Rows of RWKV-7.
    pub(super) rwkv: RwkvActivations<B>,
    /// Per-layer embeddings, `[rows, n]` for each layer that has them.
    pub(super) per_layer: Vec<B::Buffer>,
    /// Inputs of the per-layer embeddings, and their gates, `[rows, n]`; low-rank intermediates of
    /// learned residual layers.
    pub(super) narrow: B::Buffer,
    /// Row indices of the tokens in the per-layer embedding table.
    pub(super) rows_of_table: Vec<u32>,
    /// RoPE cosines and sines, `[rows, n_rot / 2, 2]`, on the device and on the host, of each of
    /// [`Config::ropes`].
    pub(super) angles: Vec<(B::Buffer, Vec<f32>)>,
    /// Those of positions met before, of each too.
    pub(super) angle_tables: Vec<AngleTable>,
    /// Normalized input of a sublayer whose GEMM cannot fuse the norm; a branch before its norm;
    /// and then the requested rows of `x`, contiguous, `[rows, n_embd]`.
    pub(super) spare: B::Buffer,
    /// Low-rank intermediates of adapters.
    pub(super) low: LoraScratch<B>,
    /// Step tiles: f16 tiles of this step that its older rows attend to and the tail no longer
    /// holds.
    pub(super) step_tiles: Option<B::Page>,
    /// Byte offsets of each KV layer's step tiles, `[KV layers]`: layers reuse the same range,
    /// except those that later layers read too.
    pub(super) step_tile_offsets: Vec<usize>,
}

/// Returns the heads with a state of a layer.
fn state_heads(layer: &LayerSpec) -> Option<StateHeads> {
    layer.recurrence.as_ref().and_then(RecurrentMixer::heads)
}

/// Returns the width of queries, keys and values that enter a layer's state separately.
fn separate_width(layer: &LayerSpec) -> usize {
    let of_wkv = layer.wkv.map_or(0, |heads| heads.n * heads.dim);
    layer.recurrence.map_or(of_wkv, |of| of.separate_width())
}

impl<B: Backend> Decoder<B> {
    /// Returns the width of the widest gates that any layer keeps in a buffer of their own.
    fn widest_gates(&self) -> usize {
        let of_layer = |(weights, spec): (&Arc<Layer<B>>, &LayerSpec)| {
            let of_state = state_heads(spec).map_or(0, |heads| heads.n_out());
            let is_apart = spec.sparsity.is_some() || weights.ffn.as_ref().is_some_and(FeedForward::is_apart);
            spec.n_gates().max(of_state).max(if is_apart { spec.n_ff } else { 0 })
        };
        self.weights.layers.iter().zip(self.layers()).map(of_layer).max().unwrap_or(0)
    }

    /// Allocates activations for steps of up to `max_rows` rows.
    ///
    /// # Errors
    ///
    /// When the device is out of memory.
    pub fn activations(&self, backend: &B, max_rows: usize) -> Result<Activations<B>, ModelError> {
        let c = &self.config;
        let buffer = |cols: usize| backend.buffer(max_rows * cols);
        let angles = |n_rot: usize| Ok((buffer(n_rot)?, Vec::with_capacity(max_rows * n_rot)));
        let widest = |cols: fn(&LayerSpec) -> usize| buffer(c.layers.iter().map(cols).max().unwrap_or(0));
        let given = self.weights.per_layer.as_ref().map_or(0, |of| of.projections.len());
        let n_given = c.per_layer_embedding_size.unwrap_or(0);
        let shares =
            |how| c.layers.iter().any(|layer| layer.experts.is_some_and(|experts| experts.shared == how));
        let has_own_output = shares(SharedExpert::Beside)
            || c.layers
                .iter()
                .any(|layer| layer.experts.is_some() && (layer.norms.after || layer.stores_norm()));
        let latent = c.layers.iter().filter_map(|layer| layer.experts?.latent).max().unwrap_or(0);
        let state_rank = || {
            widest(|layer| {
                state_heads(layer).filter(|_| separate_width(layer) > 0).map_or(0, |heads| heads.k_dim)
            })
        };
        let index_key = || widest(|layer| layer.index.map_or(0, |of| of.dim));
        let pools = || c.layers.iter().filter_map(LayerSpec::pooled_keys);
        let index_pools = c.layers.iter().filter_map(LayerSpec::index_pool);
        let tables = c.layers.iter().map_while(|layer| layer.experts.filter(|of| of.has_table));
        let n_features = match &self.weights.entry {
            Some(DraftEntry::Features(entry)) => entry.fc.n_in(),
            Some(DraftEntry::Block(entry)) => entry.fc.n_in(),
            _ => 0,
        };
        let mut index_heads = widest(|layer| layer.index.map_or(0, |of| of.n_heads))?;
        // Heads of an index of blocks have no weights of their own.
        let n_alike =
            |layer: &LayerSpec| layer.index.filter(|of| of.pool().is_some()).map_or(0, |of| of.n_heads);
        let n_alike = c.layers.iter().map(n_alike).max().unwrap_or(0);
        backend.write(&mut index_heads, &vec![1.0; max_rows * n_alike])?;
        let n_streams = if c.streams.n() > 1 { c.streams.n() } else { 0 };
        let of_streams = |n: usize| buffer(if n_streams > 0 { n * c.n_embd } else { 0 });
        let n_combined = match c.streams {
            ResidualStreams::Gated { n, .. } => n + 2,
            _ => n_streams + 1,
        };
        let n_written = if matches!(c.streams, ResidualStreams::Attended { .. }) { 1 } else { n_combined };
        let n_laurel =
            self.weights.layers.iter().filter_map(|layer| Some(layer.altup.as_ref()?.laurel[0].n_out()));
        let n_narrow = n_laurel.max().unwrap_or(0).max(n_given);
        Ok(Activations {
            max_rows,
            x: buffer(c.n_embd)?,
            captured: buffer(self.captures.len() * c.n_embd)?,
            features: buffer(n_features)?,
            streams: of_streams(n_combined)?,
            predictions: of_streams(n_written)?,
            modalities: buffer(match c.streams {
                ResidualStreams::Connected { n, mixing, .. } => mixing.n_products(n, true),
                _ => n_streams,
            })?,
            reads: buffer(n_streams)?,
            coefs: buffer(n_streams * n_combined)?,
            gated: GatedActivations::new(c.streams, c.n_embd, buffer)?,
            ngrams: NgramActivations::new(c.ngrams.as_ref(), buffer)?,
            attention_in: buffer(match c.family.reads_tokens || n_streams > 0 {
                true => c.n_attention_in(),
                false => 0,
            })?,
            q: widest(|layer| layer.n_q().max(separate_width(layer)))?,
            k: widest(|layer| layer.n_k().max(separate_width(layer)))?,
            v: widest(|layer| layer.n_v().max(separate_width(layer)))?,
            attended: widest(|layer| {
                let of_state = layer.recurrence.map_or(0, |of| of.n_out());
                layer.n_out().max(of_state).max(layer.wkv.map_or(0, |heads| heads.n * heads.dim))
            })?,
            q_low_rank: widest(|layer| {
                let of_shared = layer.shared_kv.map_or(0, |of| of.q_rank);
                layer.latent.and_then(|of| of.q_rank).unwrap_or(of_shared)
            })?,
            q_without_rope: widest(|layer| {
                let of_shared = layer.shared_kv.map_or(0, |of| of.groups.n * of.groups.dim);
                layer.latent.map_or(of_shared, |of| layer.heads.n_heads * of.k_dim.max(of.v_dim))
            })?,
            q_rope: widest(|layer| layer.latent.map_or(0, |of| layer.heads.n_heads * of.n_rot))?,
            k_rope: widest(|layer| layer.latent.map_or(0, |of| of.n_rot))?,
            index_q: widest(|layer| layer.index.map_or(0, |of| of.n_heads * of.dim))?,
            index_k: [index_key()?, index_key()?],
            index_heads,
            selected: widest(|layer| layer.index.map_or(0, |of| of.n_lists() * of.n_used))?,
            pools: [
                PoolActivations::new(index_pools, buffer)?,
                PoolActivations::new(pools().map(|keys| keys.pool), buffer)?,
            ],
            chosen: tables.map(|of| buffer(of.routing.n_used)).collect::<Result<_, BackendError>>()?,
            hidden: widest(|layer| layer.n_ff)?,
            router: widest(|layer| layer.experts.map_or(0, |experts| experts.n))?,
            expert_output: buffer(if has_own_output { c.n_embd } else { latent })?,
            latent: buffer(latent)?,
            shared_gate: buffer(usize::from(shares(SharedExpert::Gated)))?,
            entering: widest(|layer| layer.recurrence.map_or(0, |of| of.conv().n_in()))?,
            convolved: widest(|layer| state_heads(layer).map_or(0, |heads| heads.n_qkv()))?,
            gates: buffer(self.widest_gates())?,
            steps: widest(|layer| layer.recurrence.map_or(0, |of| of.n_steps()))?,
            state_low_rank: [state_rank()?, state_rank()?],
            writes: widest(|layer| state_heads(layer).map_or(0, |heads| heads.n_v_heads))?,
            rwkv: RwkvActivations::new(&c.layers, self.widest_rank(), buffer)?,
            per_layer: (0..given).map(|_| buffer(n_given)).collect::<Result<_, BackendError>>()?,
            narrow: buffer(n_narrow)?,
            rows_of_table: Vec::with_capacity(if given > 0 { max_rows } else { 0 }),
            angles: c
                .ropes
                .iter()
                .map(|rope| angles(rope.params.n_rot))
                .collect::<Result<_, BackendError>>()?,
            angle_tables: c.ropes.iter().map(|_| AngleTable::default()).collect(),
            spare: buffer(c.n_embd)?,
            low: LoraScratch::new(backend, &self.weights.ranks, max_rows)?,
            step_tiles: None,
            step_tile_offsets: Vec::new(),
        })
    }
}
