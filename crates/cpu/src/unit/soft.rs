//! An imitation of a matrix unit for machines without one, stricter than AMX: what was not loaded, or is fetched while it is under way,
//! is a panic.

use std::cell::Cell;

use super::{MOST_WORDS, Products, ROWS, Row, SLOTS, Tiles, Unit};

thread_local! {
    /// Whether the tiles of this thread are configured.
    static IS_OPEN: Cell<bool> = const { Cell::new(false) };
}

/// Stands beside any vectors.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SoftUnit;

/// Tiles as memory; `None` until they are loaded.
pub(crate) struct SoftTiles {
    words: usize,
    sums: [Option<[[i32; 16]; ROWS]>; 4],
    rows: [Option<[[u8; 64]; ROWS]>; 2],
    lines: [Option<[[u8; 64]; MOST_WORDS]>; 2],
    slots: [Option<Products>; SLOTS],
}

impl Unit for SoftUnit {
    type Tiles = SoftTiles;

    const LEAST_QUERIES: usize = 1;

    fn open(self, words: usize) -> SoftTiles {
        assert!((1..=MOST_WORDS).contains(&words), "{words} words");
        assert!(!IS_OPEN.replace(true), "configured twice");
        SoftTiles { words, sums: [None; 4], rows: [None; 2], lines: [None; 2], slots: [None; SLOTS] }
    }
}

impl Drop for SoftTiles {
    fn drop(&mut self) {
        IS_OPEN.set(false);
    }
}

impl SoftTiles {
    /// `C += A · B` in words of bytes, those of `B` as `byte` reads them.
    fn dot<const C: usize, const A: usize, const B: usize>(&mut self, byte: impl Fn(u8) -> i32) {
        let (rows, lines) = (self.rows[A - 4].expect("rows"), self.lines[B - 6].expect("lines"));
        let sums = self.sums[C].as_mut().expect("sums to add to");
        for (line, w) in lines[..self.words].iter().zip(0..) {
            for j in 0..4 {
                let column: [i32; 16] = std::array::from_fn(|n| byte(line[4 * n + j]));
                for (sums, row) in sums.iter_mut().zip(&rows) {
                    let x = i32::from(row[4 * w + j] as i8);
                    // As the instruction: nothing saturates.
                    sums.iter_mut().zip(column).for_each(|(sum, y)| *sum = sum.wrapping_add(x * y));
                }
            }
        }
    }
}

impl Tiles for SoftTiles {
    fn zero<const C: usize>(&mut self) {
        self.sums[C] = Some([[0; 16]; ROWS]);
    }

    fn load_rows<const A: usize>(&mut self, bytes: &[u8], stride: usize) {
        let width = 4 * self.words;
        self.rows[A - 4] = Some(std::array::from_fn(|m| {
            let mut row = [0; 64];
            row[..width].copy_from_slice(&bytes[m * stride..][..width]);
            row
        }));
    }

    fn load_lines<const B: usize>(&mut self, bytes: &[u8], stride: usize) {
        let mut tile = [[0; 64]; MOST_WORDS];
        for (w, line) in tile[..self.words].iter_mut().enumerate() {
            line.copy_from_slice(&bytes[w * stride..][..64]);
        }
        self.lines[B - 6] = Some(tile);
    }

    fn dot_signed<const C: usize, const A: usize, const B: usize>(&mut self) {
        self.dot::<C, A, B>(|byte| i32::from(byte as i8));
    }

    fn dot_unsigned<const C: usize, const A: usize, const B: usize>(&mut self) {
        self.dot::<C, A, B>(i32::from);
    }

    fn store<const C: usize>(&mut self, slot: usize) {
        // What is stored is under way no longer: whoever wants more zeroes first.
        let sums = self.sums[C].take().expect("sums to store");
        self.slots[slot % SLOTS] = Some(sums.map(|row| Row(bytemuck::cast(row))));
    }

    fn stored(&self, slot: usize) -> &Products {
        self.slots[slot % SLOTS].as_ref().expect("a slot that was stored to")
    }
}
