//! The weights of numbers that each layer is given of each token; the [decoder](crate::Decoder) has their equations.

use kvant_backend::{Backend, WeightSource};

use super::low_rank::RowsOf;
use super::{Loader, LowRank};
use crate::config::PER_LAYER;
use crate::{Config, ModelError};

/// What the numbers of all layers are made with.
pub(crate) struct PerLayerInputs<B: Backend> {
    /// The token's part, `[n_vocab * n_layers, n]`: of each token a row for each layer.
    pub(crate) table: B::Matrix,
    /// The part of the embedding, for each layer `[n, n_embd]`.
    pub(crate) projections: Vec<B::Matrix>,
    /// Of that part, `[n]`, divided by the root of two.
    pub(crate) norm: B::Buffer,
}

/// What a layer makes of its numbers.
pub(crate) struct PerLayer<B: Backend> {
    /// What says how much of each is wanted, `[n, n_embd]`.
    pub(crate) gate: B::Matrix,
    /// `[n_embd, n]`
    pub(crate) out: B::Matrix,
    /// Of what they add to the stream, `[n_embd]`.
    pub(crate) after: Option<B::Buffer>,
    /// What adapters add to the products of `gate` and of `out`.
    pub(crate) low_rank: [Option<LowRank<B>>; 2],
}

/// The table that no product reads.
pub(super) const TABLE: &str = "per_layer_token_embd.weight";
const PROJECTION: &str = "per_layer_model_proj.weight";

impl<B: Backend> Loader<'_, B> {
    /// What the `n` numbers of each layer are made with.
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
        let source = self.source(TABLE, n_layers * n, n_vocab)?;
        let n_out = n_vocab * n_layers;
        // What is a row here is a part of a row in the file.
        if !n.is_multiple_of(source.dtype.block_len()) || u32::try_from(n_out).is_err() {
            let what = format!("'{TABLE}' in {} with {PER_LAYER} of {n}", source.dtype);
            return Err(ModelError::Unsupported { what });
        }
        let table = self.backend.table(WeightSource { n_out, n_in: n, ..source })?;
        let projections = (0..n_layers).map(|layer| {
            let source = self.rows(PROJECTION, &[c.n_embd, n_layers * n], layer * n..(layer + 1) * n)?;
            Ok(self.backend.matrix(source)?)
        });
        let projections = projections.collect::<Result<_, ModelError>>()?;
        let norm = self.scaled_vector("per_layer_proj_norm.weight", n, std::f32::consts::FRAC_1_SQRT_2)?;
        Ok(PerLayerInputs { table, projections, norm })
    }

    /// What layer `index` makes of its `n` numbers.
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
