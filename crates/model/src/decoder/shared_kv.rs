//! Attention with one shared KV head and pooled keys; [`SharedKv`] has the equations.

use kvant_backend::{
    Backend, Heads, Input, Page, PooledBatchEntry, PooledKeys, SelectedKeys, Selection, TokenPool,
};

use super::batch_entries::{pooled_entries, pooled_pairs, state_entries};
use super::mla::output;
use super::{
    Activations, BatchSequence, Branch, Decoder, Product, Residual, StepContext, StepRows, kv_entries,
};
use crate::weights::{PooledKeyWeights, SharedKvAttention};
use crate::{ModelError, PooledKeySpec, SharedKv};

/// What a pool reads and makes.
pub(super) struct PoolActivations<B: Backend> {
    /// Values to pool and their gates, `[rows, n_in]`.
    pub(super) values: B::Buffer,
    pub(super) gates: B::Buffer,
    /// Pooled keys, `[completed keys, width]`.
    pub(super) pooled: B::Buffer,
}

impl<B: Backend> PoolActivations<B> {
    /// Allocates buffers for the widest of some pools.
    pub(super) fn new(
        pools: impl Iterator<Item = TokenPool>,
        buffer: impl Fn(usize) -> Result<B::Buffer, kvant_backend::BackendError>,
    ) -> Result<Self, kvant_backend::BackendError> {
        let (n_in, width) =
            pools.fold((0, 0), |(n_in, width), pool| (n_in.max(pool.n_in()), width.max(pool.width)));
        Ok(Self { values: buffer(n_in)?, gates: buffer(n_in)?, pooled: buffer(width)? })
    }
}

/// The pooled keys of attention, or those of its index, which may be the only ones.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum KeysOf {
    Index,
    IndexAlone,
    Attention,
}

impl KeysOf {
    /// Returns these keys of a sequence.
    pub(super) fn entry<'a, P: Page>(
        self,
        all: &'a mut PooledBatchEntry<'_, P>,
    ) -> Option<PooledBatchEntry<'a, P>> {
        match self {
            Self::Index => all.index(),
            Self::IndexAlone | Self::Attention => {
                let (tokens, stride) = (all.tokens, all.stride);
                Some(PooledBatchEntry { tokens, stride, keys: all.own() })
            }
        }
    }
}

/// A pool of a layer, and where its results belong.
pub(super) struct PoolOf<'a, B: Backend> {
    pub(super) keys: KeysOf,
    pub(super) pool: TokenPool,
    /// Bias of the gates.
    pub(super) bias: &'a B::Buffer,
    /// Norm of the pooled keys.
    pub(super) norm: &'a B::Buffer,
    /// Index of the rotary embedding of its keys.
    pub(super) rope: usize,
}

impl<B: Backend> Decoder<B> {
    /// Computes attention of layer `index`, whose keys have the index `kv`.
    pub(super) fn attend_shared_kv(
        &self,
        step: &mut StepContext<'_, '_, B>,
        index: usize,
        kv: usize,
        weights: &SharedKvAttention<B>,
    ) -> Result<(), ModelError> {
        let (layer, spec) = (&self.weights.layers[index], &self.layers()[index]);
        let SharedKv { rope_back, keys, .. } = spec.shared_kv.expect("a layer of shared KV");
        self.project_shared_kv(step, index, weights)?;
        let (backend, act, rows) = (step.backend, &mut *step.act, step.rows);
        let of_keys = StepRows { what: "keys", x: &act.k, width: spec.n_k(), n: rows };
        self.check_rows(backend, step.parts, index, of_keys)?;
        let entries = &mut kv_entries(step.parts, kv, act.step_tile_offsets[kv]);
        backend.kv_append(entries, &act.k, &act.k, act.step_tiles.as_mut())?;
        match keys {
            Some(keys) => self.attend_to_pooled(step, index, kv, keys, weights)?,
            None => {
                let (params, sinks) = (spec.attend_params(), Some(&weights.sinks));
                let step_tiles = act.step_tiles.as_ref();
                backend.attend(&params, entries, &act.q, sinks, step_tiles, &mut act.attended)?;
            }
        }
        let act = &mut *step.act;
        let heads = Heads { n: spec.heads.n_heads, dim: spec.heads.k_head_dim };
        let (rope, angles) = (self.config.ropes[rope_back].params, &act.angles[rope_back].0);
        backend.rope(&mut act.attended, rows, heads, None, rope, angles)?;
        backend.project_per_expert(&act.attended, rows, &weights.of_groups, &mut act.q_without_rope)?;
        let of = &act.q_without_rope;
        let (w, low_rank) = (&weights.out, weights.low_rank.output.as_ref());
        let branch = Branch { of, w, low_rank, bias: None, norm: &layer.attn_after };
        let Activations { x, spare, low, .. } = act;
        self.add(backend, branch, Residual { x, spare, low, rows })
    }

