//! Registers of 128 bits, four lanes each: four of them make sixteen lanes on machines without
//! wider ones. One file for each architecture.
//!
//! Kernels use [`Lanes`](crate::simd::vec16::Lanes) and the vectors of matrix products, both
//! written once over [`Quads`].

#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
mod simd128;

/// The registers of a token.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Quads<Q>(pub(crate) Q);

/// A function compiled for an instruction set.
pub(crate) trait Task {
    /// Its result.
    type Output;

    /// Runs its body. Implementations are `#[inline(always)]`.
    fn run(self) -> Self::Output;
}

/// Registers as two rows of eight bytes, and their 2x2 matrix products.
#[cfg(target_arch = "aarch64")]
pub(crate) trait MatrixProducts: Quad {
    /// Adds to lane `2 i + j` the products of row `i` of `a` with row `j` of `b`, bytes signed.
    fn dot_square(self, sum: Self::Ints, a: Self::Ints, b: Self::Ints) -> Self::Ints;
    /// Adds the same, bytes of `a` unsigned.
    fn dot_square_unsigned(self, sum: Self::Ints, a: Self::Ints, b: Self::Ints) -> Self::Ints;
    /// Loads two rows.
    fn load_rows(self, rows: [&[u8; 8]; 2]) -> Self::Ints;
    /// Interleaves the lanes of both, as two registers: a0 b0 a1 b1, a2 b2 a3 b3.
    fn interleave(self, a: Self::Ints, b: Self::Ints) -> [Self::Ints; 2];
    /// Returns every second lane of both, and the others: a0 a2 b0 b2, a1 a3 b1 b3.
    fn deinterleave(self, a: Self::Ints, b: Self::Ints) -> [Self::Ints; 2];
    /// Returns the lower halves of both, and the upper ones: a0 a1 b0 b1, a2 a3 b2 b3. Its own
    /// inverse.
    fn halves(self, a: Self::Ints, b: Self::Ints) -> [Self::Ints; 2];
}

/// Registers as two rows of four bf16, and their 2x2 matrix products.
#[cfg(target_arch = "aarch64")]
pub(crate) trait Bf16MatrixProducts: MatrixProducts {
    /// Adds to lane `2 i + j` the products of row `i` of `a` with row `j` of `b`: those of the
    /// first two columns, then those of the others. Each operation rounds to odd, and subnormal
    /// inputs and results count as zero.
    fn dot_halves(self, sum: Self::Floats, a: Self::Ints, b: Self::Ints) -> Self::Floats;
}

/// A token, and operations on one register. Methods apply the operation of their name lane by lane.
pub(crate) trait Quad: Copy + Send + Sync {
    /// Four signed integers, or sixteen bytes.
    type Ints: Copy;
    /// Four floats.
    type Floats: Copy;

    /// Runs `task` with these target features.
    fn run<T: Task>(self, task: T) -> T::Output;

    fn load_i(self, x: &[u8; 16]) -> Self::Ints;
    fn store_i(self, a: Self::Ints, x: &mut [u8; 16]);
    fn splat_i(self, x: i32) -> Self::Ints;
    fn add_i(self, a: Self::Ints, b: Self::Ints) -> Self::Ints;
    fn min_i(self, a: Self::Ints, b: Self::Ints) -> Self::Ints;
    fn max_i(self, a: Self::Ints, b: Self::Ints) -> Self::Ints;
    fn and_i(self, a: Self::Ints, b: Self::Ints) -> Self::Ints;
    fn or_i(self, a: Self::Ints, b: Self::Ints) -> Self::Ints;
    fn xor_i(self, a: Self::Ints, b: Self::Ints) -> Self::Ints;
    /// Shifts bits to the left; `by` is below 32.
    fn shift_left(self, a: Self::Ints, by: Self::Ints) -> Self::Ints;
    /// Shifts bits to the right and zeros in; `by` is below 32.
    fn shift_right(self, a: Self::Ints, by: Self::Ints) -> Self::Ints;
    fn left<const BY: i32>(self, a: Self::Ints) -> Self::Ints;
    /// Shifts zeros in.
    fn right<const BY: i32>(self, a: Self::Ints) -> Self::Ints;
    /// Shifts copies of the sign in.
    fn right_signed<const BY: i32>(self, a: Self::Ints) -> Self::Ints;
    /// Adds to each lane the products of its two signed halves.
    fn dot_pairs(self, sum: Self::Ints, a: Self::Ints, b: Self::Ints) -> Self::Ints;
    /// Adds to each lane the products of its four signed bytes.
    fn dot_signed(self, sum: Self::Ints, a: Self::Ints, b: Self::Ints) -> Self::Ints;
    /// Adds to each lane the products of its four unsigned bytes with four signed ones.
    fn dot(self, sum: Self::Ints, a: Self::Ints, bytes: [i8; 4]) -> Self::Ints;
    fn sum_i(self, a: Self::Ints) -> i32;
    fn largest_i(self, a: Self::Ints) -> i32;

