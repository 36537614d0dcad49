//! [`Quad`] on WebAssembly SIMD.
//!
//! The instruction set has no dot products of bytes: even and odd bytes are widened to 16-bit
//! halves of lanes, whose dot products exist. It rounds `a · b + c` twice, and has no f16.

use std::arch::wasm32::*;

use super::{Quad, Task};
use crate::simd::tokens::Simd128;

/// Defines operations of an instruction or two.
macro_rules! operations {
    ($(fn $name:ident($($x:ident: $X:ty),+) -> $Y:ty = $body:expr;)+) => {$(
        #[inline(always)]
        fn $name(self, $($x: $X),+) -> $Y {
            $body
        }
    )+};
}

/// Returns the four lanes, for operations without a vector instruction.
#[inline(always)]
fn lanes(a: v128) -> [u32; 4] {
    [
        u32x4_extract_lane::<0>(a),
        u32x4_extract_lane::<1>(a),
        u32x4_extract_lane::<2>(a),
        u32x4_extract_lane::<3>(a),
    ]
}

/// Returns even and odd bytes as halves of lanes, signed.
#[inline(always)]
fn signed(a: v128) -> [v128; 2] {
    [i16x8_shr(i16x8_shl(a, 8), 8), i16x8_shr(a, 8)]
}

#[inline(always)]
fn load(x: &[u8; 16]) -> v128 {
    // SAFETY: 16 bytes are read, which need no alignment.
    unsafe { v128_load(x.as_ptr().cast()) }
}

#[inline(always)]
fn store(a: v128, x: &mut [u8; 16]) {
    // SAFETY: 16 bytes are written, which need no alignment.
    unsafe { v128_store(x.as_mut_ptr().cast(), a) }
}

impl Quad for Simd128 {
    type Ints = v128;
    type Floats = v128;

    #[inline(always)]
    fn run<T: Task>(self, task: T) -> T::Output {
        task.run()
    }

    operations! {
        fn load_i(x: &[u8; 16]) -> v128 = load(x);
        fn store_i(a: v128, x: &mut [u8; 16]) -> () = store(a, x);
        fn splat_i(x: i32) -> v128 = i32x4_splat(x);
        fn add_i(a: v128, b: v128) -> v128 = i32x4_add(a, b);
        fn min_i(a: v128, b: v128) -> v128 = i32x4_min(a, b);
        fn max_i(a: v128, b: v128) -> v128 = i32x4_max(a, b);
        fn and_i(a: v128, b: v128) -> v128 = v128_and(a, b);
        fn or_i(a: v128, b: v128) -> v128 = v128_or(a, b);
        fn xor_i(a: v128, b: v128) -> v128 = v128_xor(a, b);
        fn dot_pairs(sum: v128, a: v128, b: v128) -> v128 = i32x4_add(sum, i32x4_dot_i16x8(a, b));
        fn sum_i(a: v128) -> i32 = lanes(a).into_iter().fold(0, u32::wrapping_add) as i32;
        fn largest_i(a: v128) -> i32 = lanes(a).into_iter().map(|lane| lane as i32).fold(i32::MIN, i32::max);

        fn splat_bytes(x: u8) -> v128 = u8x16_splat(x);
        fn sub_bytes(a: v128, b: v128) -> v128 = u8x16_sub(a, b);
        fn has_bits(a: v128, bits: v128) -> v128 = u8x16_ne(v128_and(a, bits), u8x16_splat(0));
        fn pick(a: v128, at: v128) -> v128 = u8x16_swizzle(a, at);
        fn widen(x: &[u8; 4]) -> v128 =
            u32x4_extend_low_u16x8(u16x8_extend_low_u8x16(u32x4_splat(u32::from_le_bytes(*x))));

        fn splat(x: f32) -> v128 = f32x4_splat(x);
        fn load(x: &[f32; 4]) -> v128 = load(bytemuck::cast_ref(x));
        fn store(a: v128, x: &mut [f32; 4]) -> () = store(a, bytemuck::cast_mut(x));
        fn add(a: v128, b: v128) -> v128 = f32x4_add(a, b);
        fn sub(a: v128, b: v128) -> v128 = f32x4_sub(a, b);
        fn mul(a: v128, b: v128) -> v128 = f32x4_mul(a, b);
        fn div(a: v128, b: v128) -> v128 = f32x4_div(a, b);
        fn mul_add(a: v128, b: v128, c: v128) -> v128 = f32x4_add(f32x4_mul(a, b), c);
        fn abs(a: v128) -> v128 = f32x4_abs(a);
        fn floor(a: v128) -> v128 = f32x4_floor(a);
        fn max(a: v128, b: v128) -> v128 = f32x4_pmax(b, a);
        fn less(a: v128, b: v128) -> v128 = f32x4_lt(a, b);
        fn select(mask: v128, a: v128, b: v128) -> v128 = v128_bitselect(a, b, mask);
        fn first(a: v128) -> f32 = f32x4_extract_lane::<0>(a);
        fn round(a: v128) -> v128 = i32x4_trunc_sat_f32x4(f32x4_nearest(a));
        fn to_floats(a: v128) -> v128 = f32x4_convert_i32x4(a);
        fn bits(a: v128) -> v128 = a;
        fn of_bits(a: v128) -> v128 = a;
    }

    #[inline(always)]
    fn shift_left(self, a: v128, by: v128) -> v128 {
        let ([a, b, c, d], by) = (lanes(a), lanes(by));
        u32x4(a << by[0], b << by[1], c << by[2], d << by[3])
    }

