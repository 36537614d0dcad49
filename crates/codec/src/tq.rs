//! tq3_1s and tq4_1s: weights in 3 and 4 bits after a 32-wide rotation.
//!
//! ```text
//! y = Rotation::tq().forward(w)     [32]
//! ŷ_j = level(idx_j) · d0 for j < 16, · d1 for j >= 16
//! ```
//!
//! | format | bytes | bits per value | layout (little endian) |
//! |---|---|---|---|
//! | tq3_1s | 16 | 4.0 | d0 f16, d1 f16, four 24-bit words of 8 indices, index i at bits 3i |
//! | tq4_1s | 20 | 5.0 | d0 f16, d1 f16, 16 bytes: value j in byte j/2, low nibble for even j |
//!
//! Levels: [`Codebook::TQ3`] (as in existing files) and [`Codebook::GAUSS4`]. The tensor type ids
//! 45 and 46 are private to one public fork.
//!
//! Encoder: both scales start at the half's root mean square times one common factor out of nine,
//! the best by total squared error; then six rounds of nearest index and least-squares scale per
//! half.
//!
//! Zero and non-finite numbers: NaN counts as 0, values are clamped to ±65,504; a half without
//! energy gets scale 0. Seek unit: one block.

use half::f16;

use crate::finite::{F16_MAX, clamp, to_f16};
use crate::{Codebook, Rotation};

/// Values per block.
pub const LEN: usize = 32;
const HALF: usize = 16;

const START_FACTORS: [f32; 9] = [0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.35, 1.5];
const ROUNDS: usize = 6;

/// The two scales and 32 indices of a block as stored.
pub(crate) type ScaledIndices = ([f16; 2], [u8; LEN]);

/// Returns the indices of one half for scale `d`.
fn nearest_indices(book: &Codebook, y: &[f32; HALF], d: f32) -> [u8; HALF] {
    let inverse = if to_f16(d) == f16::ZERO { 0.0 } else { 1.0 / d };
    y.map(|v| book.nearest(v * inverse))
}

fn level(book: &Codebook, index: u8) -> f32 {
    book.levels()[usize::from(index)]
}

fn squared_error(book: &Codebook, y: &[f32; HALF], d: f32) -> f64 {
    let indices = nearest_indices(book, y, d);
    y.iter().zip(indices).map(|(&v, i)| f64::from(v - level(book, i) * d).powi(2)).sum()
}

/// Returns the scale that best fits the levels of `indices` to `y`.
fn least_squares_scale(book: &Codebook, y: &[f32; HALF], indices: &[u8; HALF]) -> f32 {
    let (mut yc, mut cc) = (0.0, 0.0);
    for (&v, &i) in y.iter().zip(indices) {
        let c = f64::from(level(book, i));
        yc += f64::from(v) * c;
        cc += c * c;
    }
    (yc / cc) as f32
}

/// Fits the two scales and 32 indices of a block.
fn fit(book: &Codebook, w: &[f32; LEN]) -> ScaledIndices {
    let mut y = w.map(|v| clamp(v, F16_MAX));
    Rotation::tq().forward(&mut y);
    let halves: [[f32; HALF]; 2] = [std::array::from_fn(|j| y[j]), std::array::from_fn(|j| y[HALF + j])];
    let rms =
        halves.map(|h| (h.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / HALF as f64).sqrt() as f32);
    let total = |factor: f32| -> f64 {
        halves.iter().zip(rms).map(|(h, rms)| squared_error(book, h, rms * factor)).sum()
    };
    let mut best = (START_FACTORS[0], total(START_FACTORS[0]));
    for factor in &START_FACTORS[1..] {
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
            d = least_squares_scale(book, &halves[half], &nearest_indices(book, &halves[half], d));
        }
        indices[HALF * half..][..HALF].copy_from_slice(&nearest_indices(book, &halves[half], d));
        scales[half] = to_f16(d);
    }
    (scales, indices)
}

