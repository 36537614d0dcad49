//! A product of a region: its operands and its destination.

use kvant_backend::Activation;

use super::kernels::{Gate, Register};
use super::matrix::CpuMatrix;
use crate::host::disjoint::DisjointMut;
use crate::simd::matmul::Simd;
use crate::simd::matmul::format::PANEL;

/// The left operand: rows of `x` `[rows, n_in]`, normalized first when `norm` (weight `[n_in]`,
/// eps) is given.
#[derive(Clone, Copy)]
pub(crate) struct Operand<'a> {
    pub x: &'a [f32],
    pub n_in: usize,
    pub norm: Option<(&'a [f32], f32)>,
}

impl Operand<'_> {
    pub fn rows(&self) -> usize {
        self.x.len() / self.n_in
    }
}

/// One product and its destination.
pub(crate) struct Product<'a> {
    pub w: &'a CpuMatrix,
    /// `[n_out]`.
    pub bias: Option<&'a [f32]>,
    /// `[rows, n_out]`.
    pub y: DisjointMut<'a, f32>,
    pub to: Scatter<'a>,
    pub accumulate: bool,
    /// The factor on the product.
    pub gate: Option<Gating<'a>>,
}

/// The rows of `y` that the rows of a product are written to.
#[derive(Clone, Copy)]
pub(crate) enum Scatter<'a> {
    /// As many rows from this one on.
    Rows(usize),
    /// These rows, to which the product is added times each row's factor. A row occurs once.
    Picked { rows: &'a [u32], factors: &'a [f32] },
}

/// The gate of a product: `a(w x)`.
#[derive(Clone, Copy)]
pub(crate) struct Gating<'a> {
    /// A matrix of the product's shape, in panels of the same type.
    pub w: &'a CpuMatrix,
    pub activation: Activation,
    /// Biases of the gate's product and of the product that it multiplies, `[n_out]` each; the
    /// latter has no other bias.
    pub biases: Option<[&'a [f32]; 2]>,
}

impl Gating<'_> {
    /// Computes `u = a(g) * u` for the outputs of a panel for some rows, with biases added to both.
    pub(super) fn apply<S: Simd>(&self, simd: S, panel: usize, g: &mut [Register], u: &mut [Register]) {
        for (values, biases) in [&mut *g, &mut *u].into_iter().zip(self.biases.into_iter().flatten()) {
            for values in values {
                values.0.iter_mut().zip(&biases[panel * PANEL..]).for_each(|(value, bias)| *value += bias);
            }
        }
        simd.run(Gate { activation: self.activation, g, u });
    }
}
