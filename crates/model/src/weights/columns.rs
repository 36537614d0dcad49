//! Matrices that hold the columns of several products, one beside the other.

use std::borrow::Cow;

use kvant_backend::{Backend, WeightSource};
use kvant_codec::DType;

use super::Loader;
use crate::ModelError;
use crate::retype::convert;

impl<B: Backend> Loader<'_, B> {
    /// Loads the matrices `[n_out, width]` that lie side by side in the `n` parts of the columns of
    /// one.
    pub(super) fn beside_each_other(
        &mut self,
        name: &str,
        n: usize,
        width: usize,
        n_out: usize,
    ) -> Result<Vec<B::Matrix>, ModelError> {
        let whole = self.source(name, n * width, n_out)?;
        let dtype = match width.is_multiple_of(whole.dtype.block_len()) {
            true => whole.dtype,
            // A block crosses the border of two.
            false => DType::F16,
        };
        let bytes = if dtype == whole.dtype {
            Cow::Borrowed(&whole.bytes[..])
        } else {
            let converted = convert(whole.dtype, &whole.bytes, n * width * n_out, dtype);
            Cow::Owned(converted.map_err(|error| {
                let expected = format!("rows that become {dtype}");
                ModelError::Value { key: name.to_owned(), expected, got: error.to_string() }
            })?)
        };
        let part_bytes = bytes.len() / (n * n_out);
        let part = |i: usize| {
            let rows =
                bytes.chunks_exact(n * part_bytes).flat_map(|row| &row[i * part_bytes..][..part_bytes]);
            let bytes: Vec<u8> = rows.copied().collect();
            Ok(self.backend.upload_matrix(WeightSource { dtype, n_out, n_in: width, bytes: bytes.into() })?)
        };
        (0..n).map(part).collect()
    }
}
