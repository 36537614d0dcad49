//! Weights of the embeddings of n-grams; the [decoder](crate::Decoder) has their equations.

use kvant_backend::{Backend, WeightSource};

use super::per_layer::TABLE;
use super::{Loader, check_shape, shared_bytes};
use crate::{Config, ModelError, Ngrams};

/// Embeddings of n-grams, and how their values are added to the residual streams. Matrices are
/// `[n_out, n_in]`.
pub(crate) struct NgramWeights<B: Backend> {
    /// `[rows, dim]`
    pub(crate) table: B::Matrix,
    /// Keys of each stream, `[n * n_embd, width]`.
    pub(crate) keys: B::Matrix,
    /// `[n_embd, width]`
    pub(crate) values: B::Matrix,
    /// Norms of keys, of streams, and of what the convolution reads, `[n, n_embd]` each.
    pub(crate) norms: [B::Buffer; 3],
    /// Kernel of the convolution, `[taps, n, n_embd]`.
    pub(crate) kernel: B::Buffer,
}

impl<B: Backend> Loader<'_, B> {
    /// Returns the table, which may be larger than memory: its numbers are not read before a token
    /// needs them, and the keys of the next layer with attention are checked for NaN.
    fn ngram_table(&mut self, of: &Ngrams) -> Result<WeightSource, ModelError> {
        let tensor = self.gguf.tensor(TABLE)?;
        let (n_out, dtype) = (tensor.info.rows(), tensor.info.dtype);
        check_shape(&tensor, &[of.dim, n_out])?;
        if n_out < of.n_rows() {
            let expected = format!("at least {} rows", of.n_rows());
            return Err(ModelError::Value { key: TABLE.to_owned(), expected, got: n_out.to_string() });
        }
        self.used.insert(TABLE.to_owned());
        self.n_bytes += tensor.bytes.len();
        let all = 0..tensor.bytes.len();
        Ok(WeightSource { dtype, n_out, n_in: of.dim, bytes: shared_bytes(self.gguf, tensor, all) })
    }

    /// Loads the embeddings of n-grams.
    pub(super) fn ngrams(&mut self, c: &Config, of: &Ngrams) -> Result<NgramWeights<B>, ModelError> {
        let name = |part: &str| format!("blk.{}.ple_{part}.weight", of.layer);
        let (n, n_embd, width) = (c.streams.n(), c.n_embd, of.width());
        let table = self.ngram_table(of)?;
        let [keys, streams, conv] = ["norm_key", "norm_query", "norm_conv"]
            .map(|part| self.per_stream(&name(part), n, n_embd).and_then(|values| self.upload(&values)));
        let by_channel = self.values(&name("conv1d"), &[of.taps, n * n_embd])?;
        let by_tap = (0..of.taps).flat_map(|tap| by_channel.iter().skip(tap).step_by(of.taps).copied());
        let kernel = self.upload(&by_tap.collect::<Vec<_>>())?;
        Ok(NgramWeights {
            table: self.backend.table(table)?,
            keys: self.matrix(&name("key"), width, n * n_embd)?,
            values: self.matrix(&name("value"), width, n_embd)?,
            norms: [keys?, streams?, conv?],
            kernel,
        })
    }
}