/// Decodes a block.
pub(crate) fn decode(book: &Codebook, (scales, indices): ScaledIndices) -> [f32; LEN] {
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

pub(crate) fn scaled_indices_tq3(block: &[u8; 16]) -> ScaledIndices {
    let index = |j: usize| {
        let b = &block[4 + 3 * (j / 8)..];
        (u32::from_le_bytes([b[0], b[1], b[2], 0]) >> (3 * (j % 8)) & 7) as u8
    };
    (scales(block), std::array::from_fn(index))
}

pub(crate) fn unpack_tq3(block: &[u8; 16]) -> [f32; LEN] {
    decode(&Codebook::TQ3, scaled_indices_tq3(block))
}

pub(crate) fn pack_tq4(w: &[f32; LEN], block: &mut [u8; 20]) {
    let (scales, indices) = fit(&Codebook::GAUSS4, w);
    put_scales(scales, block);
    for (byte, pair) in block[4..].iter_mut().zip(indices.chunks_exact(2)) {
        *byte = pair[0] | pair[1] << 4;
    }
}

pub(crate) fn scaled_indices_tq4(block: &[u8; 20]) -> ScaledIndices {
    (scales(block), std::array::from_fn(|j| block[4 + j / 2] >> (4 * (j % 2)) & 15))
}

pub(crate) fn unpack_tq4(block: &[u8; 20]) -> [f32; LEN] {
    decode(&Codebook::GAUSS4, scaled_indices_tq4(block))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    /// Decodes by the module's tables with the dense Hadamard matrix, sharing only the levels with
    /// the module.
    fn by_hand(book: &Codebook, d: [f16; 2], index: impl Fn(usize) -> u8) -> [f64; LEN] {
        let y: [f64; LEN] = std::array::from_fn(|j| {
            f64::from(book.levels()[usize::from(index(j))]) * d[usize::from(j >= 16)].to_f64()
        });
        std::array::from_fn(|i| {
            let h = |j: usize| if (i & j).count_ones() % 2 == 1 { -y[j] } else { y[j] };
            let sum: f64 = (0..LEN).map(h).sum();
            let sign = if (i as u32).wrapping_mul(0x9e37_79b9) >> 31 == 1 { -1.0 } else { 1.0 };
            sign * sum / 32f64.sqrt()
        })
    }

    fn assert_close(got: &[f32; LEN], want: &[f64; LEN]) {
        for (&got, &want) in got.iter().zip(want) {
            // Five butterflies of 32 values below 3: 5 · 2^-24 · 3 · √32 = 5e-6.
            assert!((f64::from(got) - want).abs() <= 5e-6, "{got} {want}");
        }
    }

    #[test]
    fn blocks_decode_as_the_table_states() {
        let mut random = Random::new(1);
        let d = [f16::from_f32(0.75), f16::from_f32(-0.5)];
        let mut tq3 = [0; 16];
        let mut tq4 = [0; 20];
        tq3.fill_with(|| random.bits() as u8);
        tq4.fill_with(|| random.bits() as u8);
        put_scales(d, &mut tq3);
        put_scales(d, &mut tq4);
        let bit = |j: usize, k: usize| {
            let at = 3 * (j % 8) + k;
            (tq3[4 + 3 * (j / 8) + at / 8] >> (at % 8) & 1) << k
        };
        assert_close(&unpack_tq3(&tq3), &by_hand(&Codebook::TQ3, d, |j| bit(j, 0) | bit(j, 1) | bit(j, 2)));
        let nibble = |j: usize| tq4[4 + j / 2] >> (4 * (j % 2)) & 15;
        assert_close(&unpack_tq4(&tq4), &by_hand(&Codebook::GAUSS4, d, nibble));
    }

    #[test]
    fn packing_keeps_scales_and_indices() {
        let mut w = [0.0; LEN];
        Random::new(2).fill_gaussian(&mut w, 0.1);
        for book in [Codebook::TQ3, Codebook::GAUSS4] {
            let (d, indices) = fit(&book, &w);
            let want = by_hand(&book, d, |j| indices[j]);
            if book == Codebook::TQ3 {
                let mut block = [0xff; 16];
                pack_tq3(&w, &mut block);
                assert_close(&unpack_tq3(&block), &want);
            } else {
                let mut block = [0xff; 20];
                pack_tq4(&w, &mut block);
                assert_close(&unpack_tq4(&block), &want);
            }
        }
    }

    #[test]
    fn each_half_has_its_own_scale() {
        let mut y = [0.0; LEN];
        Random::new(3).fill_gaussian(&mut y, 1.0);
        y[HALF..].iter_mut().for_each(|v| *v *= 100.0);
        Rotation::tq().inverse(&mut y);
        let (d, _) = fit(&Codebook::GAUSS4, &y);
        let ratio = d[1].to_f32() / d[0].to_f32();
        assert!((40.0..250.0).contains(&ratio), "{ratio}");
    }
}
