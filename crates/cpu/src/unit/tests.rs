//! Units do what their definition says, and the imitation takes no liberties.

use super::*;
use crate::Amx;

const STRIDE: usize = 72;

/// Something for every byte, both signs and the extremes among it.
fn bytes(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 37 + seed * i / 5 + seed) as u8).collect()
}

/// Products of so many words, signed and unsigned, one upon the other, against the definition.
fn adds_products<U: Unit>(unit: U, words: usize) {
    let (rows, lines) = (bytes(ROWS * STRIDE, 3), bytes(MOST_WORDS * STRIDE, 11));
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
    for words in [1, 4, 8, MOST_WORDS] {
        adds_products(SoftUnit, words);
        if let Some(amx) = Amx::detect() {
            adds_products(amx, words);
        }
    }
}

#[test]
#[should_panic = "rows"]
fn the_imitation_refuses_to_multiply_what_was_not_loaded() {
    let mut tiles = SoftUnit.open(8);
    tiles.zero::<0>();
    tiles.dot_signed::<0, 4, 6>();
}

#[test]
#[should_panic = "configured twice"]
fn the_imitation_refuses_to_be_configured_twice() {
    let _tiles = SoftUnit.open(8);
    let _more = SoftUnit.open(4);
}
