//! Sixteen lanes: the vector operations of the KV cache kernels, which are written once for every
//! instruction set.
//!
//! A kernel is an [`Op`], generic over the token `L` that proves the instructions and provides the
//! operations. [`Lanes::run`] compiles it for that set; everything in between is `inline(always)`,
//! so that the operations end up inside the one function with the target features.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(not(target_arch = "x86_64"))]
mod quads;
mod rotate;
mod select;

#[cfg(target_arch = "x86_64")]
pub(crate) use avx512::Zmm;
pub(crate) use rotate::{Direction, Rotate};
#[cfg(test)]
pub(crate) use select::run_on;
pub(crate) use select::with_lanes;

/// A kernel.
pub(crate) trait Op {
    /// Its result.
    type Output;

    /// Whether it multiplies bytes ([`Lanes::dot`], [`Lanes::split`], [`Lanes::MAX_BYTE`]), in
    /// which sets of 256 bits differ.
    const MULTIPLIES_BYTES: bool = false;
    /// Whether it looks up among 64 bytes ([`Lanes::look_up_64`] and what follows it), in which
    /// sets of 512 bits differ.
    const LOOKS_UP_64: bool = false;

    /// Runs the kernel's body. Implementations are `#[inline(always)]`.
    fn run<L: Lanes>(self, lanes: L) -> Self::Output;
}

/// The common subset of the sets of one width, proven by the smallest of them: an [`Op`] that needs
/// no more is compiled once for all of them. One that needs more and does not declare it panics, or
/// has no byte to multiply, on the smallest set as on the largest.
#[cfg(target_arch = "x86_64")]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shared<T>(T);

/// A table of bytes by two codes of 3 bits, in the orders that sets of instructions read.
pub(crate) struct PairTable {
    /// By `below + 8 above`.
    by_code: [u8; 64],
    /// By the two low bits of `below`, those of `above`, the third bit of `below` and that of
    /// `above`, from bit 0 on: third bits select one of four lookups, and need not join the others.
    #[cfg(target_arch = "x86_64")]
    by_plane: [u8; 64],
}

impl PairTable {
    /// Returns the orders of a table by `below + 8 above`.
    pub(crate) const fn of(by_code: [u8; 64]) -> Self {
        let (mut by_plane, mut i) = ([0; 64], 0);
        while i < by_code.len() {
            let (below, above) = (i % 8, i / 8);
            by_plane[below % 4 + 4 * (above % 4) + 16 * (below / 4) + 32 * (above / 4)] = by_code[i];
            i += 1;
        }
        Self {
            by_code,
            #[cfg(target_arch = "x86_64")]
            by_plane,
        }
    }
}

/// Operations on 16 lanes of 32 bits. Methods apply the operation of their name lane by lane.
///
/// 64 *codes* are 64 unsigned bytes in the same registers, four to a lane.
pub(crate) trait Lanes: Copy + Send + Sync {
    /// 16 signed integers, or 64 codes.
    type Ints: Copy;
    /// 16 floats.
    type Floats: Copy;
    /// 64 codes of 2 bits.
    type Codes2: Copy;
    /// 64 codes of 3 bits.
    type Codes3: Copy;

    /// Number of groups of codes that a kernel holds side by side, 1 or 2: as many as leave
    /// registers for its sums.
    const WIDE: usize;
    /// Largest magnitude of a signed byte that [`Lanes::dot`] takes without saturating.
    const MAX_BYTE: i32;
    /// Largest magnitude of an integer that splits in two bytes for [`Lanes::dot`].
    const MAX_SPLIT: i32;
    /// Whether products with both parts ([`Lanes::split`]) have one sum.
    const PARTS_SHARE_SUMS: bool = false;
    /// log2 of the offset that [`Lanes::store_offset`] subtracts: the largest that `MAX_BYTE`
    /// permits.
    const OFFSET_BITS: i32 = (Self::MAX_BYTE + 1).ilog2() as i32;

    /// Runs `op` with these target features, or with the subset that its [`Op`] constants select.
    fn run<O: Op>(self, op: O) -> O::Output;

