//! Weights of multi-head latent attention (MLA); [`Latent`] has its equations.

use std::ops::Range;

use kvant_backend::{Backend, SharedBytes, WeightSource};
use kvant_codec::DType;

use super::low_rank::RowsOf;
use super::{IndexWeights, Loader, LowRank};
use crate::family::QkNorm;
use crate::retype::next_best;
use crate::{Config, Latent, ModelError};

/// Weights of MLA. Matrices are `[n_out, n_in]`, per-head ones `[n_heads, n_out, n_in]`.
pub(crate) struct LatentAttention<B: Backend> {
    /// Low-rank query input, `[q_rank, n_embd]`, and its norm; `None` if queries are projected from
    /// the layer's input.
    pub(crate) of_queries: Option<(B::Matrix, B::Buffer)>,
    /// Query parts without and with RoPE, `[n_heads * k_dim, ..]` and `[n_heads * n_rot, ..]`.
    pub(crate) queries: [B::Matrix; 2],
    /// Projection of c, `[rank, n_embd]`.
    pub(crate) latent: B::Matrix,
    /// Norm of c, `[rank]`.
    pub(crate) latent_norm: B::Buffer,
    /// Projection of r, `[n_rot, n_embd]`.
    pub(crate) k_rope: B::Matrix,
    /// Norm of r before RoPE, `[n_rot]`.
    pub(crate) k_rope_norm: Option<B::Buffer>,
    /// From queries into the latent space, `[n_heads, rank, k_dim]`.
    pub(crate) to_latent: B::Experts,
    /// From the latent space to values, `[n_heads, v_dim, rank]`.
    pub(crate) from_latent: B::Experts,
    /// Attention sink of each query head, `[n_heads]`.
    pub(crate) sinks: Option<B::Buffer>,
    /// Output gates, one for each head or each of its values, `[n_heads, n_embd]` or `[n_heads *
    /// v_dim, n_embd]`.
    pub(crate) gate: Option<B::Matrix>,
    pub(crate) wo: B::Matrix,
    pub(crate) low_rank: LatentLowRank<B>,
    /// The index that selects the layer's tokens, if it has one of its own.
    pub(crate) index: Option<IndexWeights<B>>,
}

/// LoRA weights of MLA, and of attention with one shared KV head, whose input GEMM reads what its
/// pools do too.
pub(crate) struct LatentLowRank<B: Backend> {
    /// Of the input GEMM: c, r, the low-rank query input or, without one, both query parts, gates,
    /// and the key and heads of an index.
    pub(crate) input: Option<LowRank<B>>,
    /// Of both query parts, if queries are low-rank, and of the queries of an index.
    pub(crate) queries: Option<LowRank<B>>,
    /// Of the output projection.
    pub(crate) output: Option<LowRank<B>>,
}

/// K and V projections of all heads in one tensor, in older files.
const BOTH: &str = "attn_kv_b.weight";

impl<B: Backend> Loader<'_, B> {
    pub(super) fn latent_attention(
        &mut self,
        c: &Config,
        index: usize,
        latent: Latent,
    ) -> Result<LatentAttention<B>, ModelError> {
        let name = |suffix: &str| format!("blk.{index}.{suffix}");
        let Latent { q_rank, rank, n_rot, k_dim, v_dim } = latent;
        let n = c.layers[index].heads.n_heads;
        let whole = latent.whole();
        let both = [0..rank, rank..rank + n_rot];
        let [into, k_rope] =
            both.map(|rows| RowsOf::some(name("attn_kv_a_mqa.weight"), rank + n_rot, [rows]));
        let queries = |tensor: &str| {
            let parts = [0..k_dim, k_dim..whole];
            parts.map(|part| RowsOf::some(name(tensor), n * whole, rows_of_heads(n, whole, part)))
        };
        let spec = &c.layers[index];
        let q_norm = q_rank.map(|rank| self.vector(&name("attn_q_a_norm.weight"), rank)).transpose()?;
        let normed_rot = (spec.norms.heads == QkNorm::SharedKey).then_some(n_rot);
        let token_index = spec.index.filter(|of| of.selects);
        let index_rows = token_index.map(|of| Self::rows_of_index(of, latent, index));
        let mut rows = vec![into, k_rope];
        match q_rank {
            None => rows.extend(queries("attn_q.weight")),
            Some(q_rank) => rows.push(RowsOf::all(name("attn_q_a.weight"), q_rank)),
        }
        rows.extend(spec.gate.map(|_| RowsOf::all(name("attn_gate.weight"), spec.n_gates())));
        rows.extend(index_rows.iter().flat_map(|[key, heads, _]| [key.clone(), heads.clone()]));
        let (matrices, input) = self.group_of(c.n_embd, &rows)?;
        let mut matrices = matrices.into_iter();
        let mut next = || matrices.next().expect("a matrix for each");
        let (into, k_rope) = (next(), next());
        let (of_queries, queries, of_index_queries, of_parts) = match q_rank.zip(q_norm) {
            None => (None, [next(), next()], None, None),
            Some((q_rank, norm)) => {
                let mut rows = Vec::from(queries("attn_q_b.weight"));
                rows.extend(index_rows.map(|[.., of_queries]| of_queries));
                let (parts, of_parts) = self.group_of(q_rank, &rows)?;
                let mut parts = parts.into_iter();
                let mut part = || parts.next().expect("a matrix for each");
                (Some((next(), norm)), [part(), part()], parts.next(), of_parts)
            }
        };
        let gate = spec.gate.map(|_| next());
        let token_index = match (token_index, of_index_queries) {
            (Some(of), Some(queries)) => {
                let key_norm = self.index_norm(of, latent, index)?;
                Some(IndexWeights { key: next(), heads: next(), queries, key_norm })
            }
            _ => None,
        };
        let [to_latent, from_latent] = self.through_latent(index, n, latent)?;
        let ([wo], output) = self.group(n * v_dim, [RowsOf::all(name("attn_output.weight"), c.n_embd)])?;
        Ok(LatentAttention {
            of_queries,
            queries,
            latent: into,
            latent_norm: self.vector(&name("attn_kv_a_norm.weight"), rank)?,
            k_rope,
            k_rope_norm: self.vector_if(normed_rot, &name("attn_k_norm.weight"))?,
            to_latent,
            from_latent,
            sinks: self.vector_if(spec.sinks.then_some(n), &name("attn_sinks.weight"))?,
            gate,
            wo,
            low_rank: LatentLowRank { input, queries: of_parts, output },
            index: token_index,
        })
    }

    /// Loads the matrices into the latent space and back, for `n` heads.
    fn through_latent(
        &mut self,
        index: usize,
        n: usize,
        Latent { rank, k_dim, v_dim, .. }: Latent,
    ) -> Result<[B::Experts; 2], ModelError> {
        let [keys, values, both] =
            ["attn_k_b.weight", "attn_v_b.weight", BOTH].map(|suffix| format!("blk.{index}.{suffix}"));
        if self.has(&keys) || !self.has(&both) {
            // Some files have both forms.
            self.used.insert(both);
            return Ok([self.stack(&keys, [k_dim, rank, n])?, self.stack(&values, [rank, v_dim, n])?]);
        }
        let whole = k_dim + v_dim;
        let some = |part| RowsOf::some(both.clone(), n * whole, rows_of_heads(n, whole, part));
        let source = self.source_of(&some(0..k_dim), rank)?;
        let to_latent = self.backend.upload_experts(transposed(&source, [n, k_dim, rank], &both)?, n)?;
        let source = self.source_of(&some(k_dim..whole), rank)?;
        Ok([to_latent, self.backend.upload_experts(source, n)?])
    }
}

