//! An emulated matrix unit for machines without one, stricter than AMX: reading a tile that was not
//! loaded, or a slot that was not stored, panics.

use std::cell::Cell;

use super::{MAX_WORDS, Products, ROWS, SLOTS, Tiles, Unit};

thread_local! {
    /// Whether the tiles of this thread are configured.
    static IS_OPEN: Cell<bool> = const { Cell::new(false) };
}

/// Works beside any vectors.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EmulatedUnit;

/// Tiles in memory; `None` until they are loaded.
pub(crate) struct SoftTiles {
    words: usize,
    /// Integers, or the bits of floats.
    sums: [Option<[[i32; 16]; ROWS]>; 4],
    rows: [Option<[[u8; 64]; ROWS]>; 2],
    lines: [Option<[[u8; 64]; MAX_WORDS]>; 2],
    slots: [Option<Products>; SLOTS],
}

impl Unit for EmulatedUnit {
    type Tiles = SoftTiles;

    const MIN_QUERIES: usize = 1;
    const QUERIES: usize = 112;

    fn open(self, words: usize) -> SoftTiles {
        assert!((1..=MAX_WORDS).contains(&words), "{words} words");
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
    /// Computes `C += A · B` in words of bytes, those of `B` as `byte` converts them.
    fn dot<const C: usize, const A: usize, const B: usize>(&mut self, byte: impl Fn(u8) -> i32) {
        let (rows, lines) = (self.rows[A - 4].expect("rows"), self.lines[B - 6].expect("lines"));
        let sums = self.sums[C].as_mut().expect("sums to add to");
        for (line, w) in lines[..self.words].iter().zip(0..) {
            for j in 0..4 {
                let column: [i32; 16] = std::array::from_fn(|n| byte(line[4 * n + j]));
                for (sums, row) in sums.iter_mut().zip(&rows) {
                    let x = i32::from(row[4 * w + j] as i8);
                    // Wraps as the instruction does, without saturation.
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
        let mut tile = [[0; 64]; MAX_WORDS];
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

    fn dot_part<const C: usize, const A: usize, const B: usize>(&mut self, part: usize) {
        let (rows, lines) = (self.rows[A - 4].expect("rows"), self.lines[B - 6].expect("lines"));
        let sums = self.sums[C].as_mut().expect("sums to add to");
        for (sums, row) in sums.iter_mut().zip(&rows) {
            for (line, x) in lines[..self.words].iter().zip(row.as_chunks::<4>().0) {
                let x = [[x[0], x[1]], [x[2], x[3]]].map(|x| i32::from(i16::from_le_bytes(x)));
                for (sum, y) in sums.iter_mut().zip(line.as_chunks::<4>().0) {
                    let y = [y[part], y[part + 2]].map(i32::from);
                    *sum = sum.wrapping_add(x[0] * y[0] + x[1] * y[1]);
                }
            }
        }
    }

    fn dot_halves<const C: usize, const A: usize, const B: usize>(&mut self) {
        let (rows, lines) = (self.rows[A - 4].expect("rows"), self.lines[B - 6].expect("lines"));
        let sums = self.sums[C].as_mut().expect("sums to add to");
        let operands = (&rows, &lines[..self.words]);
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            // SAFETY: both features were detected.
            unsafe { add_halves_avx2(sums, operands) }
        } else {
            add_halves(sums, operands);
        }
    }

    fn load_sums<const C: usize>(&mut self, sums: &Products) {
        self.sums[C] = Some(sums.map(bytemuck::cast));
    }

    fn store_sums<const C: usize>(&mut self, sums: &mut Products) {
        *sums = self.sums[C].take().expect("sums to store").map(bytemuck::cast);
    }

    fn store<const C: usize>(&mut self, slot: usize) {
        // Storing consumes the sums: a new product starts with `zero`.
        let sums = self.sums[C].take().expect("sums to store");
        self.slots[slot % SLOTS] = Some(sums.map(bytemuck::cast));
    }

    fn stored(&self, slot: usize) -> &Products {
        self.slots[slot % SLOTS].as_ref().expect("a slot that was stored to")
    }
}

/// Rows, and lines, of halves.
type Operands<'a> = (&'a [[u8; 64]; ROWS], &'a [[u8; 64]]);

/// Computes [`add_halves`] where the processor has fused multiply-add: the same result, faster.
#[target_feature(enable = "avx2,fma")]
fn add_halves_avx2(sums: &mut [[i32; 16]; ROWS], operands: Operands<'_>) {
    add_halves(sums, operands);
}

/// Computes `C += A · B` of halves, operation by operation as Intel's manual defines TDPBF16PS.
#[inline(always)]
fn add_halves(sums: &mut [[i32; 16]; ROWS], (rows, lines): Operands<'_>) {
    for (sums, row) in sums.iter_mut().zip(rows) {
        let mut of_halves = [[0.0f32; 16]; 2];
        for (x, line) in row.as_chunks::<4>().0.iter().zip(lines) {
            let line = line.as_chunks::<4>().0;
            for (half, of_half) in of_halves.iter_mut().enumerate() {
                let x = value([x[2 * half], x[2 * half + 1]]);
                for n in 0..16 {
                    let y = value([line[n][2 * half], line[n][2 * half + 1]]);
                    of_half[n] = flushed(x.mul_add(y, of_half[n]));
                }
            }
        }
        for n in 0..16 {
            let more = flushed(of_halves[0][n] + of_halves[1][n]);
            let sum = flushed(f32::from_bits(sums[n] as u32));
            sums[n] = flushed(sum + more).to_bits() as i32;
        }
    }
}

/// Returns the value of the bits of a bf16.
#[inline(always)]
fn value(bytes: [u8; 2]) -> f32 {
    flushed(f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16))
}

/// Returns zero, of the same sign, for a subnormal number.
#[inline(always)]
fn flushed(x: f32) -> f32 {
    if x.abs() < f32::MIN_POSITIVE { 0.0f32.copysign(x) } else { x }
}
