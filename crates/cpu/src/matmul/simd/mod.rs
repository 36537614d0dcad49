//! The vector operations that products are written in, once for every instruction set.
//!
//! A [`Kernel`] is generic over the token that proves the instructions and gives the operations. [`Simd::run`] compiles it for
//! that set; everything on the way there is `inline(always)`, so that the operations end up inside the one function that
//! has the instructions switched on.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(not(target_arch = "x86_64"))]
mod quads;

use super::panel::{Format, PANEL};

/// The most registers that a line, or sixteen floats, fill.
pub(super) const MAX_PARTS: usize = 2;
/// The most registers of weights that a blocked product holds at once.
pub(super) const MAX_ACROSS: usize = 2;

/// What is compiled for an instruction set.
pub(super) trait Kernel {
    /// What it gives back.
    type Output;

    /// The kernel's body. Implementations are `#[inline(always)]`.
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// One register at a time. The sixteen rows of a panel fill [`Simd::PARTS`] of them; `part` says which. Methods do lane by
/// lane what their name says.
///
/// Products are those of the equation in [`super`], with activations as the tile gives them. Sums are in f32, one for each
/// row of weights and of activations, and take the columns in their order: so a row's bits do not depend on the rows that are
/// multiplied with it.
pub(super) trait Simd: Copy + Send + Sync {
    /// Lanes of 32 bits: a signed integer, or four bytes.
    type Ints: Copy;
    /// Lanes of f32.
    type Floats: Copy;

    /// Registers that a line, or sixteen floats, fill.
    const PARTS: usize;
    /// Rows of a tile of f32 activations in a blocked product, which holds two registers of weights at once.
    const FLOAT_TILE: usize;

    /// Runs `kernel` with these instructions switched on.
    fn run<K: Kernel>(self, kernel: K) -> K::Output;

    fn load(self, line: &[u8; 64], part: usize) -> Self::Ints;
    fn store(self, a: Self::Ints, line: &mut [u8; 64], part: usize);
    fn splat_i(self, x: i32) -> Self::Ints;
    /// `a >> by & mask` in every byte. Bits that cross a byte must be masked away.
    fn field(self, a: Self::Ints, by: i32, mask: i8) -> Self::Ints;
    /// `low | a << left & mask` in every byte, to the right where `left` is negative.
    fn join(self, low: Self::Ints, a: Self::Ints, left: i32, mask: i8) -> Self::Ints;
    /// `a - zero` in every byte.
    fn less(self, a: Self::Ints, zero: u8) -> Self::Ints;
    /// `table[code]` for every byte, codes below 16.
    fn look_up(self, table: &[u8; 16], codes: Self::Ints) -> Self::Ints;

    fn splat(self, x: f32) -> Self::Floats;
    fn load_floats(self, x: &[f32; PANEL], part: usize) -> Self::Floats;
    fn store_floats(self, a: Self::Floats, x: &mut [f32; PANEL], part: usize);
    /// As [`Simd::store_floats`], past the caches where there is an instruction for it and `x` begins a line. Others see it after
    /// [`Simd::end_streams`].
    #[inline(always)]
    fn stream_floats(self, a: Self::Floats, x: &mut [f32; PANEL], part: usize) {
        self.store_floats(a, x, part);
    }
    /// Has what was written past the caches come before what is written from now on.
    #[inline(always)]
    fn end_streams(self) {}
    /// The f16 of half `half` of a line.
    fn load_f16(self, line: &[u8; 64], half: usize, part: usize) -> Self::Floats;
    /// The bf16 of half `half` of a line.
    fn load_bf16(self, line: &[u8; 64], half: usize, part: usize) -> Self::Floats;
    /// The bytes of quarter `quarter` of a line, unsigned.
    fn load_bytes(self, line: &[u8; 64], quarter: usize, part: usize) -> Self::Floats;
    /// The bytes of quarter `quarter` of a line as E8M0.
    fn load_e8m0(self, line: &[u8; 64], quarter: usize, part: usize) -> Self::Floats;
    /// The bytes of quarter `quarter` of a line, below 128, as E4M3, times [`E4M3_UNIT`](super::panel::E4M3_UNIT).
    fn load_e4m3(self, line: &[u8; 64], quarter: usize, part: usize) -> Self::Floats;
    fn to_floats(self, a: Self::Ints) -> Self::Floats;
    /// `a · scale`, rounded once, for integers below 2^22 and [short](Format::HAS_SHORT_SCALES) scales. `lifted` is what
    /// [`Simd::lifted`] gives for the scale.
    #[inline(always)]
    fn scaled(self, a: Self::Ints, scale: Self::Floats, lifted: Self::Floats) -> Self::Floats {
        let _ = lifted;
        self.mul(self.to_floats(a), scale)
    }
    /// What [`Simd::scaled`] takes back, where its integers are lifted to where a float's last bit counts ones.
    #[inline(always)]
    fn lifted(self, scale: Self::Floats) -> Self::Floats {
        scale
    }
    fn bits_to_floats(self, a: Self::Ints) -> Self::Floats;
    fn sub(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    fn mul(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// `a · b + c`, rounded once; twice where no instruction does (WebAssembly).
    fn mul_add(self, a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats;

    /// Registers of codes that a blocked product holds at once, of a format.
    fn across<F: Format>() -> usize;
    /// Groups whose products one short sum takes.
    fn groups_in_short_sum<F: Format>() -> usize;
    /// What a sum starts from: what the code of zero adds too much, taken back where the products contain it and short sums do not.
    /// `neg_sum` is minus the sum of the activations, as [`Tile`](super::quantise::Tile) has it.
    fn start<F: Format>(self, neg_sum: i32) -> Self::Ints;
    /// A short sum, to be added to `sum`. `neg_sum` is that of its groups where they fill half a block or all of it.
    fn short<F: Format>(self, sum: Self::Ints, neg_sum: i32) -> Self::Ints;
    /// Adds the products of the factors `w` (unsigned bytes) and `x` (signed ones) to a short sum.
    fn dot<F: Format>(self, short: Self::Ints, w: Self::Ints, x: Self::Ints) -> Self::Ints;
    /// `sum`, with the short sum that was begun for it.
    fn widen(self, sum: Self::Ints, short: Self::Ints) -> Self::Ints;
}