/// Returns a range of the rows of each of `n` heads with `whole` rows.
fn rows_of_heads(n: usize, whole: usize, part: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    (0..n).map(move |head| head * whole + part.start..head * whole + part.end)
}

/// Transposes matrices `[n, rows, cols]` to `[n, cols, rows]`: in the same type if it stores single
/// values, else in the best type of similar precision.
fn transposed(
    source: &WeightSource,
    [n, rows, cols]: [usize; 3],
    name: &str,
) -> Result<WeightSource, ModelError> {
    let bad = |error: kvant_codec::CodecError| {
        let expected = "matrices that can be transposed".to_owned();
        ModelError::Value { key: name.to_owned(), expected, got: error.to_string() }
    };
    let mut values = vec![0.0; n * rows * cols];
    kvant_codec::decode(source.dtype, &source.bytes, &mut values).map_err(bad)?;
    let mut transposed = vec![0.0; values.len()];
    for (from, to) in values.chunks_exact(rows * cols).zip(transposed.chunks_exact_mut(rows * cols)) {
        for (col, to) in to.chunks_exact_mut(rows).enumerate() {
            to.iter_mut().zip(from.iter().skip(col).step_by(cols)).for_each(|(to, from)| *to = *from);
        }
    }
    let mut dtype = match source.dtype {
        dtype if dtype.block_len() == 1 => dtype,
        // As its libraries round it.
        DType::FP8G128 => DType::BF16,
        _ => DType::Q8_0,
    };
    if !rows.is_multiple_of(dtype.block_len()) {
        dtype = next_best(dtype).expect("blocks of more than one value have a next best");
    }
    let mut bytes = vec![0; dtype.row_bytes(transposed.len()).map_err(bad)?];
    kvant_codec::encode(dtype, &transposed, &mut bytes).map_err(bad)?;
    Ok(WeightSource { dtype, n_out: n * cols, n_in: rows, bytes: SharedBytes::from(bytes) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_matrix_is_transposed_separately() {
        for (dtype, rows, becomes) in
            [(DType::F32, 2, DType::F32), (DType::F16, 2, DType::F16), (DType::Q8_0, 32, DType::Q8_0)]
        {
            let (n, cols) = (3, 32);
            // Whole numbers that quantize exactly with a step of one.
            let value = |matrix: usize, row: usize, col: usize| match (row + col) % 32 {
                0 => 127.0,
                _ => ((matrix * 31 + row * 7 + col * 3) % 100) as f32,
            };
            let all = (0..n).flat_map(|m| (0..rows).flat_map(move |r| (0..cols).map(move |c| (m, r, c))));
            let values: Vec<f32> = all.map(|(m, r, c)| value(m, r, c)).collect();
            let mut bytes = vec![0; dtype.row_bytes(values.len()).unwrap()];
            kvant_codec::encode(dtype, &values, &mut bytes).unwrap();
            let source = WeightSource { dtype, n_out: n * rows, n_in: cols, bytes: bytes.into() };
            let got = transposed(&source, [n, rows, cols], "t").unwrap();
            assert_eq!((got.dtype, got.n_out, got.n_in), (becomes, n * cols, rows));
            let mut back = vec![0.0; values.len()];
            kvant_codec::decode(got.dtype, &got.bytes, &mut back).unwrap();
            let all = (0..n).flat_map(|m| (0..cols).flat_map(move |c| (0..rows).map(move |r| (m, r, c))));
            let want: Vec<f32> = all.map(|(m, r, c)| value(m, r, c)).collect();
            assert_eq!(back, want, "{dtype}");
        }
    }

    #[test]
    fn rows_of_heads_are_disjoint() {
        assert_eq!(rows_of_heads(3, 10, 2..5).collect::<Vec<_>>(), [2..5, 12..15, 22..25]);
    }
}
