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

/// Parts of the names of tensors that stay as they are though they have rows, as llama.cpp leaves them: they are small, and what
/// they hold is not summed over many products, so that errors in it do not average out.
const KEPT: [&str; 36] = [
    // Norms of each head.
    "_norm.weight",
    // What chooses among experts: others would be chosen.
    "ffn_gate_inp.weight",
    "ffn_gate_tid2eid.weight",
    // Streams and embeddings beside the main ones.
    "altup",
    "laurel",
    "per_layer_model_proj",
    // Convolutions of a few taps.
    "ssm_conv1d",
    "shortconv.conv.weight",
    // What chooses among tokens.
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
    // Positions and kinds of tokens, of text and of images.
    "position_embd",
    "token_types.weight",
    "attn_rel_b.weight",
    "sam.pos_embd",
    ".rel_pos",
    // Pieces of models that see and hear.
    "sam.neck.",
    "sam.net_",
    ".patch_embd",
    ".patch_merger",
    "a.rvq.codebook",
    "mm.a.code_embd",
];

/// Whether a tensor holds weights that may be of any type; those of experts are matrices side by side. Biases, and tensors whose
/// names are kept by llama.cpp too (`KEPT`), are none.
pub fn is_matrix(info: &TensorInfo) -> bool {
    let is_kept = !info.name.ends_with(".weight") || KEPT.iter().any(|kept| info.name.contains(kept));
    (2..=3).contains(&info.shape.len()) && info.rows() > 1 && !is_kept
}

/// The type that stands in for one whose blocks do not fit the rows, of blocks of 32 values; and f16 where those do not fit either.
/// llama.cpp's choice, but that it takes q4_0 for q2_K and q3_K: iq4_nl loses less in as many bytes.
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

#[cfg(test)]
mod tests {
    use super::*;
    use kvant_gguf::{Gguf, GgufWriter};

    /// Which of these tensors, each of f32, are matrices.
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
    fn what_llama_cpp_leaves_as_it_is_stays_so_whatever_its_shape() {
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
