//! DFlash (arXiv 2602.06036): a draft head drafts a block of tokens at once from the features of
//! all tokens before it, rows of the residual stream of its model.
//!
//! ```text
//! c = norm(W_fc f)                      f the features [k n_embd of the model] of a known token
//! K = [rope(norm(W_k c)), rope(norm(W_k n))],  V = [W_v c, W_v n]      in each layer
//! x = E[the last token, mask, mask, ..]        n = norm(x) as in any decoder
//! logits of a token of the block = W_out norm(x)
//! ```
//!
//! Keys and values of features are cached at the position of their token and of nothing else: a
//! known token passes no layer. Tokens of the block see each other.

use kvant_backend::{
    AttendParams, Backend, BackendError, Heads, Input, KvBatchEntry, Output, RopeParams, TokenSpan,
};
use kvant_kv::BlockPool;

use super::{Activations, BatchSequence, Decoder, Entry, StepError, kv_entries, normalize};
use crate::ModelError;
use crate::weights::{AnyAttention, BlockEntry, DraftEntry};

impl<B: Backend> Decoder<B> {
    /// Returns whether the tokens of a step see each other: those of a block that DFlash drafts.
    pub(super) fn drafts_blocks(&self) -> bool {
        matches!(&self.weights.entry, Some(DraftEntry::Block(entry)) if !entry.is_causal)
    }

    /// Computes c from `rows` rows of features.
    pub(super) fn enter_context(
        &self,
        backend: &B,
        entry: &BlockEntry<B>,
        rows: usize,
        features: &[f32],
        act: &mut Activations<B>,
    ) -> Result<(), BackendError> {
        backend.write(&mut act.features, features)?;
        let of_features = Input { x: &act.features, norm: None, first_row: 0, rows };
        let c = Output { w: &entry.fc, bias: None, y: &mut act.x, accumulate: false };
        backend.project(of_features, &mut [c])?;
        let (whole, rope) = (Heads { n: 1, dim: self.config.n_embd }, self.config.ropes[0].params);
        normalize(backend, &mut act.x, rows, whole, Some(self.normed(&entry.norm)), rope, &act.angles[0].0)
    }

    /// Caches the keys and values of the features that `entry` has, in each layer of a DFlash head.
    ///
    /// # Errors
    ///
    /// As [`Decoder::step`].
    pub fn cache_features(
        &self,
        backend: &B,
        pool: &BlockPool<B::Page>,
        part: BatchSequence<'_, B::Page>,
        act: &mut Activations<B>,
        entry: Entry<'_>,
    ) -> Result<(), StepError> {
        let (rows, parts) = (part.n, &mut [part]);
        self.prepare(backend, pool, parts, act, entry).map_err(StepError::Refused)?;
        for index in 0..self.layers().len() {
            self.append_context(backend, parts, act, index, rows).map_err(StepError::Broken)?;
        }
        parts[0].cache.commit(rows);
        Ok(())
    }

    /// Appends the keys and values of c to the cache of layer `index`.
    fn append_context(
        &self,
        backend: &B,
        parts: &mut [BatchSequence<'_, B::Page>],
        act: &mut Activations<B>,
        index: usize,
        rows: usize,
    ) -> Result<(), ModelError> {
        let (spec, kv) = (&self.layers()[index], self.kv_layer(index).expect("a layer that attends"));
        let Some(AnyAttention::Usual(attention)) = &self.weights.layers[index].attention else {
            unreachable!("layers of a DFlash head are those of Qwen3")
        };
        let weights = attention.kv.as_ref().expect("a layer with keys and values of its own");
        let input = Input { x: &act.x, norm: None, first_row: 0, rows };
        let keys = Output { w: &weights.wk, bias: weights.bk.as_ref(), y: &mut act.k, accumulate: false };
        let wv = weights.wv.as_ref().expect("a layer with a projection of values");
        let values = Output { w: wv, bias: weights.bv.as_ref(), y: &mut act.v, accumulate: false };
        backend.project(input, &mut [keys, values])?;
        let (heads, norm) = (&spec.heads, self.norm(&weights.k_norm));
        let k_heads = Heads { n: heads.n_kv_heads, dim: heads.k_head_dim };
        let rope: RopeParams = self.config.ropes[spec.rope].params;
        backend.rope(&mut act.k, rows, k_heads, norm, rope, &act.angles[spec.rope].0)?;
        let entries = &mut kv_entries(parts, kv, act.step_tile_offsets[kv]);
        Ok(backend.kv_append(entries, &act.k, &act.v, act.step_tiles.as_mut())?)
    }

    /// Computes attention of the rows of a block, each over all tokens and all of the block. A
    /// window counts from the last row.
    pub(super) fn attend_block(
        &self,
        backend: &B,
        params: &AttendParams,
        entries: &mut [KvBatchEntry<'_, B::Page>],
        q: &B::Buffer,
        out: &mut B::Buffer,
    ) -> Result<(), BackendError> {
        for entry in 0..entries.len() {
            let rows = entries[entry].rows;
            for row in rows.range() {
                // As if the row were the last one.
                entries[entry].rows = TokenSpan { first: row, n: 1, start: rows.end() - 1, ..rows };
                backend.attend(params, &entries[entry..=entry], q, None, None, out)?;
            }
            entries[entry].rows = rows;
        }
        Ok(())
    }
}