    fn splat_bytes(self, x: u8) -> Self::Ints;
    fn sub_bytes(self, a: Self::Ints, b: Self::Ints) -> Self::Ints;
    /// Shifts bits to the left within every byte, to the right if `by` is negative; its magnitude
    /// is below 8.
    fn shift_bytes(self, a: Self::Ints, by: i32) -> Self::Ints;
    /// Returns bytes of ones where bytes of `a` and `bits` have a bit in common, else zeros.
    fn has_bits(self, a: Self::Ints, bits: Self::Ints) -> Self::Ints;
    /// Returns byte `at` of `a` for every byte, all of `at` below 16.
    fn pick(self, a: Self::Ints, at: Self::Ints) -> Self::Ints;
    /// Returns `table[code]` for every byte, codes below 64.
    fn look_up_64(self, codes: Self::Ints, table: &[u8; 64]) -> Self::Ints;
    /// Returns the low bytes of sixteen lanes.
    fn low_bytes(self, lanes: [Self::Ints; 4]) -> Self::Ints;
    /// Returns four unsigned bytes as integers.
    fn widen(self, x: &[u8; 4]) -> Self::Ints;

    fn splat(self, x: f32) -> Self::Floats;
    fn load(self, x: &[f32; 4]) -> Self::Floats;
    fn store(self, a: Self::Floats, x: &mut [f32; 4]);
    fn add(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    fn sub(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    fn mul(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    fn div(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// Returns `a · b + c`, rounded once; twice without such an instruction (WebAssembly).
    fn mul_add(self, a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats;
    fn abs(self, a: Self::Floats) -> Self::Floats;
    fn floor(self, a: Self::Floats) -> Self::Floats;
    /// Returns the larger; `b` where one of them is NaN.
    fn max(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// Returns lanes of ones where `a < b`, else zeros.
    fn less(self, a: Self::Floats, b: Self::Floats) -> Self::Ints;
    /// Returns `a` where lanes of `mask` are ones, `b` where they are zeros.
    fn select(self, mask: Self::Ints, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// Moves lane i xor `BY` to lane i; `BY` is 1 or 2.
    fn swap<const BY: usize>(self, a: Self::Floats) -> Self::Floats;
    /// Returns lane 0.
    fn first(self, a: Self::Floats) -> f32;
    /// Rounds to the nearest integer, ties to even.
    fn round(self, a: Self::Floats) -> Self::Ints;
    fn to_floats(self, a: Self::Ints) -> Self::Floats;
    fn bits(self, a: Self::Floats) -> Self::Ints;
    fn of_bits(self, a: Self::Ints) -> Self::Floats;
    /// Loads four little-endian f16.
    fn load_f16(self, x: &[u8; 8]) -> Self::Floats;
    /// Loads four little-endian bf16.
    fn load_bf16(self, x: &[u8; 8]) -> Self::Floats;
    /// Converts to four little-endian f16, ties to even; magnitudes are at most 65,504.
    fn to_f16(self, a: Self::Floats) -> [u8; 8];
}

#[cfg(all(test, target_arch = "aarch64"))]
mod tests;
