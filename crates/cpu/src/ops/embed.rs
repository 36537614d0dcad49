//! Rows of an embedding table.

use kvant_backend::Matrix;

use crate::host::disjoint::DisjointMut;
use crate::host::pool::Pool;
use crate::ops::matmul::CpuMatrix;

/// Decodes row `tokens[i]` of `table` `[n_vocab, n_embd]`, times `scale`, into row `i` of `out`
/// `[tokens, n_embd]`. Shapes and token ids have been checked.
pub(crate) fn embed(pool: &Pool, table: &CpuMatrix, tokens: &[u32], scale: f32, out: &mut [f32]) {
    let n_embd = table.n_in();
    let out = DisjointMut::new(out);
    pool.for_each(tokens.len(), &|i| {
        // SAFETY: one call of this job writes each row.
        let row = unsafe { out.part(i * n_embd..(i + 1) * n_embd) };
        table.decode_row(tokens[i] as usize, row);
        row.iter_mut().for_each(|x| *x *= scale);
    });
}
