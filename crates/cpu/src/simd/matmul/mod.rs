//! The vector operations of matrix products, which are written once for every instruction set.
//!
//! A [`Kernel`] is generic over the token that proves the instructions and provides the operations.
//! [`Simd::run`] compiles it for that set; everything in between is `inline(always)`, so that the
//! operations end up inside the one function with the target features.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
pub(crate) mod format;
#[cfg(not(target_arch = "x86_64"))]
mod quads;

use format::{PANEL, WeightFormat};

/// Maximum registers of a line, or of sixteen floats.
pub(crate) const MAX_PARTS: usize = 2;
/// Maximum registers of weights that a GEMM holds at once.
pub(crate) const MAX_ACROSS: usize = 2;

/// A function compiled for an instruction set.
pub(crate) trait Kernel {
    /// Its result.
    type Output;

    /// Whether it looks up among 64 bytes ([`Simd::look_up_64`]), in which sets differ that share
    /// their other kernels.
    const LOOKS_UP_64: bool = false;

    /// Runs the kernel's body. Implementations are `#[inline(always)]`.
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// Operations on one register. The sixteen rows of a panel fill [`Simd::PARTS`] of them; `part` is
/// the index. Methods apply the operation of their name lane by lane.
///
/// Products are those of the equation in [`super`], with activations as the tile holds them. Sums
/// are in f32, one for each row of weights and of activations, and add the columns in order: so a
/// row's bits do not depend on the rows that are multiplied with it.
pub(crate) trait Simd: Copy + Send + Sync {
    /// Lanes of 32 bits: a signed integer, or four bytes.
    type Ints: Copy;
    /// Lanes of f32.
    type Floats: Copy;

    /// Registers of a line, or of sixteen floats.
    const PARTS: usize;
    /// Rows of a tile of f32 activations in a GEMM, which holds two registers of weights at once.
    const FLOAT_TILE: usize;

    /// Runs `kernel` with these target features.
    fn run<K: Kernel>(self, kernel: K) -> K::Output;

    fn load(self, line: &[u8; 64], part: usize) -> Self::Ints;
    fn store(self, a: Self::Ints, line: &mut [u8; 64], part: usize);
    fn splat_i(self, x: i32) -> Self::Ints;
    /// Returns `a >> by & mask` in every byte. Bits that cross a byte must be masked away.
    fn field(self, a: Self::Ints, by: i32, mask: i8) -> Self::Ints;
    /// Returns `low | a << left & mask` in every byte, shifted to the right if `left` is negative.
    fn join(self, low: Self::Ints, a: Self::Ints, left: i32, mask: i8) -> Self::Ints;
    /// Returns `a - zero` in every byte.
    fn less(self, a: Self::Ints, zero: u8) -> Self::Ints;
    /// Returns `table[code]` for every byte, codes below 16.
    fn look_up(self, table: &[u8; 16], codes: Self::Ints) -> Self::Ints;
    /// Returns `table[code]` for every byte, codes below 64.
    fn look_up_64(self, table: &[u8; 64], codes: Self::Ints) -> Self::Ints;
    /// Moves the bytes of every 32-bit lane up by one, the last to the first.
    fn rotate_bytes(self, a: Self::Ints) -> Self::Ints;

    fn splat(self, x: f32) -> Self::Floats;
    fn load_floats(self, x: &[f32; PANEL], part: usize) -> Self::Floats;
    fn store_floats(self, a: Self::Floats, x: &mut [f32; PANEL], part: usize);
    /// Does the work of [`Simd::store_floats`] past the caches, where there is an instruction for
    /// it and `x` begins a line. Other threads see it after [`Simd::store_fence`].
    #[inline(always)]
    fn store_floats_nt(self, a: Self::Floats, x: &mut [f32; PANEL], part: usize) {
        self.store_floats(a, x, part);
    }
    /// Orders non-temporal stores before later stores.
    #[inline(always)]
    fn store_fence(self) {}
    /// Loads the f16 of half `half` of a line.
    fn load_f16(self, line: &[u8; 64], half: usize, part: usize) -> Self::Floats;
    /// Loads the bf16 of half `half` of a line.
    fn load_bf16(self, line: &[u8; 64], half: usize, part: usize) -> Self::Floats;
    /// Loads the bytes of quarter `quarter` of a line, unsigned.
    fn load_bytes(self, line: &[u8; 64], quarter: usize, part: usize) -> Self::Floats;
    /// Loads the bytes of quarter `quarter` of a line as E8M0.
    fn load_e8m0(self, line: &[u8; 64], quarter: usize, part: usize) -> Self::Floats;
    /// Loads the bytes of quarter `quarter` of a line, below 128, as E4M3, times
    /// [`E4M3_UNIT`](format::E4M3_UNIT).
    fn load_e4m3(self, line: &[u8; 64], quarter: usize, part: usize) -> Self::Floats;
    /// Loads the bytes of quarter `quarter` of a line as E4M3 with a sign, times
    /// [`E4M3_UNIT`](format::E4M3_UNIT).
    fn load_signed_e4m3(self, line: &[u8; 64], quarter: usize, part: usize) -> Self::Floats;
    /// Loads the levels of column `col` of eight of a line: four bits of each lane,
    /// from bit `4 (col xor 1)` on.
    fn load_levels(self, levels: &[f32; 16], line: &[u8; 64], col: usize, part: usize) -> Self::Floats;
    fn to_floats(self, a: Self::Ints) -> Self::Floats;
    /// Returns `a · scale`, rounded once, for integers below 2^22 and
    /// [short](WeightFormat::HAS_SHORT_SCALES) scales. `lifted` is [`Simd::lifted`] of the scale.
    #[inline(always)]
    fn scaled(self, a: Self::Ints, scale: Self::Floats, lifted: Self::Floats) -> Self::Floats {
        let _ = lifted;
        self.mul(self.to_floats(a), scale)
    }
    /// Returns what [`Simd::scaled`] subtracts, where its integers are lifted to the range in which
    /// a float's last bit counts ones.
    #[inline(always)]
    fn lifted(self, scale: Self::Floats) -> Self::Floats {
        scale
    }
    fn bits_to_floats(self, a: Self::Ints) -> Self::Floats;
    fn sub(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    fn mul(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// Returns `a · b + c`, rounded once; twice without such an instruction (WebAssembly).
    fn mul_add(self, a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats;

    /// Returns the registers of codes of a format that a GEMM holds at once.
    fn across<F: WeightFormat>() -> usize;
    /// Returns the number of groups whose products one short sum takes.
    fn groups_in_short_sum<F: WeightFormat>() -> usize;
    /// Returns the start of a sum: the excess of the code of zero, subtracted, if the products
    /// contain it and short sums do not subtract it. `neg_sum` is minus the sum of the activations,
    /// see `Tile` of the op.
    fn start<F: WeightFormat>(self, neg_sum: i32) -> Self::Ints;
    /// Starts a short sum, to be added to `sum`. `neg_sum` is that of its groups if they fill half
    /// a block or all of it.
    fn short<F: WeightFormat>(self, sum: Self::Ints, neg_sum: i32) -> Self::Ints;
    /// Adds the products of the factors `w` (unsigned bytes) and `x` (signed ones) to a short sum.
    fn dot<F: WeightFormat>(self, short: Self::Ints, w: Self::Ints, x: Self::Ints) -> Self::Ints;
    /// Returns `sum` plus the short sum that was started for it.
    fn widen(self, sum: Self::Ints, short: Self::Ints) -> Self::Ints;
}