    fn splat_i(self, x: i32) -> Self::Ints;
    fn add_i(self, a: Self::Ints, b: Self::Ints) -> Self::Ints;
    fn min_i(self, a: Self::Ints, b: Self::Ints) -> Self::Ints;
    fn and_i(self, a: Self::Ints, b: Self::Ints) -> Self::Ints;
    fn or_i(self, a: Self::Ints, b: Self::Ints) -> Self::Ints;
    /// Shifts bits to the left; `by` is below 32.
    fn shift_left(self, a: Self::Ints, by: Self::Ints) -> Self::Ints;
    /// Shifts bits to the right and zeros in; `by` is below 32.
    fn shift_right(self, a: Self::Ints, by: Self::Ints) -> Self::Ints;
    /// Adds to each lane the products of its two signed halves.
    fn dot_pairs(self, sum: Self::Ints, a: Self::Ints, b: Self::Ints) -> Self::Ints;
    /// Returns the sum of all lanes.
    fn sum_i(self, a: Self::Ints) -> i32;
    /// Returns [`Lanes::sum_i`] of each.
    #[inline(always)]
    fn sum_i_of_each(self, a: [Self::Ints; 16]) -> [i32; 16] {
        let mut all = [0; 16];
        for (&a, all) in a.iter().zip(&mut all) {
            *all = self.sum_i(a);
        }
        all
    }
    /// Returns the low byte of each lane.
    fn low_bytes(self, a: Self::Ints) -> [[i8; 4]; 4];
    /// Stores 64 integers, from 0 to twice the offset less 1, minus that offset as signed bytes.
    /// Returns `sum` with all of them added, each to any lane.
    #[inline(always)]
    fn store_offset(self, mut sum: Self::Ints, a: [Self::Ints; 4], x: &mut [[[i8; 4]; 4]; 4]) -> Self::Ints {
        for (&a, x) in a.iter().zip(x) {
            sum = self.add_i(sum, a);
            *x = self.low_bytes(self.add_i(a, self.splat_i(-1 << Self::OFFSET_BITS)));
        }
        sum
    }