    #[inline(always)]
    fn shift_right(self, a: v128, by: v128) -> v128 {
        let ([a, b, c, d], by) = (lanes(a), lanes(by));
        u32x4(a >> by[0], b >> by[1], c >> by[2], d >> by[3])
    }

    #[inline(always)]
    fn left<const BY: i32>(self, a: v128) -> v128 {
        u32x4_shl(a, BY as u32)
    }

    #[inline(always)]
    fn right<const BY: i32>(self, a: v128) -> v128 {
        u32x4_shr(a, BY as u32)
    }

    #[inline(always)]
    fn right_signed<const BY: i32>(self, a: v128) -> v128 {
        i32x4_shr(a, BY as u32)
    }

    #[inline(always)]
    fn dot_signed(self, sum: v128, a: v128, b: v128) -> v128 {
        let ([a_even, a_odd], [b_even, b_odd]) = (signed(a), signed(b));
        self.dot_pairs(self.dot_pairs(sum, a_even, b_even), a_odd, b_odd)
    }

    #[inline(always)]
    fn dot(self, sum: v128, a: v128, bytes: [i8; 4]) -> v128 {
        let [even, odd] = signed(i32x4_splat(i32::from_le_bytes(bytes.map(|byte| byte as u8))));
        let sum = self.dot_pairs(sum, v128_and(a, u16x8_splat(255)), even);
        self.dot_pairs(sum, u16x8_shr(a, 8), odd)
    }

    #[inline(always)]
    fn shift_bytes(self, a: v128, by: i32) -> v128 {
        if by < 0 { u8x16_shr(a, by.unsigned_abs()) } else { u8x16_shl(a, by.unsigned_abs()) }
    }

    #[inline(always)]
    fn look_up_64(self, codes: v128, table: &[u8; 64]) -> v128 {
        // A swizzle gives zero for indices above 15.
        let (quarters, _) = table.as_chunks();
        let quarter =
            |i: u8| u8x16_swizzle(load(&quarters[usize::from(i)]), u8x16_sub(codes, u8x16_splat(16 * i)));
        v128_or(v128_or(quarter(0), quarter(1)), v128_or(quarter(2), quarter(3)))
    }

    #[inline(always)]
    fn low_bytes(self, [a, b, c, d]: [v128; 4]) -> v128 {
        let low = i8x16_shuffle::<0, 4, 8, 12, 16, 20, 24, 28, 0, 0, 0, 0, 0, 0, 0, 0>(a, b);
        let high = i8x16_shuffle::<0, 4, 8, 12, 16, 20, 24, 28, 0, 0, 0, 0, 0, 0, 0, 0>(c, d);
        u64x2_shuffle::<0, 2>(low, high)
    }

    #[inline(always)]
    fn swap<const BY: usize>(self, a: v128) -> v128 {
        match BY {
            1 => u32x4_shuffle::<1, 0, 3, 2>(a, a),
            2 => u32x4_shuffle::<2, 3, 0, 1>(a, a),
            _ => unreachable!("lanes {BY} apart"),
        }
    }

    /// An f16 has ten bits of a fraction and an exponent biased by 15, an f32 23 and 127: a shift
    /// by 13 and a product with 2^112 convert one to the other, subnormal numbers too.
    #[inline(always)]
    fn load_f16(self, x: &[u8; 8]) -> v128 {
        let halves = u32x4_extend_low_u16x8(u64x2_splat(u64::from_le_bytes(*x)));
        let magnitude = u32x4_shl(v128_and(halves, u32x4_splat(0x7fff)), 13);
        let value = f32x4_mul(magnitude, f32x4_splat(2f32.powi(112)));
        let is_finite = u32x4_lt(magnitude, u32x4_splat(0x7c00 << 13));
        let beyond = v128_andnot(u32x4_splat(0x7f80_0000), is_finite);
        let sign = u32x4_shl(v128_and(halves, u32x4_splat(0x8000)), 16);
        v128_or(v128_or(value, beyond), sign)
    }

    #[inline(always)]
    fn load_bf16(self, x: &[u8; 8]) -> v128 {
        // A bf16 is the upper half of an f32.
        u32x4_shl(u32x4_extend_low_u16x8(u64x2_splat(u64::from_le_bytes(*x))), 16)
    }

    #[inline(always)]
    fn to_f16(self, a: v128) -> [u8; 8] {
        let magnitude = f32x4_abs(a);
        // Adding half a unit of the last remaining bit, less one if that bit is even, rounds to
        // nearest.
        let last = v128_and(u32x4_shr(magnitude, 13), u32x4_splat(1));
        let rounded = u32x4_add(u32x4_add(magnitude, u32x4_splat(0xfff)), last);
        let normal = u32x4_sub(u32x4_shr(rounded, 13), u32x4_splat((127 - 15) << 10));
        // A subnormal f16 counts units of 2^-24, as does the last bit of a float between 1/2 and 1.
        let half = f32x4_splat(0.5);
        let subnormal = u32x4_sub(f32x4_add(magnitude, half), half);
        let is_subnormal = f32x4_lt(magnitude, f32x4_splat(2f32.powi(-14)));
        let sign = v128_and(u32x4_shr(a, 16), u32x4_splat(0x8000));
        let [a, b, c, d] = lanes(v128_or(v128_bitselect(subnormal, normal, is_subnormal), sign))
            .map(|lane| (lane as u16).to_le_bytes());
        [a[0], a[1], b[0], b[1], c[0], c[1], d[0], d[1]]
    }
}
