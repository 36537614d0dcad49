//! Conversion of weights to another type than their file's.

use kvant_backend::limits;
use kvant_codec::{CodecError, DType};
use kvant_gguf::TensorInfo;

/// Values converted together; a multiple of every block length.
const CHUNK: usize = 1 << 16;

/// Returns the type of a tensor when weight matrices are requested as `dtype`: `dtype`, or the next
/// best type whose blocks divide its rows; norms, biases and other tensors are unchanged.
pub fn retyped(info: &TensorInfo, dtype: DType) -> DType {
    if is_matrix(info) { for_rows(info.row_len(), dtype) } else { info.dtype }
}

/// Returns `dtype`, or the next best type whose blocks divide rows of this length.
pub fn for_rows(row_len: usize, dtype: DType) -> DType {
    let mut to = dtype;
    while !row_len.is_multiple_of(to.block_len()) {
        to = next_best(to).expect("a row is whole blocks of one value");
    }
    to
}

/// Parts of the names of tensors that are never quantized although they have rows, as in llama.cpp:
/// they are small, and their values are not summed over many products, so errors would not average
/// out.
const KEPT: [&str; 39] = [
    // Per-head norms.
    "_norm.weight",
    // Routers: quantization would change the selected experts.
    "ffn_gate_inp.weight",
    "ffn_gate_tid2eid.weight",
    // Side streams and embeddings.
    "altup",
    "laurel",
    "per_layer_model_proj",
    // Hyper-connections.
    "hc_attn_fn.weight",
    "hc_ffn_fn.weight",
    "output_hc_fn.weight",
    // Convolutions of a few taps.
    "ssm_conv1d",
    "shortconv.conv.weight",
    // Token selection of sparse attention.
    "indexer.k_proj.weight",
    "indexer.q_proj.weight",
    // Mixing over time in RWKV.
    "time_mix_first.weight",
    "time_mix_w0.weight",
    "time_mix_w1.weight",
    "time_mix_w2.weight",
    "time_mix_v0.weight",
    "time_mix_v1.weight",
    "time_mix_v2.weight",
    "time_mix_a0.weight",
    "time_mix_a1.weight",
    "time_mix_a2.weight",
    "time_mix_g1.weight",
    "time_mix_g2.weight",
    "time_mix_decay_w1.weight",
    "time_mix_decay_w2.weight",
    "time_mix_lerp_fused.weight",
    // Embeddings of positions and token types, of text and images.
    "position_embd",
    "token_types.weight",
    "attn_rel_b.weight",
    "sam.pos_embd",
    ".rel_pos",
    // Parts of vision and audio encoders.
    "sam.neck.",
    "sam.net_",
    ".patch_embd",
    ".patch_merger",
    "a.rvq.codebook",
    "mm.a.code_embd",
];

/// Returns whether a tensor holds weights that may have any type; expert tensors are matrices side
/// by side. False for biases, and for tensors that llama.cpp never quantizes (`KEPT`).
pub fn is_matrix(info: &TensorInfo) -> bool {
    let is_kept = !info.name.ends_with(".weight") || KEPT.iter().any(|kept| info.name.contains(kept));
    (2..=3).contains(&info.shape.len()) && info.rows() > 1 && !is_kept
}

/// Returns the replacement for a type whose blocks do not divide the rows: a type with blocks of 32
/// values, and f16 if those do not divide them either. llama.cpp's choice, except that it uses q4_0
/// for q2_K and q3_K: iq4_nl has a smaller error in as many bytes.
pub fn next_best(dtype: DType) -> Option<DType> {
    match dtype {
        DType::Q2K | DType::Q3K | DType::IQ3 | DType::IQ4XS | DType::NVFP4 | DType::NVFP4G256 => {
            Some(DType::IQ4NL)
        }
        DType::TQ3T | DType::NF4G64 | DType::FP4G64 => Some(DType::IQ4NL),
        DType::Q4K => Some(DType::Q5_0),
        DType::Q5K => Some(DType::Q5_1),
        DType::Q6K | DType::FP8G128 => Some(DType::Q8_0),
        dtype if dtype.block_len() > 1 => Some(DType::F16),
        _ => None,
    }
}

/// Decodes rows of a tensor and encodes them as `to`, in chunks on every core. `n` is the number of
/// values.
///
/// # Errors
///
/// When `n` values are not whole blocks of both types, or `bytes` has the wrong length.
pub fn convert(from: DType, bytes: &[u8], n: usize, to: DType) -> Result<Vec<u8>, CodecError> {
    // Rejects values that are not whole blocks.
    to.row_bytes(n)?;
    let block = [to.block_len(), to.block_bytes()];
    recode(from, bytes, n, block, |_, values, out| kvant_codec::encode(to, values, out))
}

