//! Weights of hyper-connections; the [decoder](crate::Decoder) has their equations.

use kvant_backend::Backend;
use kvant_codec::DType;

use super::Loader;
use crate::{Config, ModelError};

/// What a sublayer reads of the residual streams, and what it writes.
pub(crate) struct Connection<B: Backend> {
    /// Projection of each stream, `[2 n, n_embd]`, or `[n, n_embd]` if nothing is written.
    pub(crate) parts: Vec<B::Matrix>,
    /// A scale for reading and one for writing, then n bases for each.
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
        let (n, n_embd, kinds) = (c.streams.n(), c.n_embd, if is_written { 2 } else { 1 });
        let of = |part| format!("{name}_{part}.weight");
        let rows = self.values(&of("fn"), &[n * n_embd, kinds * n])?;
        let part = |i: usize| {
            let columns = rows.chunks_exact(n * n_embd).flat_map(|row| &row[i * n_embd..][..n_embd]);
            self.small(&columns.copied().collect::<Vec<_>>(), n_embd, DType::F32)
        };
        let parts = (0..n).map(part).collect::<Result<_, _>>()?;
        let mut numbers = self.values(&of("scale"), &[kinds])?;
        numbers.extend(self.values(&of("base"), &[kinds * n])?);
        Ok(Connection { parts, numbers: self.upload(&numbers)?, is_written })
    }
}
