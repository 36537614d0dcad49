//! Products of panels, written once over [`Simd`](crate::simd::matmul::Simd).

#[cfg(target_arch = "aarch64")]
mod bfmmla;
mod codes;
mod floats;
mod halves;
#[cfg(target_arch = "aarch64")]
mod i8mm;
mod prefetch;
mod tiles;
mod unpack;

use bytemuck::{Pod, Zeroable};
use kvant_backend::Activation;
use kvant_codec::nf4;

use super::gate;
use super::panel::Line;
use super::partition::PAIR;
use crate::simd::matmul::format::{GROUPS, PANEL};
use crate::simd::matmul::{Kernel, Simd};

#[cfg(target_arch = "aarch64")]
pub(super) use bfmmla::{ArrangeBf16, MultiplyBfmmla};
pub(super) use codes::{Gemv, Multiply, subs};
pub(super) use floats::{GemvFloats, MultiplyFloats, UnpackFloats};
pub(super) use halves::{
    CodesToHalves, FloatsToHalves, HALVES_BLOCKS, HalvesChunk, HalvesPanels, multiply_bf16,
};
#[cfg(target_arch = "aarch64")]
pub(super) use i8mm::{ArrangeI8mm, MultiplyI8mm, SQUARES_TILE};
pub(super) use tiles::MultiplyTiles;
pub(super) use unpack::Unpack;

/// Blocks of 32 columns in a chunk: whole units of every format.
pub(super) const CHUNK_BLOCKS: usize = 16;
/// Columns in a chunk of floats: whole lines of every format, and whole groups of those with
/// scales.
pub(super) const CHUNK_COLS: usize = 128;

/// Sixteen floats.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
pub(super) struct Register(pub [f32; PANEL]);

impl Register {
    pub const ZERO: Self = Self([0.0; PANEL]);
}

/// Codes of 32 columns of two panels, one to a byte, `[group][panel]`, or in the order of
/// [`MultiplyChunk::arrange`](super::kernel_set::MultiplyChunk::arrange).
pub(super) type BlockCodes = [[Line; PAIR]; GROUPS];

/// Codes and scales of some columns of two panels.
#[derive(Clone)]
pub(super) struct Chunk {
    pub codes: [BlockCodes; CHUNK_BLOCKS],
    /// `[block][sub-block][panel]`.
    pub scales: [[[Register; PAIR]; 2]; CHUNK_BLOCKS],
    /// Contributions of the minima, in the order of the scales.
    pub mins: [[[Register; PAIR]; 2]; CHUNK_BLOCKS],
}

impl Chunk {
    pub const ZERO: Self = Self {
        codes: [[[Line::ZERO; PAIR]; GROUPS]; CHUNK_BLOCKS],
        scales: [[[Register::ZERO; PAIR]; 2]; CHUNK_BLOCKS],
        mins: [[[Register::ZERO; PAIR]; 2]; CHUNK_BLOCKS],
    };
}

/// Values of some columns of two panels, `[column][panel]`.
pub(super) type FloatChunk = [[Register; PAIR]; CHUNK_COLS];

/// Scales of the values of a chunk, `[group][panel]`.
pub(super) type FloatScales = [[Register; PAIR]; CHUNK_COLS / MIN_GROUP];

/// Columns of the smallest group of values that share scales.
pub(super) const MIN_GROUP: usize = nf4::LEN;

/// Sums of one tile, `[panel][row of the tile]`, with one value for each row of the panel.
pub(super) type Sums<const T: usize> = [[Register; T]; PAIR];

/// Returns the panel, and its part, in register `index` of the pair's `PAIR * PARTS`.
#[inline(always)]
fn place<S: Simd>(index: usize) -> (usize, usize) {
    (index / S::PARTS % PAIR, index % S::PARTS)
}

/// Computes `u *= a(g)` for each value, `a` the activation. Registers are independent, so several
/// at once take little longer than one.
pub(super) struct Gate<'a> {
    pub activation: Activation,
    pub g: &'a [Register],
    pub u: &'a mut [Register],
}

impl Kernel for Gate<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for (g, u) in self.g.iter().zip(self.u) {
            gate::gate(self.activation, &g.0, &mut u.0);
        }
    }
}
