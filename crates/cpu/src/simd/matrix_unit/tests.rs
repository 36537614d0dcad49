//! Units match their definition, and the emulation is strict.

use super::*;
use crate::simd::amx::Amx;

const STRIDE: usize = 72;

/// Returns a value for every byte, with both signs and the extremes.
fn bytes(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 37 + seed * i / 5 + seed) as u8).collect()
}

/// Compares products of so many words, signed and then unsigned, with the definition.
fn adds_products<U: Unit>(unit: U, words: usize) {
    let (rows, lines) = (bytes(ROWS * STRIDE, 3), bytes(MAX_WORDS * STRIDE, 11));
    let mut tiles = unit.open(words);
    tiles.load_rows::<4>(&rows, STRIDE);
    tiles.load_lines::<7>(&lines, STRIDE);
    tiles.zero::<2>();
    tiles.dot_signed::<2, 4, 7>();
    tiles.load_rows::<5>(&rows[4..], STRIDE);
    tiles.load_lines::<6>(&lines[8..], STRIDE);
    tiles.dot_unsigned::<2, 5, 6>();
    tiles.store::<2>(5);
    let stored = *tiles.stored(5);
    for (m, n) in (0..ROWS).flat_map(|m| (0..16).map(move |n| (m, n))) {
        let mut want = 0;
        for (w, j) in (0..words).flat_map(|w| (0..4).map(move |j| (w, j))) {
            let [x, y] = [rows[m * STRIDE + 4 * w + j], lines[w * STRIDE + 4 * n + j]];
            want += i32::from(x as i8) * i32::from(y as i8);
            let [x, y] = [rows[m * STRIDE + 4 + 4 * w + j], lines[w * STRIDE + 8 + 4 * n + j]];
            want += i32::from(x as i8) * i32::from(y);
        }
        assert_eq!(i32::from_le_bytes(stored[m].0.as_chunks().0[n]), want, "{words} words, {m} {n}");
    }
}

#[test]
fn units_add_products_of_bytes() {
    for words in [1, 4, 8, MAX_WORDS] {
        adds_products(EmulatedUnit, words);
        if let Some(amx) = Amx::detect() {
            adds_products(amx, words);
        }
    }
}

/// Returns one product of halves added to some sums.
fn halves<U: Unit>(unit: U, words: usize, [rows, lines]: [&[u8]; 2], sums: &Products) -> Products {
    let mut tiles = unit.open(words);
    tiles.load_rows::<4>(rows, 64);
    tiles.load_lines::<7>(lines, 64);
    tiles.load_sums::<2>(sums);
    tiles.dot_halves::<2, 4, 7>();
    let mut sums = [Row::ZERO; ROWS];
    tiles.store_sums::<2>(&mut sums);
    sums
}

/// The same bits everywhere, and where sums are exact, those of the definition.
#[test]
fn units_add_products_of_halves() {
    let random = |seed| {
        let mut random = kvant_codec::random::Random::new(seed);
        let mut values = [0.0; 512];
        random.fill_gaussian(&mut values, 1.0);
        values
    };
    let small = |seed: usize| std::array::from_fn(|i| ((i * 37 + seed) % 15) as f32 - 7.0);
    for (is_exact, [x, y]) in [(true, [small(1), small(8)]), (false, [random(1), random(2)])] {
        let bytes = |values: [f32; 512]| -> Vec<u8> {
            values.iter().flat_map(|&v| half::bf16::from_f32(v).to_le_bytes()).collect()
        };
        let ([rows, lines], words) = ([x, y].map(bytes), 12);
        let sums: Products = bytemuck::cast([[1.5f32; 16]; ROWS]);
        let got = halves(EmulatedUnit, words, [&rows, &lines], &sums);
        if let Some(amx) = Amx::detect() {
            assert_eq!(halves(amx, words, [&rows, &lines], &sums), got);
        }
        let floats: [[f32; 16]; ROWS] = bytemuck::cast(got);
        for (m, n) in (0..ROWS).flat_map(|m| (0..16).map(move |n| (m, n))) {
            let products = (0..2 * words).map(|k| {
                let [x, y] = [x[32 * m + k], y[32 * (k / 2) + 2 * n + k % 2]]
                    .map(|v| half::bf16::from_f32(v).to_f64());
                x * y
            });
            let bound = if is_exact {
                0.0
            } else {
                15.0 * 2f64.powi(-24) * products.clone().map(f64::abs).sum::<f64>()
            };
            let error = (f64::from(floats[m][n]) - 1.5 - products.sum::<f64>()).abs();
            assert!(error <= bound, "{m} {n}: {} is off by {error}, bound {bound}", floats[m][n]);
        }
    }
}

/// The definition of the order and of subnormal numbers.
#[test]
fn halves_are_added_in_their_order_and_subnormal_ones_are_zero() {
    // Even columns multiply 2^24, 1 and -2^24 in this order: the 1 is lost. Odd ones multiply 1,
    // which is not.
    let one_row = |values: [f32; 6]| {
        let mut bytes = vec![0; ROWS * 64];
        for (i, v) in values.into_iter().enumerate() {
            bytes[2 * i..][..2].copy_from_slice(&half::bf16::from_f32(v).to_le_bytes());
        }
        bytes
    };
    let ones: Vec<u8> = std::iter::repeat_n(half::bf16::ONE.to_le_bytes(), 512).flatten().collect();
    let zero = [Row::ZERO; ROWS];
    let first = |sums: Products| f32::from_le_bytes(sums[0].0.as_chunks().0[0]);
    let tiny = f32::MIN_POSITIVE;
    let in_order = one_row([2f32.powi(24), 0.0, 1.0, 1.0, -2f32.powi(24), 0.0]);
    let subnormal = one_row([tiny / 4.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
    let difference = one_row([1.5 * tiny, -tiny, 0.0, 0.0, 0.0, 0.0]);
    for (rows, want) in [(in_order, 1.0), (subnormal, 0.0), (difference, 0.0)] {
        assert_eq!(first(halves(EmulatedUnit, 3, [&rows, &ones], &zero)), want);
        if let Some(amx) = Amx::detect() {
            assert_eq!(first(halves(amx, 3, [&rows, &ones], &zero)), want);
        }
    }
}

#[test]
#[should_panic = "rows"]
fn the_emulation_rejects_products_of_unloaded_tiles() {
    let mut tiles = EmulatedUnit.open(8);
    tiles.zero::<0>();
    tiles.dot_signed::<0, 4, 6>();
}

#[test]
#[should_panic = "configured twice"]
fn the_emulation_rejects_a_second_configuration() {
    let _tiles = EmulatedUnit.open(8);
    let _more = EmulatedUnit.open(4);
}
