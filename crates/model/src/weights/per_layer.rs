//! Weights of the per-layer embeddings; the [decoder](crate::Decoder) has their equations.

use kvant_backend::{Backend, WeightSource};

use super::low_rank::RowsOf;
use super::{Loader, LowRank};
use crate::config::PER_LAYER;
use crate::{Config, ModelError};

/// Inputs of the per-layer embeddings.
pub(crate) struct PerLayerInputs<B: Backend> {
    /// Token table, `[n_tokens * n_layers, n]`: a row per token and layer.
    pub(crate) table: B::Matrix,
    /// Tokens in the table; those behind it, of images and sounds, have the numbers of the first.
    pub(crate) n_tokens: u32,
    /// Projection of the embedding, `[n, n_embd]` per layer.
    pub(crate) projections: Vec<B::Matrix>,
    /// Norm of that projection, `[n]`, divided by the root of two.
    pub(crate) norm: B::Buffer,
}

/// Per-layer embedding weights of one layer.
pub(crate) struct PerLayer<B: Backend> {
    /// Gate projection, `[n, n_embd]`.
    pub(crate) gate: B::Matrix,
    /// Output projection, `[n_embd, n]`.
    pub(crate) out: B::Matrix,
    /// Norm of the output, `[n_embd]`.
    pub(crate) after: Option<B::Buffer>,
    /// LoRA weights of `gate` and of `out`.
    pub(crate) low_rank: [Option<LowRank<B>>; 2],
}

/// Name of the token table, which no GEMM reads.
pub(super) const TABLE: &str = "per_layer_token_embd.weight";
const PROJECTION: &str = "per_layer_model_proj.weight";

impl<B: Backend> Loader<'_, B> {
    /// Loads the inputs of `n` numbers per layer.
    pub(super) fn per_layer_inputs(
        &mut self,
        c: &Config,
        n: usize,
        n_vocab: usize,
    ) -> Result<PerLayerInputs<B>, ModelError> {
        let n_layers = c.layers.len();
        if !(self.part.is_first() && self.part.is_last()) {
            let what = format!("a model with {PER_LAYER} on more than one device");
            return Err(ModelError::Unsupported { what });
        }
        let n_tokens = self.gguf.tensor(TABLE)?.info.rows().clamp(1, n_vocab);
        let source = self.source(TABLE, n_layers * n, n_tokens)?;
        let n_out = n_tokens * n_layers;
        // A row here is a part of a row in the file.
        if !n.is_multiple_of(source.dtype.block_len()) || u32::try_from(n_out).is_err() {
            let what = format!("'{TABLE}' in {} with {PER_LAYER} of {n}", source.dtype);
            return Err(ModelError::Unsupported { what });
        }
        let table = self.backend.table(WeightSource { n_out, n_in: n, ..source })?;
        let projections = (0..n_layers).map(|layer| {
            let source = self.rows(PROJECTION, &[c.n_embd, n_layers * n], layer * n..(layer + 1) * n)?;
            Ok(self.backend.upload_matrix(source)?)
        });
        let projections = projections.collect::<Result<_, ModelError>>()?;
        let norm = self.scaled_vector("per_layer_proj_norm.weight", n, std::f32::consts::FRAC_1_SQRT_2)?;
        Ok(PerLayerInputs { table, n_tokens: n_tokens as u32, projections, norm })
    }

    /// Loads the weights of layer `index` with `n` numbers.
    pub(super) fn per_layer(
        &mut self,
        c: &Config,
        index: usize,
        n: usize,
    ) -> Result<PerLayer<B>, ModelError> {
        let name = |suffix: &str| format!("blk.{index}.{suffix}.weight");
        let ([gate], of_gate) = self.group(c.n_embd, [RowsOf::all(name("inp_gate"), n)])?;
        let ([out], of_out) = self.group(n, [RowsOf::all(name("proj"), c.n_embd)])?;
        let after = Some(self.vector(&name("post_norm"), c.n_embd)?);
        Ok(PerLayer { gate, out, after, low_rank: [of_gate, of_out] })
    }
}
