//! [`Simd`] on pairs of 128-bit registers: eight rows to a pair.
//!
//! Products are of signed bytes. Codes below 128 are valid signed bytes; for those of 8 bits the
//! top bit is flipped, which makes them signed, so that no zero is subtracted.

use super::{Kernel, Simd};
use crate::simd::matmul::format::{PANEL, WeightFormat};
use crate::simd::vec128::{Quad, Quads, Task};

/// Applies the same operation to both registers.
macro_rules! pair {
    (|$($x:ident),+| $body:expr) => {
        [
            { let ($($x,)+) = ($($x[0],)+); $body },
            { let ($($x,)+) = ($($x[1],)+); $body },
        ]
    };
}

/// A kernel and its vectors.
struct OnVectors<Q, K>(Quads<Q>, K);

impl<Q: Quad, K: Kernel> Task for OnVectors<Q, K> {
    type Output = K::Output;

    #[inline(always)]
    fn run(self) -> K::Output {
        self.1.run(self.0)
    }
}

/// Returns chunks `2 · index` and `2 · index + 1` of a line.
#[inline(always)]
fn pieces<const B: usize>(line: &[u8; 64], index: usize) -> [&[u8; B]; 2] {
    let (pieces, _) = line.as_chunks();
    [&pieces[2 * index], &pieces[2 * index + 1]]
}

impl<Q: Quad> Simd for Quads<Q> {
    type Ints = [Q::Ints; 2];
    type Floats = [Q::Floats; 2];

    const PARTS: usize = 2;
    const FLOAT_TILE: usize = 6;

    #[inline(always)]
    fn run<K: Kernel>(self, kernel: K) -> K::Output {
        self.0.run(OnVectors(self, kernel))
    }

    #[inline(always)]
    fn load(self, line: &[u8; 64], part: usize) -> Self::Ints {
        let x = pieces(line, part);
        pair!(|x| self.0.load_i(x))
    }

    #[inline(always)]
    fn store(self, a: Self::Ints, line: &mut [u8; 64], part: usize) {
        let (pieces, _) = line.as_chunks_mut();
        self.0.store_i(a[0], &mut pieces[2 * part]);
        self.0.store_i(a[1], &mut pieces[2 * part + 1]);
    }

    #[inline(always)]
    fn splat_i(self, x: i32) -> Self::Ints {
        [self.0.splat_i(x); 2]
    }

    #[inline(always)]
    fn field(self, a: Self::Ints, by: i32, mask: i8) -> Self::Ints {
        let mask = self.0.splat_bytes(mask as u8);
        pair!(|a| self.0.and_i(self.0.shift_bytes(a, -by), mask))
    }

    #[inline(always)]
    fn join(self, low: Self::Ints, a: Self::Ints, left: i32, mask: i8) -> Self::Ints {
        let mask = self.0.splat_bytes(mask as u8);
        pair!(|low, a| self.0.or_i(low, self.0.and_i(self.0.shift_bytes(a, left), mask)))
    }

    #[inline(always)]
    fn less(self, a: Self::Ints, zero: u8) -> Self::Ints {
        pair!(|a| self.0.sub_bytes(a, self.0.splat_bytes(zero)))
    }

    #[inline(always)]
    fn look_up(self, table: &[u8; 16], codes: Self::Ints) -> Self::Ints {
        let table = self.0.load_i(table);
        pair!(|codes| self.0.pick(table, codes))
    }

    #[inline(always)]
    fn look_up_64(self, table: &[u8; 64], codes: Self::Ints) -> Self::Ints {
        pair!(|codes| self.0.look_up_64(codes, table))
    }

    #[inline(always)]
    fn rotate_bytes(self, a: Self::Ints) -> Self::Ints {
        pair!(|a| self.0.or_i(self.0.left::<8>(a), self.0.right::<24>(a)))
    }

    #[inline(always)]
    fn splat(self, x: f32) -> Self::Floats {
        [self.0.splat(x); 2]
    }

    #[inline(always)]
    fn load_floats(self, x: &[f32; PANEL], part: usize) -> Self::Floats {
        let (fours, _) = x.as_chunks();
        [self.0.load(&fours[2 * part]), self.0.load(&fours[2 * part + 1])]
    }

    #[inline(always)]
    fn store_floats(self, a: Self::Floats, x: &mut [f32; PANEL], part: usize) {
        let (fours, _) = x.as_chunks_mut();
        self.0.store(a[0], &mut fours[2 * part]);
        self.0.store(a[1], &mut fours[2 * part + 1]);
    }

    #[inline(always)]
    fn load_f16(self, line: &[u8; 64], half: usize, part: usize) -> Self::Floats {
        let x = pieces(line, 2 * half + part);
        pair!(|x| self.0.load_f16(x))
    }