    /// Appends the pooled keys that the step completes, and attends to pooled keys and tokens.
    fn attend_to_pooled(
        &self,
        step: &mut StepContext<'_, '_, B>,
        index: usize,
        kv: usize,
        of: PooledKeySpec,
        weights: &SharedKvAttention<B>,
    ) -> Result<(), ModelError> {
        let mut state = self.cache_indices[index].state.expect("a layer with unfinished keys");
        let pooled = weights.pooled.as_ref().expect("a layer with pooled keys");
        if let (Some(of), Some(weights)) = (of.index, &weights.index) {
            let PooledKeyWeights { bias, norm, .. } = &weights.keys;
            let pool = PoolOf { keys: KeysOf::Index, pool: of.pool, bias, norm, rope: of.rope };
            self.pool_keys(step, index, [kv, state], pool)?;
            self.rotate_index_queries(step, index, of.q_rope)?;
            self.select_pooled(step, index, kv, KeysOf::Index)?;
            state += 1;
        }
        let PooledKeyWeights { bias, norm, .. } = pooled;
        let pool = PoolOf { keys: KeysOf::Attention, pool: of.pool, bias, norm, rope: of.rope };
        self.pool_keys(step, index, [kv, state], pool)?;
        let (spec, act) = (&self.layers()[index], &mut *step.act);
        let (entries, parts) = &pooled_pairs(step.parts, kv, act.step_tile_offsets[kv]);
        let numbers = &act.selected;
        let selected = spec.index.map(|of| SelectedKeys { numbers, n_used: of.n_used });
        let pooled = PooledKeys { parts, selected, sinks: Some(&weights.sinks) };
        let (params, step_tiles) = (spec.attend_params(), act.step_tiles.as_ref());
        Ok(step.backend.attend_pooled(&params, entries, &act.q, pooled, step_tiles, &mut act.attended)?)
    }

    /// Computes the queries and keys of layer `index`, what its pools read, and the queries of its
    /// index.
    fn project_shared_kv(
        &self,
        step: &mut StepContext<'_, '_, B>,
        index: usize,
        weights: &SharedKvAttention<B>,
    ) -> Result<(), ModelError> {
        let (backend, act, rows) = (step.backend, &mut *step.act, step.rows);
        let (layer, spec) = (&self.weights.layers[index], &self.layers()[index]);
        let input =
            self.normed_input(backend, spec.norms.kind, &layer.attn_norm, &act.x, &mut act.spare, rows)?;
        let [of_index, of_keys] = &mut act.pools;
        let mut outputs =
            vec![output(&weights.of_queries, &mut act.q_low_rank), output(&weights.keys, &mut act.k)];
        if let Some(pooled) = &weights.pooled {
            outputs.extend([
                output(&pooled.values, &mut of_keys.values),
                output(&pooled.gates, &mut of_keys.gates),
            ]);
        }
        if let Some(index) = &weights.index {
            outputs.extend([
                output(&index.keys.values, &mut of_index.values),
                output(&index.keys.gates, &mut of_index.gates),
                output(&index.heads, &mut act.index_heads),
            ]);
        }
        let low_rank = weights.low_rank.input.as_ref();
        self.project(backend, Product { input, low_rank }, &mut outputs, &mut act.low)?;
        let norm = Some(self.normed(&weights.queries_norm));
        let input = Input { x: &act.q_low_rank, norm, first_row: 0, rows };
        let mut outputs = vec![output(&weights.queries, &mut act.q)];
        outputs.extend(weights.index.as_ref().map(|of| output(&of.queries, &mut act.index_q)));
        let low_rank = weights.low_rank.queries.as_ref();
        self.project(backend, Product { input, low_rank }, &mut outputs, &mut act.low)?;
        let (rope, angles) = (self.config.ropes[spec.rope].params, &act.angles[spec.rope].0);
        let dim = spec.heads.k_head_dim;
        let [q_norm, k_norm] = [&weights.ones, &weights.keys_norm].map(|norm| Some(self.normed(norm)));
        backend.rope(&mut act.q, rows, Heads { n: spec.heads.n_heads, dim }, q_norm, rope, angles)?;
        Ok(backend.rope(&mut act.k, rows, Heads { n: 1, dim }, k_norm, rope, angles)?)
    }

