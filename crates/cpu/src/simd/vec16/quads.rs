//! [`Lanes`] on four 128-bit registers.

use kvant_codec::finite::F16_MAX;

use super::{Lanes, Op, PairTable};
use crate::simd::vec128::{Quad, Quads, Task};

/// Applies the same operation to all four.
macro_rules! each {
    (|$($x:ident),+| $body:expr) => {
        [
            { let ($($x,)+) = ($($x[0],)+); $body },
            { let ($($x,)+) = ($($x[1],)+); $body },
            { let ($($x,)+) = ($($x[2],)+); $body },
            { let ($($x,)+) = ($($x[3],)+); $body },
        ]
    };
}

/// Splits memory into quarters.
macro_rules! quarters {
    ($x:expr) => {{
        let [a, b, c, d] = $x.as_chunks().0 else { unreachable!("four quarters") };
        [a, b, c, d]
    }};
}

/// The index of each register.
const NUMBERS: [usize; 4] = [0, 1, 2, 3];

/// Byte permutation that transposes a 4x4 square.
const TURNED: [u8; 16] = [0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15];
/// Eight times the first byte, then eight times the second; and the bit of each byte that is
/// tested.
const EIGHTHS: [u8; 16] = [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1];
const BITS: [u8; 16] = [1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128];

/// A kernel and its lanes.
struct OnLanes<Q, O>(Quads<Q>, O);

impl<Q: Quad, O: Op> Task for OnLanes<Q, O> {
    type Output = O::Output;

    #[inline(always)]
    fn run(self) -> O::Output {
        self.1.run(self.0)
    }
}

impl<Q: Quad> Lanes for Quads<Q> {
    type Ints = [Q::Ints; 4];
    type Codes2 = Self::Ints;
    type Codes3 = Self::Ints;
    type Floats = [Q::Floats; 4];

    const WIDE: usize = 1;
    const MAX_BYTE: i32 = 127;
    const MAX_SPLIT: i32 = 127 * 256 + 127;

    #[inline(always)]
    fn run<O: Op>(self, op: O) -> O::Output {
        self.0.run(OnLanes(self, op))
    }

    #[inline(always)]
    fn splat_i(self, x: i32) -> Self::Ints {
        [self.0.splat_i(x); 4]
    }

    #[inline(always)]
    fn add_i(self, a: Self::Ints, b: Self::Ints) -> Self::Ints {
        each!(|a, b| self.0.add_i(a, b))
    }

    #[inline(always)]
    fn min_i(self, a: Self::Ints, b: Self::Ints) -> Self::Ints {
        each!(|a, b| self.0.min_i(a, b))
    }

    #[inline(always)]
    fn and_i(self, a: Self::Ints, b: Self::Ints) -> Self::Ints {
        each!(|a, b| self.0.and_i(a, b))
    }

    #[inline(always)]
    fn or_i(self, a: Self::Ints, b: Self::Ints) -> Self::Ints {
        each!(|a, b| self.0.or_i(a, b))
    }

    #[inline(always)]
    fn shift_left(self, a: Self::Ints, by: Self::Ints) -> Self::Ints {
        each!(|a, by| self.0.shift_left(a, by))
    }

    #[inline(always)]
    fn shift_right(self, a: Self::Ints, by: Self::Ints) -> Self::Ints {
        each!(|a, by| self.0.shift_right(a, by))
    }

    #[inline(always)]
    fn dot_pairs(self, sum: Self::Ints, a: Self::Ints, b: Self::Ints) -> Self::Ints {
        each!(|sum, a, b| self.0.dot_pairs(sum, a, b))
    }

    #[inline(always)]
    fn sum_i(self, [a, b, c, d]: Self::Ints) -> i32 {
        let q = self.0;
        q.sum_i(q.add_i(q.add_i(a, b), q.add_i(c, d)))
    }

    #[inline(always)]
    fn low_bytes(self, a: Self::Ints) -> [[i8; 4]; 4] {
        let mut bytes = [0; 16];
        self.0.store_i(self.0.low_bytes(a), &mut bytes);
        bytemuck::cast(bytes)
    }

    #[inline(always)]
    fn splat(self, x: f32) -> Self::Floats {
        [self.0.splat(x); 4]
    }

    #[inline(always)]
    fn load(self, x: &[f32; 16]) -> Self::Floats {
        let x = quarters!(x);
        each!(|x| self.0.load(x))
    }

    #[inline(always)]
    fn store(self, a: Self::Floats, x: &mut [f32; 16]) {
        let (quarters, _) = x.as_chunks_mut();
        self.0.store(a[0], &mut quarters[0]);
        self.0.store(a[1], &mut quarters[1]);
        self.0.store(a[2], &mut quarters[2]);
        self.0.store(a[3], &mut quarters[3]);
    }

