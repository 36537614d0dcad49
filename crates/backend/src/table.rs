//! Rows of a token embedding, for devices that look them up in host memory, where every type that the codec knows can be.

use kvant_codec::{CodecError, DType};

use crate::{BackendError, Result};

/// Decodes rows `tokens`, which exist, each value times `scale`, into `out` `[tokens, n_in]`. `rows` are all of them, as in the file;
/// `None` where the device alone has them.
///
/// # Errors
/// [`BackendError::Unsupported`] where there are no rows, and for rows that are no whole blocks.
pub fn decode_rows(
    rows: Option<&[u8]>,
    (dtype, n_in): (DType, usize),
    tokens: &[u32],
    scale: f32,
    out: &mut [f32],
) -> Result<()> {
    let rows = rows.ok_or_else(|| BackendError::Unsupported {
        op: "embed",
        wanted: "a matrix for products alone".to_owned(),
        has: "tables of embeddings, and matrices that are such tables too".to_owned(),
    })?;
    let broken = |error: CodecError| BackendError::Unsupported {
        op: "embed",
        wanted: error.to_string(),
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
