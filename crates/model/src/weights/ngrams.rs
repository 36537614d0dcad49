//! Weights of the embeddings of n-grams; the [decoder](crate::Decoder) has their equations.

use kvant_backend::{Backend, BackendError, Matrix, WeightSource};

use super::per_layer::TABLE;
use super::{Loader, check_shape, shared_part};
use crate::{Config, ModelError, Ngrams};

/// Embeddings of n-grams, and how their values are added to the residual streams. Matrices are
/// `[n_out, n_in]`.
pub(crate) struct NgramWeights<B: Backend> {
    pub(crate) table: NgramTable<B>,
    /// Keys of each stream, `[n * n_embd, width]`.
    pub(crate) keys: B::Matrix,
    /// `[n_embd, width]`
    pub(crate) values: B::Matrix,
    /// Norms of keys, of streams, and of what the convolution reads, `[n, n_embd]` each.
    pub(crate) norms: [B::Buffer; 3],
    /// Kernel of the convolution, `[taps, n, n_embd]`.
    pub(crate) kernel: B::Buffer,
}

/// A table in parts, each as its file has it.
pub(crate) struct NgramTable<B: Backend> {
    /// `[rows, dim]` each.
    parts: Vec<B::Matrix>,
    /// The first row of each part.
    firsts: Vec<usize>,
}

impl<B: Backend> NgramTable<B> {
    /// Decodes these rows of the table into `out`, `[rows, dim]`, each by way of `one`, `[dim]`, if
    /// the table has several parts.
    pub(crate) fn embed(
        &self,
        backend: &B,
        rows: &[u32],
        one: &mut B::Buffer,
        out: &mut B::Buffer,
    ) -> Result<(), BackendError> {
        if let [whole] = &self.parts[..] {
            return backend.embed(whole, rows, 1.0, out);
        }
        for (i, row) in rows.iter().map(|row| *row as usize).enumerate() {
            let part = self.firsts.partition_point(|first| *first <= row) - 1;
            let table = &self.parts[part];
            let dim = table.n_in();
            backend.embed(table, &[(row - self.firsts[part]) as u32], 1.0, one)?;
            backend.copy(one, 0, out, i * dim, dim)?;
        }
        Ok(())
    }
}

impl<B: Backend> Loader<'_, B> {
    /// Returns the table, which may be larger than memory: its numbers are not read before a token
    /// needs them, and the keys of the next layer with attention are checked for NaN.
    fn ngram_table(&mut self, of: &Ngrams) -> Result<NgramTable<B>, ModelError> {
        let info = self.gguf.info(TABLE)?;
        let n_rows = info.rows();
        check_shape(info, &[of.dim, n_rows])?;
        if n_rows < of.n_rows() {
            let expected = format!("at least {} rows", of.n_rows());
            return Err(ModelError::Value { key: TABLE.to_owned(), expected, got: n_rows.to_string() });
        }
        self.used.insert(TABLE.to_owned());
        self.n_bytes += info.n_bytes;
        let row_bytes = info.n_bytes / n_rows;
        let mut table = NgramTable { parts: Vec::new(), firsts: Vec::new() };
        let mut first = 0;
        for index in 0..self.gguf.n_parts(info) {
            let bytes = shared_part(self.gguf, info, self.gguf.part(info, index), index);
            let n_out = bytes.len() / row_bytes;
            let source = WeightSource { dtype: info.dtype, n_out, n_in: of.dim, bytes };
            table.parts.push(self.backend.table(source)?);
            table.firsts.push(first);
            first += n_out;
        }
        Ok(table)
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
            table,
            keys: self.matrix(&name("key"), width, n * n_embd)?,
            values: self.matrix(&name("value"), width, n_embd)?,
            norms: [keys?, streams?, conv?],
            kernel,
        })
    }
}
