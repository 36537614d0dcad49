//! xIELU (arXiv 2411.13010): `x (p x + b)` for positive x, else
//! `n (exp(min(x, eps)) - 1 - x) + b x`.

use kvant_backend::Xielu;

use crate::host::disjoint::DisjointMut;
use crate::host::pool::Pool;
use crate::ops::exp::exp;
use crate::simd::isa::Isa;
use crate::simd::vec16::{Lanes, Op, with_lanes};

/// Values of a work item.
const PIECE: usize = 1024;

/// Applies xIELU to every value.
pub(crate) fn xielu(isa: Isa, pool: &Pool, x: &mut [f32], numbers: Xielu) {
    let len = x.len();
    let x = DisjointMut::new(x);
    pool.for_each(len.div_ceil(PIECE), &|piece| {
        let piece = piece * PIECE..len.min((piece + 1) * PIECE);
        // SAFETY: one call of this job writes each chunk.
        let op = Activate { x: unsafe { x.part(piece) }, numbers };
        with_lanes!(isa, lanes => lanes.run(op), _ => activate(op.x, numbers));
    });
}

struct Activate<'a> {
    x: &'a mut [f32],
    numbers: Xielu,
}

impl Op for Activate<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, _: L) {
        // A plain loop, compiled for the kernel set.
        activate(self.x, self.numbers);
    }
}

#[inline(always)]
fn activate(x: &mut [f32], Xielu { positive, negative, slope, eps }: Xielu) {
    for x in x {
        let bounded = if *x < eps { *x } else { eps };
        // A NaN is not positive, and subtracted here.
        let below = negative * (exp(bounded) - 1.0 - *x) + slope * *x;
        *x = if *x > 0.0 { *x * (positive * *x + slope) } else { below };
    }
}
