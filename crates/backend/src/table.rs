//! Embedding look-up in host memory, which supports every type of the codec.

use kvant_codec::{CodecError, DType};

use crate::{BackendError, Result};

/// Decodes the rows `tokens`, which exist, times `scale`, into `out` `[tokens, n_in]`. `rows` is
/// the whole table as in the file; `None` where only the device holds it.
///
/// # Errors
/// [`BackendError::Unsupported`] if `rows` is `None`, and for rows that are not whole blocks.
pub fn decode_embedding_rows(
    rows: Option<&[u8]>,
    dtype: DType,
    n_in: usize,
    tokens: &[u32],
    scale: f32,
    out: &mut [f32],
) -> Result<()> {
    let rows = rows.ok_or_else(|| BackendError::Unsupported {
        op: "embed",
        requested: "a matrix that is not a token embedding".to_owned(),
        has: "token embeddings, tied to the output matrix or not".to_owned(),
    })?;
    let broken = |error: CodecError| BackendError::Unsupported {
        op: "embed",
        requested: error.to_string(),
        has: "rows of whole blocks".to_owned(),
    };
    let row_bytes = dtype.row_bytes(n_in).map_err(broken)?;
    for (&token, row) in tokens.iter().zip(out.chunks_exact_mut(n_in)) {
        let bytes = &rows[token as usize * row_bytes..][..row_bytes];
        kvant_codec::decode(dtype, bytes, row).map_err(broken)?;
        row.iter_mut().for_each(|value| *value *= scale);
    }
    Ok(())
}
