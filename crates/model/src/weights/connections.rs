//! Weights of hyper-connections; the [decoder](crate::Decoder) has their equations.

use kvant_backend::Backend;
use kvant_codec::DType;

use super::Loader;
use crate::{Config, ModelError, ResidualStreams};

/// What a sublayer reads of the residual streams, and what it writes.
pub(crate) struct Connection<B: Backend> {
    /// Projection of each stream, `[n_products, n_embd]`: with rows for what is written and mixed,
    /// or for reading alone.
    pub(crate) parts: Vec<B::Matrix>,
    /// A scale for reading, for writing and for mixing, then their bases.
    pub(crate) numbers: B::Buffer,
    /// Whether it writes: all but the last, before the final norm, do.
    pub(crate) is_written: bool,
}

impl<B: Backend> Loader<'_, B> {
    /// Loads the connection whose tensors' names start with `name`.
    pub(super) fn connection(
        &mut self,
        c: &Config,
        name: &str,
        is_written: bool,
    ) -> Result<Connection<B>, ModelError> {
        let ResidualStreams::Connected { n, mixing, .. } = c.streams else {
            unreachable!("connections belong to connected streams")
        };
        let (n_embd, n_products) = (c.n_embd, mixing.n_products(n, is_written));
        let of = |part| format!("{name}_{part}.weight");
        let rows = self.values(&of("fn"), &[n * n_embd, n_products])?;
        let part = |i: usize| {
            let columns = rows.chunks_exact(n * n_embd).flat_map(|row| &row[i * n_embd..][..n_embd]);
            self.small(&columns.copied().collect::<Vec<_>>(), n_embd, DType::F32)
        };
        let parts = (0..n).map(part).collect::<Result<_, _>>()?;
        let mut numbers = self.values(&of("scale"), &[mixing.n_scales(is_written)])?;
        numbers.extend(self.values(&of("base"), &[n_products])?);
        Ok(Connection { parts, numbers: self.upload(&numbers)?, is_written })
    }
}