    /// Pools the keys that the tokens of the step complete, and appends them to the caches, where
    /// `kv` and `state` are the indices of the keys and of the unfinished ones.
    pub(super) fn pool_keys(
        &self,
        step: &mut StepContext<'_, '_, B>,
        index: usize,
        [kv, state]: [usize; 2],
        PoolOf { keys, pool, bias, norm, rope }: PoolOf<'_, B>,
    ) -> Result<(), ModelError> {
        let (backend, act, rows) = (step.backend, &mut *step.act, step.rows);
        let of = &mut act.pools[usize::from(keys == KeysOf::Attention)];
        for (what, x) in [("values of a pool", &of.values), ("gates of a pool", &of.gates)] {
            let width = pool.n_in();
            self.check_rows(backend, step.parts, index, StepRows { what, x, width, n: rows })?;
        }
        let entries = &mut state_entries(step.parts, state);
        backend.pool_tokens(entries, pool, &of.values, &of.gates, bias, &mut of.pooled)?;
        let n_keys = n_completed(step.parts, pool.stride);
        if n_keys == 0 {
            return Ok(());
        }
        let (params, angles) = (self.config.ropes[rope].params, &act.angles[rope].0);
        let norm = Some(self.normed(norm));
        backend.rope(&mut of.pooled, n_keys, Heads { n: 1, dim: pool.width }, norm, params, angles)?;
        let mut pooled = pooled_entries(step.parts, kv);
        let entries = pooled.iter_mut().filter_map(|entry| Some(keys.entry(entry)?.keys));
        let mut entries: Vec<_> = entries.filter(|entry| entry.rows.n > 0).collect();
        // A shared-KV tensor has no values of its own.
        Ok(backend.kv_append(&mut entries, &of.pooled, &of.pooled, None)?)
    }

    /// Rotates the queries of the index of layer `index` by this rotary embedding.
    fn rotate_index_queries(
        &self,
        step: &mut StepContext<'_, '_, B>,
        index: usize,
        rope: usize,
    ) -> Result<(), ModelError> {
        let (act, Some(of)) = (&mut *step.act, self.layers()[index].index) else { return Ok(()) };
        let heads = Heads { n: of.n_heads, dim: of.dim };
        let (params, angles) = (self.config.ropes[rope].params, &act.angles[rope].0);
        Ok(step.backend.rope(&mut act.index_q, step.rows, heads, None, params, angles)?)
    }

    /// Selects the pooled keys that the rows of layer `index` attend to, or whose tokens they
    /// attend to.
    pub(super) fn select_pooled(
        &self,
        step: &mut StepContext<'_, '_, B>,
        index: usize,
        kv: usize,
        keys: KeysOf,
    ) -> Result<(), ModelError> {
        let (backend, act) = (step.backend, &mut *step.act);
        let Some(of) = self.layers()[index].index else { return Ok(()) };
        let mut pooled = pooled_entries(step.parts, kv);
        let entries: Vec<_> = pooled.iter_mut().filter_map(|entry| keys.entry(entry)).collect();
        let selection = Selection { n_heads: of.n_heads, n_used: of.n_used };
        let (q, heads) = (&act.index_q, &act.index_heads);
        Ok(backend.select_pooled(selection, &entries, q, heads, &mut act.selected)?)
    }

    /// Writes the experts of each token of the step, for layers with a table of them.
    pub(super) fn choose_experts(
        &self,
        backend: &B,
        tokens: &[u32],
        act: &mut Activations<B>,
    ) -> Result<(), ModelError> {
        for (layer, chosen) in self.weights.layers.iter().zip(&mut act.chosen) {
            let Some(table) = layer.experts.as_ref().and_then(|experts| experts.table.as_ref()) else {
                continue;
            };
            let n_used = table.len() / self.n_vocab();
            // A soft token has the experts of the first one.
            let of_token = |&token: &u32| {
                let token = if self.extra.is_soft(token) { 0 } else { token as usize };
                &table[token * n_used..][..n_used]
            };
            let experts: Vec<f32> = tokens.iter().flat_map(of_token).copied().collect();
            backend.write(chosen, &experts)?;
        }
        Ok(())
    }
}

/// Returns the number of pooled keys that the tokens of a step complete.
fn n_completed<P: Page>(parts: &[BatchSequence<'_, P>], stride: usize) -> usize {
    parts.iter().map(|part| TokenPool::completed(stride, part.cache.rows(0, part.n)).len()).sum()
}