/// Decodes `n` values, and encodes them in chunks on every core, in blocks of as many values and
/// bytes as `block`: `encode` receives the index of the first value, the values, and memory for
/// their blocks.
///
/// # Errors
///
/// Those of `encode`; `bytes` of the wrong length.
pub fn recode(
    from: DType,
    bytes: &[u8],
    n: usize,
    block: [usize; 2],
    encode: impl Fn(usize, &[f32], &mut [u8]) -> Result<(), CodecError> + Sync,
) -> Result<Vec<u8>, CodecError> {
    let [block_len, block_bytes] = block;
    let mut out = vec![0; n / block_len * block_bytes];
    let chunks = n.div_ceil(CHUNK).div_ceil(limits::n_cores()).max(1);
    let share = chunks * CHUNK;
    let (in_share, out_share) = (from.row_bytes(share)?, share / block_len * block_bytes);
    let in_chunk = from.row_bytes(CHUNK)?;
    let work = |first: usize, bytes: &[u8], out: &mut [u8]| {
        let mut values = vec![0.0; CHUNK];
        let pieces = bytes.chunks(in_chunk).zip(out.chunks_mut(CHUNK / block_len * block_bytes));
        for (piece, (bytes, out)) in pieces.enumerate() {
            let values = &mut values[..out.len() / block_bytes * block_len];
            kvant_codec::decode(from, bytes, values)?;
            encode(first + piece * CHUNK, values, out)?;
        }
        Ok(())
    };
    // Threads are unavailable on some systems.
    if in_share >= bytes.len() {
        work(0, bytes, &mut out)?;
        return Ok(out);
    }
    let work = &work;
    std::thread::scope(|scope| {
        let shares = bytes.chunks(in_share).zip(out.chunks_mut(out_share));
        let shares: Vec<_> = shares
            .enumerate()
            .map(|(i, (bytes, out))| scope.spawn(move || work(i * share, bytes, out)))
            .collect();
        shares.into_iter().try_for_each(|share| share.join().expect("codecs do not panic"))
    })?;
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvant_gguf::{Gguf, GgufWriter};

    /// Returns which of these f32 tensors are matrices.
    fn matrices(tensors: &[(&str, &[usize])]) -> Vec<bool> {
        let mut writer = GgufWriter::new();
        for (name, shape) in tensors {
            writer.add_tensor(name, shape, DType::F32).unwrap();
        }
        let mut bytes = Vec::new();
        let zeros = |shape: &[usize]| vec![0; 4 * shape.iter().product::<usize>()];
        writer
            .write_to(&mut bytes, |sink| {
                tensors.iter().try_for_each(|(name, shape)| sink.bytes(name, &zeros(shape)))
            })
            .unwrap();
        Gguf::from_bytes(bytes).unwrap().tensors().iter().map(is_matrix).collect()
    }

    #[test]
    fn tensors_that_llama_cpp_never_quantizes_are_no_matrices() {
        let kept = "blk.0.attn_q_norm.weight blk.0.attn_k_norm.weight blk.0.ssm_norm.weight \
            blk.0.ffn_gate_inp.weight blk.0.ffn_gate_inp.bias blk.0.ffn_gate_tid2eid.weight blk.0.altup_proj.weight \
            altup_unembd_proj.weight blk.0.laurel_l.weight blk.0.laurel_r.weight per_layer_model_proj.weight \
            position_embd.weight token_types.weight blk.0.ssm_conv1d.weight blk.0.ssm_conv1d_q.weight \
            blk.0.shortconv.conv.weight blk.0.time_mix_first.weight blk.0.time_mix_w0.weight blk.0.time_mix_w1.weight \
            blk.0.time_mix_w2.weight blk.0.time_mix_v0.weight blk.0.time_mix_v1.weight blk.0.time_mix_v2.weight \
            blk.0.time_mix_a0.weight blk.0.time_mix_a1.weight blk.0.time_mix_a2.weight blk.0.time_mix_g1.weight \
            blk.0.time_mix_g2.weight blk.0.time_mix_decay_w1.weight blk.0.time_mix_decay_w2.weight \
            blk.0.time_mix_lerp_fused.weight enc.blk.0.attn_rel_b.weight blk.0.indexer.k_proj.weight \
            blk.0.indexer.q_proj.weight v.patch_embd.weight v.position_embd.weight v.sam.pos_embd.weight v.blk.0.rel_pos_h.weight \
            v.sam.neck.0.weight v.sam.net_2.weight mm.patch_merger.weight a.rvq.codebook.0.weight mm.a.code_embd.weight \
            blk.0.ffn_up.bias blk.0.attn_q.scale";
        for name in kept.split_whitespace() {
            assert_eq!(matrices(&[(name, &[64, 4])]), [false], "{name}");
        }
    }

    #[test]
    fn weights_of_two_or_three_sizes_and_several_rows_are_matrices() {
        let names = "token_embd.weight output.weight per_layer_token_embd.weight blk.0.attn_q.weight blk.0.attn_v.weight \
            blk.0.attn_qkv.weight blk.0.attn_kv_b.weight blk.0.attn_output.weight blk.0.ffn_gate.weight blk.0.ffn_down.weight \
            blk.0.ffn_gate_exps.weight blk.0.ssm_in.weight blk.0.ssm_out.weight blk.0.time_mix_key.weight \
            blk.0.shortconv.in_proj.weight blk.0.inp_gate.weight";
        for name in names.split_whitespace() {
            let shapes: [&[usize]; 5] = [&[64], &[64, 1], &[64, 2], &[64, 2, 3], &[8, 2, 2, 2]];
            let got = shapes.map(|shape| matrices(&[(name, shape)])[0]);
            assert_eq!(got, [false, false, true, true, false], "{name}");
        }
    }
}
