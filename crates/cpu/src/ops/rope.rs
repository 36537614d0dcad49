//! Rotary position embedding (RoFormer, arXiv 2104.09864) of whole heads, with the per-head norm
//! that may precede it.
//!
//! A pair `(a, b)` of a head becomes `(a cos - b sin, a sin + b cos)`.

use kvant_backend::{Heads, Pairing, RopeParams};

use crate::host::disjoint::DisjointMut;
use crate::host::pool::Pool;
use crate::ops::norm::inverse_rms;

/// Minimum number of values for a parallel region: below it, waking threads costs more than the
/// work.
const MIN_PARALLEL_VALUES: usize = 16 * 1024;

/// Normalizes (weight `[heads.dim]` or one for each head, eps) and rotates the first rows of `x`
/// `[rows, heads.n * heads.dim]` by `angles` `[rows, n_rot / 2, 2]`. Shapes have been checked.
pub(crate) fn rope(
    pool: &Pool,
    x: &mut [f32],
    rows: usize,
    heads: Heads,
    norm: Option<(&[f32], f32)>,
    params: RopeParams,
    angles: &[f32],
) {
    let cols = heads.n * heads.dim;
    let row = |row: &mut [f32], angles: &[f32]| {
        if let Some((weight, eps)) = norm {
            let weights = weight.chunks_exact(heads.dim).cycle();
            row.chunks_exact_mut(heads.dim)
                .zip(weights)
                .for_each(|(head, weight)| norm_in_place(head, weight, eps));
        }
        for head in row.chunks_exact_mut(heads.dim) {
            rotate_pairs(&mut head[..params.n_rot], params.pairing, angles);
        }
    };
    if params.n_rot == 0 && norm.is_none() || cols == 0 {
        return;
    }
    let shards = DisjointMut::new(x);
    let job = |r: usize| {
        // SAFETY: one call of this job writes each row.
        let x = unsafe { shards.part(r * cols..(r + 1) * cols) };
        row(x, &angles[r * params.n_rot..][..params.n_rot]);
    };
    if rows * cols < MIN_PARALLEL_VALUES {
        (0..rows).for_each(job);
    } else {
        pool.for_each(rows, &job);
    }
}

fn norm_in_place(head: &mut [f32], weight: &[f32], eps: f32) {
    let factor = inverse_rms(head, eps);
    for (v, w) in head.iter_mut().zip(weight) {
        *v = *v * factor * w;
    }
}

/// Rotates the pairs of `x` `[n_rot]` by `angles` `[n_rot / 2, 2]`.
fn rotate_pairs(x: &mut [f32], pairing: Pairing, angles: &[f32]) {
    let angles = angles.as_chunks::<2>().0;
    let pair = |a: &mut f32, b: &mut f32, [cos, sin]: [f32; 2]| {
        (*a, *b) = (*a * cos - *b * sin, *a * sin + *b * cos);
    };
    match pairing {
        Pairing::Interleaved => {
            for ([a, b], &angle) in x.as_chunks_mut::<2>().0.iter_mut().zip(angles) {
                pair(a, b, angle);
            }
        }
        Pairing::Halves => {
            let (low, high) = x.split_at_mut(x.len() / 2);
            for ((a, b), &angle) in low.iter_mut().zip(high).zip(angles) {
                pair(a, b, angle);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Both pairings, partial rotation of a head, more rows than the serial path takes.
    #[test]
    fn pairs_are_rotated_by_their_angle_after_the_norm() {
        let pool = Pool::new(2).unwrap();
        let heads = Heads { n: 3, dim: 10 };
        let weight: Vec<f32> = (0..10).map(|i| 0.5 + i as f32 / 8.0).collect();
        for rows in [1, 2, MIN_PARALLEL_VALUES / 30 + 1] {
            let n = rows * 30;
            let x: Vec<f32> = (0..n).map(|i| ((i * 37 % 101) as f32 - 50.0) / 16.0).collect();
            let angles: Vec<f32> = (0..rows * 4)
                .flat_map(|i| [(i as f32 * 0.7).cos() * 1.5, (i as f32 * 0.7).sin() * 1.5])
                .collect();
            for pairing in [Pairing::Interleaved, Pairing::Halves] {
                for norm in [None, Some((&weight[..], 1e-6))] {
                    let mut y = x.clone();
                    rope(&pool, &mut y, rows, heads, norm, RopeParams { pairing, n_rot: 8 }, &angles);
                    for (index, head) in y.chunks(10).enumerate() {
                        let mut want = x[index * 10..][..10].to_vec();
                        if let Some((weight, eps)) = norm {
                            crate::ops::norm::rms_norm(&x[index * 10..][..10], weight, eps, &mut want);
                        }
                        for pair in 0..4 {
                            let (i, j) = match pairing {
                                Pairing::Interleaved => (2 * pair, 2 * pair + 1),
                                Pairing::Halves => (pair, pair + 4),
                            };
                            let at = (index / 3 * 4 + pair) * 2;
                            let (a, b, cos, sin) = (want[i], want[j], angles[at], angles[at + 1]);
                            (want[i], want[j]) = (a * cos - b * sin, a * sin + b * cos);
                        }
                        assert_eq!(head, want, "{pairing:?} {rows} rows, head {index}");
                    }
                }
            }
        }
    }
}
