//! tq3_1s and tq4_1s: weights in 3 and 4 bits after a 32-wide rotation.
//!
//! ```text
//! y = Rotation::tq().forward(w)     [32]
//! ŷ_j = level(idx_j) · d0 for j < 16, · d1 for j >= 16
//! ```
//!
//! | format | bytes | bits per value | layout (little endian) |
//! |---|---|---|---|
//! | tq3_1s | 16 | 4.0 | d0 f16, d1 f16, four groups of 8 indices, each a 24-bit word with index i at bits 3i |
//! | tq4_1s | 20 | 5.0 | d0 f16, d1 f16, 16 bytes: value j in byte j/2, low nibble for even j |
//!
//! Levels: [`Codebook::TQ3`] (as in existing files) and [`Codebook::GAUSS4`]. The tensor type ids 45 and 46 are private
//! to one public fork.
//!
//! Encoder: both scales start at the half's root mean square times one common factor out of nine, the best by total
//! squared error; then six rounds of nearest index and least-squares scale per half.
//!
//! Zero and bad numbers: NaN counts as 0, values are clamped to ±65,504; a half without energy gets scale 0.
//! Seek unit: one block.

use half::f16;

use crate::finite::{F16_MAX, clamp, to_f16};
use crate::{Codebook, Rotation};

/// Values per block.
pub const LEN: usize = 32;
const HALF: usize = 16;

const FACTORS: [f32; 9] = [0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.35, 1.5];
const ROUNDS: usize = 6;

/// Indices of one half for scale `d`.
fn assign(book: &Codebook, y: &[f32; HALF], d: f32) -> [u8; HALF] {
    let inverse = if to_f16(d) == f16::ZERO { 0.0 } else { 1.0 / d };
    y.map(|v| book.nearest(v * inverse))
}

fn level(book: &Codebook, index: u8) -> f32 {
    book.levels()[usize::from(index)]
}

fn squared_error(book: &Codebook, y: &[f32; HALF], d: f32) -> f64 {
    let indices = assign(book, y, d);
    y.iter().zip(indices).map(|(&v, i)| f64::from(v - level(book, i) * d).powi(2)).sum()
}

/// The scale that fits the levels of `indices` to `y` best.
fn least_squares(book: &Codebook, y: &[f32; HALF], indices: &[u8; HALF]) -> f32 {
    let (mut yc, mut cc) = (0.0, 0.0);
    for (&v, &i) in y.iter().zip(indices) {
        let c = f64::from(level(book, i));
        yc += f64::from(v) * c;
        cc += c * c;
    }
    (yc / cc) as f32
}

/// The two scales and 32 indices of a block.
fn fit(book: &Codebook, w: &[f32; LEN]) -> ([f16; 2], [u8; LEN]) {
    let mut y = w.map(|v| clamp(v, F16_MAX));
    Rotation::tq().forward(&mut y);
    let halves: [[f32; HALF]; 2] = [std::array::from_fn(|j| y[j]), std::array::from_fn(|j| y[HALF + j])];
    let rms =
        halves.map(|h| (h.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / HALF as f64).sqrt() as f32);
    let total = |factor: f32| -> f64 {
        halves.iter().zip(rms).map(|(h, rms)| squared_error(book, h, rms * factor)).sum()
    };
    let mut best = (FACTORS[0], total(FACTORS[0]));
    for factor in &FACTORS[1..] {
        let error = total(*factor);
        if error < best.1 {
            best = (*factor, error);
        }
    }
    let mut scales = [f16::ZERO; 2];
    let mut indices = [0; LEN];
    for half in 0..2 {
        let mut d = rms[half] * best.0;
        for _ in 0..ROUNDS {
            d = least_squares(book, &halves[half], &assign(book, &halves[half], d));
        }
        indices[HALF * half..][..HALF].copy_from_slice(&assign(book, &halves[half], d));
        scales[half] = to_f16(d);
    }
    (scales, indices)
}

fn decode(book: &Codebook, scales: [f16; 2], indices: &[u8; LEN]) -> [f32; LEN] {
    let mut y = std::array::from_fn(|j| level(book, indices[j]) * scales[j / HALF].to_f32());
    Rotation::tq().inverse(&mut y);
    y
}

fn put_scales(scales: [f16; 2], block: &mut [u8]) {
    block[..2].copy_from_slice(&scales[0].to_le_bytes());
    block[2..4].copy_from_slice(&scales[1].to_le_bytes());
}

fn scales(block: &[u8]) -> [f16; 2] {
    [f16::from_le_bytes([block[0], block[1]]), f16::from_le_bytes([block[2], block[3]])]
}

pub(crate) fn pack_tq3(w: &[f32; LEN], block: &mut [u8; 16]) {
    let (scales, indices) = fit(&Codebook::TQ3, w);
    put_scales(scales, block);
    for (bytes, group) in block[4..].chunks_exact_mut(3).zip(indices.chunks_exact(8)) {
        let word =
            group.iter().enumerate().fold(0u32, |word, (i, &index)| word | u32::from(index) << (3 * i));
        bytes.copy_from_slice(&word.to_le_bytes()[..3]);
    }
}

pub(crate) fn unpack_tq3(block: &[u8; 16]) -> [f32; LEN] {
    let index = |j: usize| {
        let b = &block[4 + 3 * (j / 8)..];
        (u32::from_le_bytes([b[0], b[1], b[2], 0]) >> (3 * (j % 8)) & 7) as u8
    };
    decode(&Codebook::TQ3, scales(block), &std::array::from_fn(index))
}

pub(crate) fn pack_tq4(w: &[f32; LEN], block: &mut [u8; 20]) {
    let (scales, indices) = fit(&Codebook::GAUSS4, w);
    put_scales(scales, block);
    for (byte, pair) in block[4..].iter_mut().zip(indices.chunks_exact(2)) {
        *byte = pair[0] | pair[1] << 4;
    }
}

pub(crate) fn unpack_tq4(block: &[u8; 20]) -> [f32; LEN] {
    let index = |j: usize| block[4 + j / 2] >> (4 * (j % 2)) & 15;
    decode(&Codebook::GAUSS4, scales(block), &std::array::from_fn(index))
}
