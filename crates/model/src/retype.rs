//! Weights in another type than their file's.

use kvant_backend::limits;
use kvant_codec::{CodecError, DType};
use kvant_gguf::TensorInfo;

/// Values that are converted together; a multiple of every block length.
const CHUNK: usize = 1 << 16;

/// What a tensor becomes where weight matrices are wanted as `dtype`: that, or where its rows are no whole blocks of it the next
/// best type whose blocks they are; norms, biases and other tensors stay as they are.
pub fn retyped(info: &TensorInfo, dtype: DType) -> DType {
    if is_matrix(info) { for_rows(info.row_len(), dtype) } else { info.dtype }
}

/// `dtype`, or where rows of so many values are no whole blocks of it the next best type whose blocks they are.
pub fn for_rows(row_len: usize, dtype: DType) -> DType {
    let mut to = dtype;
    while !row_len.is_multiple_of(to.block_len()) {
        to = next_best(to).expect("a row is whole blocks of one value");
    }
    to
}

/// Whether a tensor holds weights that may be of any type; those of experts are matrices side by side. Their biases, what chooses
/// among experts (others would be chosen) and short convolutions stay as they are, as llama.cpp leaves them.
pub fn is_matrix(info: &TensorInfo) -> bool {
    const KEPT: [&str; 3] = ["ffn_gate_inp.weight", "shortconv.conv.weight", "ssm_conv1d.weight"];
    let is_kept = !info.name.ends_with(".weight") || KEPT.iter().any(|kept| info.name.ends_with(kept));
    (2..=3).contains(&info.shape.len()) && info.rows() > 1 && !is_kept
}

/// The type that stands in for one whose blocks do not fit the rows: llama.cpp's choice, of blocks of 32 values; and f16 where
/// those do not fit either.
pub fn next_best(dtype: DType) -> Option<DType> {
    match dtype {
        DType::Q2K | DType::Q3K | DType::IQ4XS | DType::NVFP4 => Some(DType::IQ4NL),
        DType::Q4K => Some(DType::Q5_0),
        DType::Q5K => Some(DType::Q5_1),
        DType::Q6K => Some(DType::Q8_0),
        dtype if dtype.block_len() > 1 => Some(DType::F16),
        _ => None,
    }
}

/// Decodes rows of a tensor and encodes them as `to`, a chunk at a time on every core. `n` is how many values they have.
///
/// # Errors
/// When `n` values are no whole blocks of either type, or `bytes` are not theirs.
pub fn convert(from: DType, bytes: &[u8], n: usize, to: DType) -> Result<Vec<u8>, CodecError> {
    let mut out = vec![0; to.row_bytes(n)?];
    let chunks = n.div_ceil(CHUNK).div_ceil(limits::n_cores()).max(1);
    let (in_share, out_share) = (from.row_bytes(chunks * CHUNK)?, to.row_bytes(chunks * CHUNK)?);
    let work = |bytes: &[u8], out: &mut [u8]| {
        let mut values = vec![0.0; CHUNK];
        let pieces = bytes.chunks(from.row_bytes(CHUNK)?).zip(out.chunks_mut(to.row_bytes(CHUNK)?));
        for (bytes, out) in pieces {
            let values = &mut values[..out.len() / to.block_bytes() * to.block_len()];
            kvant_codec::decode(from, bytes, values)?;
            kvant_codec::encode(to, values, out)?;
        }
        Ok(())
    };
    // Not every system has threads.
    if in_share >= bytes.len() {
        work(bytes, &mut out)?;
        return Ok(out);
    }
    std::thread::scope(|scope| {
        let shares = bytes.chunks(in_share).zip(out.chunks_mut(out_share));
        let shares: Vec<_> = shares.map(|(bytes, out)| scope.spawn(move || work(bytes, out))).collect();
        shares.into_iter().try_for_each(|share| share.join().expect("codecs do not panic"))
    })?;
    Ok(out)
}