    #[inline(always)]
    fn add(self, a: Self::Floats, b: Self::Floats) -> Self::Floats {
        each!(|a, b| self.0.add(a, b))
    }

    #[inline(always)]
    fn sub(self, a: Self::Floats, b: Self::Floats) -> Self::Floats {
        each!(|a, b| self.0.sub(a, b))
    }

    #[inline(always)]
    fn mul(self, a: Self::Floats, b: Self::Floats) -> Self::Floats {
        each!(|a, b| self.0.mul(a, b))
    }

    #[inline(always)]
    fn div(self, a: Self::Floats, b: Self::Floats) -> Self::Floats {
        each!(|a, b| self.0.div(a, b))
    }

    #[inline(always)]
    fn mul_add(self, a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats {
        each!(|a, b, c| self.0.mul_add(a, b, c))
    }

    #[inline(always)]
    fn abs(self, a: Self::Floats) -> Self::Floats {
        each!(|a| self.0.abs(a))
    }

    #[inline(always)]
    fn max(self, a: Self::Floats, b: Self::Floats) -> Self::Floats {
        each!(|a, b| self.0.max(a, b))
    }

    #[inline(always)]
    fn above_floor(self, x: Self::Floats) -> Self::Floats {
        each!(|x| self.0.sub(x, self.0.floor(x)))
    }

    #[inline(always)]
    fn times_two_to_floor(self, a: Self::Floats, x: Self::Floats) -> Self::Floats {
        let q = self.0;
        each!(|a, x| {
            let exponent = q.add_i(q.round(q.floor(x)), q.splat_i(127));
            let product = q.mul(a, q.of_bits(q.left::<23>(exponent)));
            q.select(q.less(x, q.splat(-126.0)), q.splat(0.0), product)
        })
    }

    #[inline(always)]
    fn swap<const BY: usize>(self, a: Self::Floats) -> Self::Floats {
        match BY {
            1 | 2 => each!(|a| self.0.swap::<BY>(a)),
            4 => [a[1], a[0], a[3], a[2]],
            8 => [a[2], a[3], a[0], a[1]],
            _ => unreachable!("lanes {BY} apart"),
        }
    }

    #[inline(always)]
    fn largest(self, [a, b, c, d]: Self::Floats) -> f32 {
        let q = self.0;
        let four = q.max(q.max(a, c), q.max(b, d));
        let two = q.max(four, q.swap::<2>(four));
        q.first(q.max(two, q.swap::<1>(two)))
    }

    #[inline(always)]
    fn sum(self, [a, b, c, d]: Self::Floats) -> f32 {
        let q = self.0;
        let four = q.add(q.add(a, c), q.add(b, d));
        let two = q.add(four, q.swap::<2>(four));
        q.first(q.add(two, q.swap::<1>(two)))
    }

    #[inline(always)]
    fn round(self, a: Self::Floats) -> Self::Ints {
        each!(|a| self.0.round(a))
    }

    #[inline(always)]
    fn to_floats(self, a: Self::Ints) -> Self::Floats {
        each!(|a| self.0.to_floats(a))
    }

    #[inline(always)]
    fn load_f16(self, x: &[u8; 32]) -> Self::Floats {
        let x = quarters!(x);
        each!(|x| self.0.load_f16(x))
    }

    #[inline(always)]
    fn load_bf16(self, x: &[u8; 32]) -> Self::Floats {
        let x = quarters!(x);
        each!(|x| self.0.load_bf16(x))
    }

    #[inline(always)]
    fn load_f32(self, x: &[u8; 64]) -> Self::Floats {
        let x = quarters!(x);
        each!(|x| self.0.of_bits(self.0.load_i(x)))
    }

    #[inline(always)]
    fn to_f16(self, a: Self::Floats) -> [[u8; 2]; 16] {
        let q = self.0;
        let (max, min) = (q.splat(F16_MAX), q.splat(-F16_MAX));
        bytemuck::cast(each!(|a| {
            let a = q.select(q.less(a, max), a, max);
            q.to_f16(q.max(a, min))
        }))
    }

    #[inline(always)]
    fn dot(self, sum: Self::Ints, codes: Self::Ints, bytes: [i8; 4]) -> Self::Ints {
        each!(|sum, codes| self.0.dot(sum, codes, bytes))
    }

    #[inline(always)]
    fn codes_8(self, x: &[u8; 64]) -> Self::Ints {
        let x = quarters!(x);
        each!(|x| self.0.load_i(x))
    }

    #[inline(always)]
    fn codes_4(self, x: &[u8; 32]) -> Self::Ints {
        let q = self.0;
        let [a, b] = x.as_chunks().0 else { unreachable!("two halves") };
        let (a, b, nibble) = (q.load_i(a), q.load_i(b), q.splat_bytes(15));
        let (low_a, low_b) = (q.and_i(a, nibble), q.and_i(b, nibble));
        [low_a, low_b, q.shift_bytes(a, -4), q.shift_bytes(b, -4)]
    }

    #[inline(always)]
    fn codes_2(self, x: &[u8; 16]) -> Self::Ints {
        let (q, all, i) = (self.0, self.0.load_i(x), NUMBERS);
        each!(|i| q.and_i(q.shift_bytes(all, -2 * i as i32), q.splat_bytes(3)))
    }

    #[inline(always)]
    fn look_up_3(self, low: &[u8; 16], high: &[u8; 8], table: &[u8; 16]) -> Self::Ints {
        self.look_up(self.codes_3(low, high), table)
    }

    #[inline(always)]
    fn codes_3(self, low: &[u8; 16], high: &[u8; 8]) -> Self::Ints {
        let (q, low, i) = (self.0, self.codes_2(low), NUMBERS);
        let mut padded = [0; 16];
        padded[..8].copy_from_slice(high);
        let (high, eighths, bits) = (q.load_i(&padded), q.load_i(&EIGHTHS), q.load_i(&BITS));
        each!(|low, i| {
            let near = q.pick(high, q.add_i(eighths, q.splat_i(0x0202_0202 * i as i32)));
            q.or_i(low, q.and_i(q.has_bits(near, bits), q.splat_bytes(4)))
        })
    }

    #[inline(always)]
    fn look_up(self, codes: Self::Ints, table: &[u8; 16]) -> Self::Ints {
        let table = self.0.load_i(table);
        each!(|codes| self.0.pick(table, codes))
    }

    #[inline(always)]
    fn look_up_64(self, codes: Self::Ints, table: &[u8; 64]) -> Self::Ints {
        each!(|codes| self.0.look_up_64(codes, table))
    }

    #[inline(always)]
    fn load_2(self, low: &[u8; 16]) -> Self::Codes2 {
        self.codes_2(low)
    }

    #[inline(always)]
    fn load_3<const ABOVE: bool>(self, low: &[u8; 16], high: &[u8; 8]) -> Self::Codes3 {
        let codes = self.codes_3(low, high);
        if ABOVE { each!(|codes| self.0.left::<3>(codes)) } else { codes }
    }

    #[inline(always)]
    fn look_up_triples(self, [a, b, c]: [Self::Codes2; 3], table: &[u8; 64]) -> Self::Ints {
        let q = self.0;
        let codes = each!(|a, b, c| q.or_i(a, q.left::<2>(q.or_i(b, q.left::<2>(c)))));
        self.look_up_64(codes, table)
    }

    #[inline(always)]
    fn look_up_pairs(self, below: Self::Codes3, above: Self::Codes3, table: &PairTable) -> Self::Ints {
        self.look_up_64(self.or_i(below, above), &table.by_code)
    }

    #[inline(always)]
    fn transpose(self, [a, b, c, d]: [Self::Ints; 4]) -> [Self::Ints; 4] {
        // Exchanges 4x4 squares, and transposes each.
        let (q, turned, i) = (self.0, self.0.load_i(&TURNED), NUMBERS);
        each!(|i| {
            let squares = [a[i], b[i], c[i], d[i]];
            each!(|squares| q.pick(squares, turned))
        })
    }

    #[inline(always)]
    fn store_codes(self, codes: Self::Ints, x: &mut [u8; 64]) {
        let (quarters, _) = x.as_chunks_mut();
        self.0.store_i(codes[0], &mut quarters[0]);
        self.0.store_i(codes[1], &mut quarters[1]);
        self.0.store_i(codes[2], &mut quarters[2]);
        self.0.store_i(codes[3], &mut quarters[3]);
    }

    #[inline(always)]
    fn split(self, a: Self::Ints) -> [[[i8; 4]; 4]; 2] {
        // The remainder of an integer after rounding to the high byte is a signed byte: its low
        // one.
        let q = self.0;
        let high = each!(|a| q.right_signed::<8>(q.add_i(a, q.splat_i(128))));
        [self.low_bytes(high), self.low_bytes(a)]
    }

    #[inline(always)]
    fn join(self, high: Self::Ints, low: Self::Ints) -> Self::Ints {
        each!(|high, low| self.0.add_i(self.0.left::<8>(high), low))
    }
}