    fn splat(self, x: f32) -> Self::Floats;
    fn load(self, x: &[f32; 16]) -> Self::Floats;
    fn store(self, a: Self::Floats, x: &mut [f32; 16]);
    fn add(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    fn sub(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    fn mul(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    fn div(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// Returns `a · b + c`, rounded once; twice without such an instruction (WebAssembly).
    fn mul_add(self, a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats;
    fn abs(self, a: Self::Floats) -> Self::Floats;
    /// Returns the larger; `b` where one of them is NaN.
    fn max(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// Returns `x - floor(x)`.
    fn above_floor(self, x: Self::Floats) -> Self::Floats;
    /// Returns `a · 2^floor(x)` for `x <= 0`; where that is subnormal it may be 0.
    fn times_two_to_floor(self, a: Self::Floats, x: Self::Floats) -> Self::Floats;
    /// Moves lane i xor `BY` to lane i; `BY` is 1, 2, 4 or 8.
    fn swap<const BY: usize>(self, a: Self::Floats) -> Self::Floats;
    /// Returns the largest lane; NaN lanes may or may not win.
    fn largest(self, a: Self::Floats) -> f32;
    /// Returns the sum of all lanes.
    fn sum(self, a: Self::Floats) -> f32;
    /// Returns [`Lanes::largest`] of each.
    #[inline(always)]
    fn largest_of_each(self, a: [Self::Floats; 16]) -> Self::Floats {
        let mut all = [0.0; 16];
        for (&a, all) in a.iter().zip(&mut all) {
            *all = self.largest(a);
        }
        self.load(&all)
    }
    /// Returns [`Lanes::sum`] of each.
    #[inline(always)]
    fn sum_of_each(self, a: [Self::Floats; 16]) -> Self::Floats {
        let mut all = [0.0; 16];
        for (&a, all) in a.iter().zip(&mut all) {
            *all = self.sum(a);
        }
        self.load(&all)
    }
    /// Rounds to the nearest integer, ties to even.
    fn round(self, a: Self::Floats) -> Self::Ints;
    fn to_floats(self, a: Self::Ints) -> Self::Floats;
    /// Loads 16 little-endian f16.
    fn load_f16(self, x: &[u8; 32]) -> Self::Floats;
    /// Loads 16 little-endian bf16.
    fn load_bf16(self, x: &[u8; 32]) -> Self::Floats;
    /// Loads 16 little-endian f32.
    fn load_f32(self, x: &[u8; 64]) -> Self::Floats;
    /// Converts to 16 little-endian f16: ties to even; ±65,504 beyond the range.
    fn to_f16(self, a: Self::Floats) -> [[u8; 2]; 16];

    /// Adds to each lane the products of its four codes with four signed bytes.
    fn dot(self, sum: Self::Ints, codes: Self::Ints, bytes: [i8; 4]) -> Self::Ints;
    /// Loads 64 codes of 8 bits.
    fn codes_8(self, x: &[u8; 64]) -> Self::Ints;
    /// Loads 64 codes of 4 bits: code j in byte j mod 32, low nibble first.
    fn codes_4(self, x: &[u8; 32]) -> Self::Ints;
    /// Loads 64 codes of 2 bits: code j in byte j mod 16, at bit 2·(j / 16).
    fn codes_2(self, x: &[u8; 16]) -> Self::Ints;
    /// Returns `table[code]` for 64 codes of 3 bits: the low two as in [`Lanes::codes_2`], the
    /// third of code j at bit j of `high`.
    fn look_up_3(self, low: &[u8; 16], high: &[u8; 8], table: &[u8; 16]) -> Self::Ints;
    /// Returns `table[code]` for 64 codes below 16.
    fn look_up(self, codes: Self::Ints, table: &[u8; 16]) -> Self::Ints;
    /// Returns the float of the table at each lane, which holds an index.
    #[inline(always)]
    fn look_up_floats(self, at: Self::Ints, table: &[f32; 16]) -> Self::Floats {
        let mut bytes = [0; 64];
        self.store_codes(at, &mut bytes);
        self.load(&std::array::from_fn(|lane| table[usize::from(bytes[4 * lane] & 15)]))
    }
    /// Loads 64 codes of 3 bits: the low two as in [`Lanes::codes_2`], the third of code j at bit j
    /// of `high`.
    fn codes_3(self, low: &[u8; 16], high: &[u8; 8]) -> Self::Ints;
    /// Returns `table[code]` for 64 codes below 64.
    fn look_up_64(self, codes: Self::Ints, table: &[u8; 64]) -> Self::Ints;
    /// Loads 64 codes of 2 bits for [`Lanes::look_up_triples`], as [`Lanes::codes_2`] does.
    fn load_2(self, low: &[u8; 16]) -> Self::Codes2;
    /// Loads 64 codes of 3 bits for [`Lanes::look_up_pairs`], as [`Lanes::codes_3`] does: for its
    /// `above` if `ABOVE`, else for its `below`.
    fn load_3<const ABOVE: bool>(self, low: &[u8; 16], high: &[u8; 8]) -> Self::Codes3;
    /// Returns `table[a + 4 b + 16 c]` for 64 triples of codes.
    fn look_up_triples(self, codes: [Self::Codes2; 3], table: &[u8; 64]) -> Self::Ints;
    /// Returns `table[below + 8 above]` for 64 pairs of codes.
    fn look_up_pairs(self, below: Self::Codes3, above: Self::Codes3, table: &PairTable) -> Self::Ints;
    /// Transposes the codes of a 16x16 square: byte b of lane i of group g is the code at row i,
    /// column `4 g + b`.
    fn transpose(self, groups: [Self::Ints; 4]) -> [Self::Ints; 4];
    /// Stores 64 codes.
    fn store_codes(self, codes: Self::Ints, x: &mut [u8; 64]);

    /// Splits integers of at most [`Lanes::MAX_SPLIT`] into two parts of four bytes for each four:
    /// their high and their low bytes, unless the set multiplies 16 bits faster.
    fn split(self, a: Self::Ints) -> [[[i8; 4]; 4]; 2];
    /// Writes the parts of each ([`Lanes::split`]).
    #[inline(always)]
    fn store_split(self, integers: [Self::Ints; 4], parts: [&mut [[[i8; 4]; 4]; 4]; 2]) {
        let [first, second] = parts;
        for ((integers, first), second) in integers.into_iter().zip(first).zip(second) {
            [*first, *second] = self.split(integers);
        }
    }
    /// Adds to each lane the products of its four codes with a part of four integers.
    #[inline(always)]
    fn dot_part<const PART: usize>(self, sum: Self::Ints, codes: Self::Ints, part: [i8; 4]) -> Self::Ints {
        self.dot(sum, codes, part)
    }
    /// Combines the sums of products with both parts.
    fn join(self, first: Self::Ints, second: Self::Ints) -> Self::Ints;
}

/// Returns `2^x` for `x <= 0`, exactly 1 for 0, NaN for NaN, perhaps 0 where the result would be
/// subnormal.
///
/// `2^x = 2^floor(x) · 2^r` with `0 <= r < 1`, and the polynomial of degree 5 that is nearest to
/// `2^r` by relative error, its first coefficient set to 1: with the rounding of its five steps,
/// relative error below 2.5e-7.
#[inline(always)]
pub(crate) fn exp2<L: Lanes>(lanes: L, x: L::Floats) -> L::Floats {
    let r = lanes.above_floor(x);
    let mut p = lanes.splat(0.001_877_576_7);
    for c in [0.008_989_34, 0.055_826_318, 0.240_153_61, 0.693_153_1, 1.0] {
        p = lanes.mul_add(p, r, lanes.splat(c));
    }
    lanes.times_two_to_floor(p, x)
}

/// Prefetches the line of the byte at `at` into the L2 cache; any address is allowed. The hardware
/// continues from there. Prefetches into L1 would delay demand loads while they wait for memory
/// (Zen 4: a tenth of decode, a quarter of attention in f16).
#[inline(always)]
pub(crate) fn prefetch_line(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: SSE is part of every x86-64 CPU, and a prefetch of any address is a hint: it
        // neither faults nor changes memory.
        #[allow(unused_unsafe, reason = "newer compilers declare it safe")]
        unsafe {
            _mm_prefetch::<_MM_HINT_T1>(at.cast());
        }
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: the instruction is part of every such CPU, and a hint: of any address, it neither
    // faults nor changes memory.
    unsafe {
        std::arch::asm!("prfm pldl2keep, [{at}]", at = in(reg) at, options(nomem, nostack, preserves_flags));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = at;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::isa::Isa;

    struct Exp2([f32; 16]);

    impl Op for Exp2 {
        type Output = [f32; 16];

        #[inline(always)]
        fn run<L: Lanes>(self, lanes: L) -> [f32; 16] {
            let mut out = [0.0; 16];
            lanes.store(exp2(lanes, lanes.load(&self.0)), &mut out);
            out
        }
    }

    #[test]
    fn exp2_is_within_its_bound_and_exact_at_zero() {
        for isa in Isa::available() {
            for i in 0..10_000 {
                let x: [f32; 16] = std::array::from_fn(|lane| (i * 16 + lane) as f32 * -7.7e-4);
                let Some(got) = run_on(isa, Exp2(x)) else { continue };
                for (x, got) in x.into_iter().zip(got) {
                    let err = (f64::from(got) / f64::from(x).exp2() - 1.0).abs();
                    assert!(err <= 2.5e-7 || x < -126.0 && got < 1.2e-38, "{isa:?} {x}: {got}, off by {err}");
                }
            }
            let mut x = [0.0; 16];
            (x[1], x[2], x[3]) = (f32::NAN, f32::NEG_INFINITY, -1e30);
            let Some(got) = run_on(isa, Exp2(x)) else { continue };
            assert!(got[0] == 1.0 && got[1].is_nan() && got[2..4] == [0.0; 2], "{isa:?} {got:?}");
        }
    }
}
