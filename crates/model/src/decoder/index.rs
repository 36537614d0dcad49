//! Attention to selected tokens; [`TokenIndex`] has the equations.

use kvant_backend::{
    Backend, BlockSelection, Heads, KvBatchEntry, Norm, Page, RopeParams, Selected, Selection,
};

use super::mla::output;
use super::shared_kv::{KeysOf, PoolOf};
use super::{Decoder, Product, StepContext, StepRows, kv_entries};
use crate::weights::{BlockIndexWeights, IndexWeights, LatentAttention};
use crate::{BlockKeys, ModelError, TokenBlocks, TokenIndex};

impl<B: Backend> Decoder<B> {
    /// Selects the tokens that the rows of layer `index` attend to, if it selects some itself.
    pub(super) fn select_tokens(
        &self,
        step: &mut StepContext<'_, '_, B>,
        index: usize,
        kv: usize,
        attention: &LatentAttention<B>,
    ) -> Result<(), ModelError> {
        let (Some(weights), Some(of)) = (&attention.index, self.layers()[index].index) else {
            return Ok(());
        };
        self.place_index(step, index, of, weights)?;
        // The second are the normalized ones.
        self.append_index(step, index, kv, 1)?;
        let (backend, act) = (step.backend, &mut *step.act);
        let entries = &mut kv_entries(step.parts, kv, act.step_tile_offsets[kv]);
        let index_entries = &mut index_entries(entries);
        let selection = Selection { n_heads: of.n_heads, n_used: of.n_used };
        let (q, heads, step_tiles) = (&act.index_q, &act.index_heads, act.step_tiles.as_ref());
        Ok(backend.select_tokens(selection, index_entries, q, heads, step_tiles, &mut act.selected)?)
    }

    /// Selects the blocks of tokens that the rows of layer `index` attend to, if it has an index of
    /// them.
    pub(super) fn select_blocks(
        &self,
        step: &mut StepContext<'_, '_, B>,
        index: usize,
        kv: usize,
        weights: Option<&BlockIndexWeights<B>>,
    ) -> Result<(), ModelError> {
        let (layer, spec) = (&self.weights.layers[index], &self.layers()[index]);
        let (Some(weights), Some(of)) = (weights, spec.index) else { return Ok(()) };
        let (TokenIndex { n_heads, dim, n_used, .. }, Some(TokenBlocks { size, keys: kind })) =
            (of, of.blocks)
        else {
            return Ok(());
        };
        let (backend, act, rows) = (step.backend, &mut *step.act, step.rows);
        let input =
            self.normed_input(backend, spec.norms.kind, &layer.attn_norm, &act.x, &mut act.spare, rows)?;
        let ([keys, _], [pool, _]) = (&mut act.index_k, &mut act.pools);
        let keys = if let BlockKeys::Pooled { .. } = kind { &mut pool.values } else { keys };
        let outputs = &mut [output(&weights.queries, &mut act.index_q), output(&weights.key, keys)];
        self.project(backend, Product { input, low_rank: None }, outputs, &mut act.low)?;
        let (rope, angles) = (self.config.ropes[spec.rope].params, &act.angles[spec.rope].0);
        let [q_norm, k_norm] = weights.norms.each_ref().map(|norm| Some(self.normed(norm)));
        backend.rope(&mut act.index_q, rows, Heads { n: n_heads, dim }, q_norm, rope, angles)?;
        let n_local = match (kind, of.pool(), &weights.pool_bias) {
            (BlockKeys::Pooled { rope }, Some(pool), Some(bias)) => {
                let state = self.cache_indices[index].state.expect("a layer with unfinished keys");
                let keys = KeysOf::IndexAlone;
                let pool = PoolOf { keys, pool, bias, norm: &weights.norms[1], rope };
                self.pool_keys(step, index, [kv, state], pool)?;
                return self.select_pooled(step, index, kv, keys);
            }
            (BlockKeys::OfTokens { n_local }, ..) => n_local,
            (BlockKeys::Pooled { .. }, ..) => unreachable!("pooled keys have a pool"),
        };
        backend.rope(keys, rows, Heads { n: 1, dim }, k_norm, rope, angles)?;
        self.append_index(step, index, kv, 0)?;
        let act = &mut *step.act;
        let entries = &mut kv_entries(step.parts, kv, act.step_tile_offsets[kv]);
        let index_entries = &mut index_entries(entries);
        let selection = BlockSelection { n_heads, n_used, size, n_local };
        let (q, step_tiles) = (&act.index_q, act.step_tiles.as_ref());
        Ok(backend.select_blocks(selection, index_entries, q, step_tiles, &mut act.selected)?)
    }

