//! Soft cap of values: `cap tanh(x / cap)` (arXiv 2408.00118).

use crate::host::disjoint::DisjointMut;
use crate::host::pool::Pool;
use crate::ops::exp::tanh_of_half;
use crate::simd::isa::Isa;
use crate::simd::vec16::{Lanes, Op, with_lanes};

/// Values of a work item: the logits of a large vocabulary are worth several threads.
const PIECE: usize = 8 * 1024;

/// Applies the soft cap to every value. Values that are not finite become NaN.
pub(crate) fn soft_cap(isa: Isa, pool: &Pool, x: &mut [f32], cap: f32) {
    let len = x.len();
    let x = DisjointMut::new(x);
    pool.for_each(len.div_ceil(PIECE), &|piece| {
        let piece = piece * PIECE..len.min((piece + 1) * PIECE);
        // SAFETY: one call of this job writes each chunk.
        let op = Bound { x: unsafe { x.part(piece) }, cap };
        with_lanes!(isa, lanes => lanes.run(op), _ => bound(op.x, cap));
    });
}

struct Bound<'a> {
    x: &'a mut [f32],
    cap: f32,
}

impl Op for Bound<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, _: L) {
        // A plain loop, compiled for the kernel set.
        bound(self.x, self.cap);
    }
}

/// Applies the cap, off by 6 roundings of it at most.
#[inline(always)]
fn bound(x: &mut [f32], cap: f32) {
    let rate = 2.0 / cap;
    for x in x {
        // A value that is not finite must not become the cap.
        *x = cap * tanh_of_half(*x * rate) + 0.0 * *x;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn non_finite_values_become_nan() {
        let mut x = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e30, -1e30, 0.0];
        soft_cap(Isa::Scalar, &Pool::new(1).unwrap(), &mut x, 30.0);
        assert!(x[..3].iter().all(|x| x.is_nan()), "{x:?}");
        assert_eq!(x[3..], [30.0, -30.0, 0.0]);
    }
}
