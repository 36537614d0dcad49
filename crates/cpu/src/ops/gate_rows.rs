//! Gates of whole rows and of single values; scaling and addition of all values.

use kvant_backend::{Activation, Gate};

use crate::host::disjoint::DisjointMut;
use crate::host::pool::Pool;
use crate::ops::exp::exp;
use crate::ops::matmul::gate as activated;
use crate::simd::isa::Isa;
use crate::simd::vec16::{Lanes, Op, with_lanes};

/// Multiplies each row of `y` `[rows, cols]` by `gate` of its value of `gates` `[rows]`, or more.
pub(crate) fn gate_rows(pool: &Pool, y: &mut [f32], gates: &[f32], cols: usize, gate: Gate) {
    let rows = y.len().checked_div(cols).unwrap_or(0);
    let y = DisjointMut::new(y);
    pool.for_each(rows, &|row| {
        let mut factor = [1.0];
        Multiply { by: By::Gate(gate), y: &mut factor, gates: &gates[row..=row] }.multiply();
        // SAFETY: one call of this job writes each row.
        let y = unsafe { y.part(row * cols..(row + 1) * cols) };
        y.iter_mut().for_each(|y| *y *= factor[0]);
    });
}

/// Values of a work item.
const PIECE: usize = 1024;

/// Multiplies each value of `y` by `gate` of the corresponding value of `gates`.
pub(crate) fn gate(isa: Isa, pool: &Pool, y: &mut [f32], gates: &[f32], gate: Gate) {
    multiply(isa, pool, y, gates, By::Gate(gate));
}

/// Computes `y = a(g) y` for each value of `y` and g of `gates`, a the activation.
pub(crate) fn activate(isa: Isa, pool: &Pool, y: &mut [f32], gates: &[f32], activation: Activation) {
    multiply(isa, pool, y, gates, By::Activation(activation));
}

fn multiply(isa: Isa, pool: &Pool, y: &mut [f32], gates: &[f32], by: By) {
    let len = y.len();
    let y = DisjointMut::new(y);
    pool.for_each(len.div_ceil(PIECE), &|piece| {
        let piece = piece * PIECE..len.min((piece + 1) * PIECE);
        // SAFETY: one call of this job writes each chunk.
        let (y, gates) = (unsafe { y.part(piece.clone()) }, &gates[piece]);
        let op = Multiply { by, y, gates };
        with_lanes!(isa, lanes => lanes.run(op), _ => op.multiply());
    });
}

/// A function of a gate.
#[derive(Clone, Copy)]
enum By {
    Gate(Gate),
    Activation(Activation),
}

struct Multiply<'a> {
    by: By,
    y: &'a mut [f32],
    gates: &'a [f32],
}

impl Multiply<'_> {
    #[inline(always)]
    fn multiply(self) {
        let Self { by, y, gates } = self;
        let activation = match by {
            By::Gate(Gate::Sigmoid) => return y.iter_mut().zip(gates).for_each(|(y, g)| *y /= 1.0 + exp(-g)),
            By::Gate(Gate::Plain) => return y.iter_mut().zip(gates).for_each(|(y, g)| *y *= g),
            By::Gate(Gate::Softplus) => {
                return y.iter_mut().zip(gates).for_each(|(y, g)| *y *= softplus(*g));
            }
            By::Gate(Gate::Silu) => Activation::Silu,
            By::Gate(Gate::Gelu) => Activation::Gelu,
            By::Activation(activation) => activation,
        };
        activated(activation, gates, y);
    }
}

/// Returns `ln(1 + exp(x))`.
pub(crate) fn softplus(x: f32) -> f32 {
    // `max` drops a NaN, and the logarithm keeps it.
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

impl Op for Multiply<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, _: L) {
        // Plain loops, compiled for the kernel set.
        self.multiply();
    }
}

/// Multiplies each value of `x` by `by`.
pub(crate) fn scale(pool: &Pool, x: &mut [f32], by: f32) {
    let len = x.len();
    let x = DisjointMut::new(x);
    pool.for_each(len.div_ceil(PIECE), &|piece| {
        let piece = piece * PIECE..len.min((piece + 1) * PIECE);
        // SAFETY: one call of this job writes each chunk.
        unsafe { x.part(piece) }.iter_mut().for_each(|x| *x *= by);
    });
}

/// Adds the values of `y` to those of `x`.
pub(crate) fn add(pool: &Pool, x: &mut [f32], y: &[f32]) {
    let len = x.len();
    let x = DisjointMut::new(x);
    pool.for_each(len.div_ceil(PIECE), &|piece| {
        let piece = piece * PIECE..len.min((piece + 1) * PIECE);
        // SAFETY: one call of this job writes each chunk.
        unsafe { x.part(piece.clone()) }.iter_mut().zip(&y[piece]).for_each(|(x, y)| *x += y);
    });
}