    #[inline(always)]
    fn load_bf16(self, line: &[u8; 64], half: usize, part: usize) -> Self::Floats {
        let x = pieces(line, 2 * half + part);
        pair!(|x| self.0.load_bf16(x))
    }

    #[inline(always)]
    fn load_bytes(self, line: &[u8; 64], quarter: usize, part: usize) -> Self::Floats {
        let x = pieces(line, 2 * quarter + part);
        pair!(|x| self.0.to_floats(self.0.widen(x)))
    }

    #[inline(always)]
    fn load_e8m0(self, line: &[u8; 64], quarter: usize, part: usize) -> Self::Floats {
        let (q, x) = (self.0, pieces(line, 2 * quarter + part));
        // 2^-127 has no exponent of its own.
        pair!(|x| q.of_bits(q.max_i(q.left::<23>(q.widen(x)), q.splat_i(1 << 22))))
    }

    #[inline(always)]
    fn load_e4m3(self, line: &[u8; 64], quarter: usize, part: usize) -> Self::Floats {
        let x: [&[u8; 4]; 2] = pieces(line, 2 * quarter + part);
        pair!(|x| {
            let [a, b, c, d] = x.map(|x| (u16::from(x) << 7).to_le_bytes());
            self.0.load_f16(&[a[0], a[1], b[0], b[1], c[0], c[1], d[0], d[1]])
        })
    }

    /// Puts mantissa and exponent at their f32 bits; the f32 exponent bias is larger by 120, that
    /// of the unit by 112.
    #[inline(always)]
    fn load_signed_e4m3(self, line: &[u8; 64], quarter: usize, part: usize) -> Self::Floats {
        let (q, x) = (self.0, pieces(line, 2 * quarter + part));
        pair!(|x| {
            let byte = q.widen(x);
            let sign = q.and_i(q.left::<24>(byte), q.splat_i(i32::MIN));
            let magnitude = q.and_i(q.left::<20>(byte), q.splat_i(0x7f << 20));
            q.mul(q.of_bits(q.or_i(sign, magnitude)), q.splat(2f32.powi(112)))
        })
    }

    /// Looks up the four bytes of each level.
    #[inline(always)]
    fn load_levels(self, levels: &[f32; 16], line: &[u8; 64], col: usize, part: usize) -> Self::Floats {
        let (q, x) = (self.0, self.load(line, part));
        let shift = q.splat_i(4 * (col as i32 ^ 1));
        pair!(|x| {
            let first = q.left::<2>(q.and_i(q.shift_right(x, shift), q.splat_i(15)));
            let two = q.or_i(first, q.left::<8>(first));
            let at = q.or_i(q.or_i(two, q.left::<16>(two)), q.splat_i(0x0302_0100));
            q.of_bits(q.look_up_64(at, bytemuck::cast_ref(levels)))
        })
    }

    #[inline(always)]
    fn to_floats(self, a: Self::Ints) -> Self::Floats {
        pair!(|a| self.0.to_floats(a))
    }

    #[inline(always)]
    fn bits_to_floats(self, a: Self::Ints) -> Self::Floats {
        pair!(|a| self.0.of_bits(a))
    }

    #[inline(always)]
    fn sub(self, a: Self::Floats, b: Self::Floats) -> Self::Floats {
        pair!(|a, b| self.0.sub(a, b))
    }

    #[inline(always)]
    fn mul(self, a: Self::Floats, b: Self::Floats) -> Self::Floats {
        pair!(|a, b| self.0.mul(a, b))
    }

    #[inline(always)]
    fn mul_add(self, a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats {
        pair!(|a, b, c| self.0.mul_add(a, b, c))
    }

    #[inline(always)]
    fn across<F: WeightFormat>() -> usize {
        1
    }

    /// Adds four products in 32 bits.
    #[inline(always)]
    fn groups_in_short_sum<F: WeightFormat>() -> usize {
        usize::MAX
    }

    #[inline(always)]
    fn start<F: WeightFormat>(self, neg_sum: i32) -> Self::Ints {
        let zero = if F::FACTOR_BITS == 8 { 0 } else { i32::from(F::FACTOR_ZERO) };
        self.splat_i(neg_sum * zero)
    }

    #[inline(always)]
    fn short<F: WeightFormat>(self, sum: Self::Ints, _: i32) -> Self::Ints {
        sum
    }

    #[inline(always)]
    fn dot<F: WeightFormat>(self, short: Self::Ints, w: Self::Ints, x: Self::Ints) -> Self::Ints {
        let q = self.0;
        pair!(|short, w, x| {
            let signed = if F::FACTOR_BITS == 8 { q.xor_i(w, q.splat_bytes(128)) } else { w };
            q.dot_signed(short, signed, x)
        })
    }

    #[inline(always)]
    fn widen(self, _: Self::Ints, short: Self::Ints) -> Self::Ints {
        short
    }
}