    /// Appends the keys of layer `index`'s index, in buffer `of` of them, to the caches.
    fn append_index(
        &self,
        step: &mut StepContext<'_, '_, B>,
        index: usize,
        kv: usize,
        of: usize,
    ) -> Result<(), ModelError> {
        let (backend, act) = (step.backend, &mut *step.act);
        let (keys, dim) = (&act.index_k[of], self.layers()[index].index.map_or(0, |index| index.dim));
        let of_index = StepRows { what: "keys of the index", x: keys, width: dim, n: step.rows };
        self.check_rows(backend, step.parts, index, of_index)?;
        let entries = &mut kv_entries(step.parts, kv, act.step_tile_offsets[kv]);
        // A shared-KV tensor has no values of its own.
        Ok(backend.kv_append(&mut index_entries(entries), keys, keys, act.step_tiles.as_mut())?)
    }

    /// Normalizes the key, and rotates it and the queries.
    fn place_index(
        &self,
        step: &mut StepContext<'_, '_, B>,
        index: usize,
        TokenIndex { n_heads, dim, pairing, key_eps, .. }: TokenIndex,
        weights: &IndexWeights<B>,
    ) -> Result<(), ModelError> {
        let (backend, act, rows) = (step.backend, &mut *step.act, step.rows);
        let spec = &self.layers()[index];
        let [key, normed_key] = &mut act.index_k;
        let [weight, bias] = &weights.key_norm;
        backend.layer_norm(key, rows, Norm { weight, eps: key_eps }, Some(bias), normed_key)?;
        let (rope, angles) = (self.config.ropes[spec.rope].params, &act.angles[spec.rope].0);
        let rope = RopeParams { pairing, ..rope };
        for (x, n) in [(&mut act.index_q, n_heads), (normed_key, 1)] {
            backend.rope(x, rows, Heads { n, dim }, None, rope, angles)?;
        }
        Ok(())
    }

    /// Computes attention of layer `index`, with these sinks, over the selected tokens alone in
    /// rows that have more.
    pub(super) fn attend_to_selected(
        &self,
        step: &mut StepContext<'_, '_, B>,
        index: usize,
        kv: usize,
        of: TokenIndex,
        sinks: Option<&B::Buffer>,
    ) -> Result<(), ModelError> {
        let (backend, act) = (step.backend, &mut *step.act);
        let params = self.layers()[index].attend_params();
        let entries = &mut kv_entries(step.parts, kv, act.step_tile_offsets[kv]);
        let (q, step_tiles) = (&act.q, act.step_tiles.as_ref());
        let selected = Selected {
            numbers: &act.selected,
            n_used: of.n_used,
            block: of.block_size(),
            n_lists: of.n_lists(),
            with_rest: of.pool().is_some(),
            sinks,
        };
        // Sequences with rows that attend to all tokens, before the others.
        let has_whole = |part: &KvBatchEntry<'_, B::Page>| part.rows.start < selected.first_position();
        entries.sort_by_key(|part| !has_whole(part));
        let n_whole = entries.partition_point(has_whole);
        if n_whole > 0 {
            backend.attend(&params, &entries[..n_whole], q, sinks, step_tiles, &mut act.attended)?;
        }
        Ok(backend.attend_selected(&params, entries, q, selected, step_tiles, &mut act.attended)?)
    }
}

/// Returns the sequences as the index of their layer processes them.
pub(super) fn index_entries<'a, P: Page>(entries: &'a mut [KvBatchEntry<'_, P>]) -> Vec<KvBatchEntry<'a, P>> {
    entries.iter_mut().filter_map(KvBatchEntry::index).collect()
}
