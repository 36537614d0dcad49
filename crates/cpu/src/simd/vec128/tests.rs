//! 2x2 matrix products match their definition.

use super::*;
use crate::simd::tokens::I8mm;

/// One product added to some sums; its operands are separated and interleaved again first.
struct Product {
    operands: [[i8; 16]; 2],
    /// Whether bytes of the first operand are unsigned.
    unsigned: bool,
    sums: [i32; 4],
}

impl Product {
    #[inline(always)]
    fn on(self, quad: I8mm) -> [i32; 4] {
        let [a, b] = self.operands.map(|x| quad.load_i(&x.map(|x| x as u8)));
        let ([low, high], sum) = (quad.halves(a, b), quad.load_i(&bytemuck::cast(self.sums)));
        let [a, b] = quad.halves(low, high);
        let sum =
            if self.unsigned { quad.dot_square_unsigned(sum, a, b) } else { quad.dot_square(sum, a, b) };
        let mut sums = [0; 16];
        quad.store_i(sum, &mut sums);
        bytemuck::cast(sums)
    }
}

impl Task for (I8mm, Product) {
    type Output = [i32; 4];

    #[inline(always)]
    fn run(self) -> [i32; 4] {
        self.1.on(self.0)
    }
}

#[test]
fn dot_square_multiplies_two_rows_by_two() {
    let Some(quad) = I8mm::detect() else { return eprintln!("skipped: this CPU has no i8mm") };
    // Both signs, and the extremes of both.
    for seed in 0..64 {
        let [a, b] = [37, 91].map(|by| std::array::from_fn(|i| ((i + seed) * by) as i8));
        let (a, b) = if seed == 63 { ([-128; 16], [-128; 16]) } else { (a, b) };
        let sums = [seed as i32, -5, 1 << 20, -(1 << 20)];
        for unsigned in [false, true] {
            let first = |a: i8| if unsigned { i32::from(a as u8) } else { i32::from(a) };
            let want: [i32; 4] = std::array::from_fn(|lane| {
                let rows = a[lane / 2 * 8..][..8].iter().zip(&b[lane % 2 * 8..][..8]);
                sums[lane] + rows.map(|(&a, &b): (&i8, &i8)| first(a) * i32::from(b)).sum::<i32>()
            });
            let product = Product { operands: [a, b], unsigned, sums };
            assert_eq!(quad.run((quad, product)), want, "{a:?} {b:?}, unsigned: {unsigned}");
        }
    }
}

#[test]
fn lanes_are_interleaved() {
    let Some(quad) = I8mm::detect() else { return eprintln!("skipped: this CPU has no i8mm") };
    let [a, b] = [[0i32, 1, 2, 3], [4, 5, 6, 7]].map(|x| quad.load_i(&bytemuck::cast(x)));
    let lanes = |registers: [_; 2]| {
        registers.map(|x| {
            let mut bytes = [0; 16];
            quad.store_i(x, &mut bytes);
            bytemuck::cast::<_, [i32; 4]>(bytes)
        })
    };
    assert_eq!(lanes(quad.interleave(a, b)), [[0, 4, 1, 5], [2, 6, 3, 7]]);
    assert_eq!(lanes(quad.deinterleave(a, b)), [[0, 2, 4, 6], [1, 3, 5, 7]]);
    assert_eq!(lanes(quad.halves(a, b)), [[0, 1, 4, 5], [2, 3, 6, 7]]);
    let rows = [[1, 2, 3, 4, 5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15, 16]];
    let mut bytes = [0; 16];
    quad.store_i(quad.load_rows([&rows[0], &rows[1]]), &mut bytes);
    assert_eq!(bytes.as_slice(), rows.as_flattened());
}
