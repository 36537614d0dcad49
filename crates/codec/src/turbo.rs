//! turbo2, turbo3, turbo4: the codec of the compressed KV cache.
//!
//! Purpose: store N = 128 coordinates of a K or V vector (64 or 32 where the head dimension leaves
//! less) in 2, 3 or 4 bits each so that attention reads them without an inverse rotation. Method:
//! TurboQuant's MSE quantizer ([arXiv 2504.19874](https://arxiv.org/abs/2504.19874)), preceded by
//! DRIVE and EDEN ([arXiv 2105.08339](https://arxiv.org/abs/2105.08339), [arXiv
//! 2108.08842](https://arxiv.org/abs/2108.08842)): rotate, code each coordinate with the Lloyd-Max
//! table of N(0, 1/N), store the norm in one f16.
//!
//! ```text
//! y     = rotation.forward(x)                        [N]
//! idx_j = nearest level to y_j · √N / (|y| · step)   ties go up; step 0.8 to 1.2, see crate::step
//! scale = f16(|y| / |c(idx)|)                        norm correction: keeps the norm of x
//! ŷ_j   = c(idx_j) · scale                           c ascending, levels / √128 for every N
//! ```
//!
//! | format | bytes per 128 | bits per value | layout (little endian) |
//! |---|---|---|---|
//! | turbo2 | 34 | 2.125 | scale f16, 32 bytes: value j in byte j/4, bits 2·(j mod 4) |
//! | turbo3 | 50 | 3.125 | scale f16, 32 bytes of low two bits as turbo2, 16 bytes of high bits |
//! | turbo4 | 66 | 4.125 | scale f16, 64 bytes: value j in byte j/2, low nibble for even j |
//!
//! High bits of turbo3: value j in byte j/8, bit j mod 8.
//!
//! Seek unit: one block. The KV cache stores the same indices and scales in another order
//! ([`crate::tile`]).
//!
//! Zero and non-finite numbers: a vector of norm below 1e-10 gets scale 0 and decodes to zeros. NaN
//! counts as 0, values are clamped to ±65,504 before and after rotation, the scale saturates at
//! 65,504 (so a longer vector decodes to one of about that norm). All-zero bytes decode to zeros.
//!
//! Decoding and encoding again gives the same bytes whenever the norm of the coded direction is
//! near 1 (0.88 to 1.12 suffices for all three), as it is for any vector that the rotation makes
//! near-Gaussian.

use half::f16;

use crate::finite::{F16_MAX, clamp, to_f16};
use crate::{Codebook, DType, KvCode, Levels, Rotation, step};

/// Values per block, the widest slice.
pub const LEN: usize = 128;

/// Slices below this norm count as zero: their scale would underflow in f16 anyway.
const TINY: f64 = 1e-10;

/// A coded slice: indices into an ascending codebook and their scale.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CodedSlice<const N: usize = LEN> {
    /// The value of one unit of [`Codebook::centroids`].
    pub scale: f16,
    /// `[N]`, each below `1 << bits`.
    pub indices: [u8; N],
}

/// Maps slices to indices and back: a [`Codebook`], or a [`crate::Trellis`], where previous indices
/// count too.
pub trait Book {
    /// Returns the bits per index.
    fn bits(&self) -> u32;

    /// Returns the indices of a slice of unit variance.
    fn indices<const N: usize>(&self, z: &[f32; N]) -> [u8; N];

    /// Returns the values of indices, in units of the scale of the slice: those of unit variance,
    /// divided by √128.
    fn values<const N: usize>(&self, indices: &[u8; N]) -> [f32; N];

    /// Returns the norm of [`Book::values`].
    fn norm<const N: usize>(&self, indices: &[u8; N]) -> f64 {
        self.values(indices).map(|v| f64::from(v).powi(2)).iter().sum::<f64>().sqrt()
    }
}

impl Book for Codebook {
    fn bits(&self) -> u32 {
        self.bits()
    }

    fn indices<const N: usize>(&self, z: &[f32; N]) -> [u8; N] {
        let factor = step::factor(step::best(self, z));
        z.map(|z| self.nearest(z * factor))
    }

    fn values<const N: usize>(&self, indices: &[u8; N]) -> [f32; N] {
        indices.map(|i| self.centroids()[usize::from(i)])
    }
}

/// Returns the scalar codebook of a turbo format, `None` for any other format.
pub const fn codebook(dtype: DType) -> Option<Codebook> {
    match dtype.code() {
        Some(KvCode { levels: Levels::Book(book), .. }) => Some(*book),
        _ => None,
    }
}

/// Encodes a slice that is already rotated.
///
/// The norm is summed in f64 so that it does not depend on the order of summation; a kernel that
/// sums in f32 may choose the neighbouring index for a coordinate within a few f32 steps of a
/// decision point.
pub fn encode_rotated<const N: usize>(book: &impl Book, y: &[f32; N]) -> CodedSlice<N> {
    let y = y.map(|v| clamp(v, F16_MAX));
    let norm = y.iter().map(|&v| f64::from(v) * f64::from(v)).sum::<f64>().sqrt();
    if norm < TINY {
        return CodedSlice { scale: f16::ZERO, indices: book.indices(&[0.0; N]) };
    }
    let to_unit_variance = ((N as f64).sqrt() / norm) as f32;
    let indices = book.indices(&y.map(|v| v * to_unit_variance));
    CodedSlice { scale: to_f16((norm / book.norm(&indices)) as f32), indices }
}

/// Decodes a slice, still rotated.
pub fn decode_rotated<const N: usize>(book: &impl Book, coded: &CodedSlice<N>) -> [f32; N] {
    let scale = coded.scale.to_f32();
    book.values(&coded.indices).map(|v| v * scale)
}

/// Rotates and encodes one slice.
pub fn encode_slice(book: &impl Book, rotation: &Rotation, x: &[f32; LEN]) -> CodedSlice {
    let mut y = x.map(|v| clamp(v, F16_MAX));
    rotation.forward(&mut y);
    encode_rotated(book, &y)
}

/// Decodes one slice and undoes the rotation.
pub fn decode_slice(book: &impl Book, rotation: &Rotation, coded: &CodedSlice) -> [f32; LEN] {
    let mut x = decode_rotated(book, coded);
    rotation.inverse(&mut x);
    x
}

/// Rotates by [`Rotation::kv`], encodes and packs one block.
pub(crate) fn pack_block(book: &impl Book, x: &[f32; LEN], block: &mut [u8]) {
    pack(book.bits(), &encode_slice(book, &Rotation::kv(LEN), x), block);
}

/// Inverse of [`pack_block`].
pub(crate) fn unpack_block(book: &impl Book, block: &[u8]) -> [f32; LEN] {
    decode_slice(book, &Rotation::kv(LEN), &unpack(book.bits(), block))
}

/// Writes an encoded slice in the block layout of `bits` = 2, 3 or 4 (see the module's table).
fn pack(bits: u32, coded: &CodedSlice, block: &mut [u8]) {
    let (scale, planes) = block.split_at_mut(2);
    scale.copy_from_slice(&coded.scale.to_le_bytes());
    planes.fill(0);
    for (j, &index) in coded.indices.iter().enumerate() {
        match bits {
            2 => planes[j / 4] |= index << (2 * (j % 4)),
            3 => {
                planes[j / 4] |= (index & 3) << (2 * (j % 4));
                planes[32 + j / 8] |= (index >> 2) << (j % 8);
            }
            4 => planes[j / 2] |= index << (4 * (j % 2)),
            _ => unreachable!("turbo codebooks have 2 to 4 bits, not {bits}"),
        }
    }
}

/// Inverse of [`pack`].
fn unpack(bits: u32, block: &[u8]) -> CodedSlice {
    let (scale, planes) = block.split_at(2);
    let index = |j: usize| match bits {
        2 => planes[j / 4] >> (2 * (j % 4)) & 3,
        3 => (planes[j / 4] >> (2 * (j % 4)) & 3) | (planes[32 + j / 8] >> (j % 8) & 1) << 2,
        4 => planes[j / 2] >> (4 * (j % 2)) & 15,
        _ => unreachable!("turbo codebooks have 2 to 4 bits, not {bits}"),
    };
    CodedSlice { scale: f16::from_le_bytes([scale[0], scale[1]]), indices: std::array::from_fn(index) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    const FORMATS: [DType; 3] = [DType::Turbo2, DType::Turbo3, DType::Turbo4];

    fn gaussian(seed: u64, sigma: f64) -> [f32; LEN] {
        let mut x = [0.0; LEN];
        Random::new(seed).fill_gaussian(&mut x, sigma);
        x
    }

    fn norm(x: &[f32]) -> f64 {
        x.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>().sqrt()
    }

    /// Spells out the layout of the module's table bit by bit, sharing no code with `pack`.
    #[test]
    fn bits_lie_where_the_table_states() {
        for dtype in FORMATS {
            let book = codebook(dtype).unwrap();
            let x = gaussian(1, 1.0);
            let coded = encode_slice(&book, &Rotation::kv(LEN), &x);
            let mut block = vec![0xff; dtype.block_bytes()];
            pack_block(&book, &x, &mut block);
            assert_eq!(block[..2], coded.scale.to_le_bytes());
            let bit = |byte: usize, at: usize| block[2 + byte] >> at & 1;
            for (j, &index) in coded.indices.iter().enumerate() {
                for k in 0..book.bits() as usize {
                    let have = match (dtype, k) {
                        (DType::Turbo4, _) => bit(j / 2, 4 * (j % 2) + k),
                        (DType::Turbo3, 2) => bit(32 + j / 8, j % 8),
                        _ => bit(j / 4, 2 * (j % 4) + k),
                    };
                    assert_eq!(have, index >> k & 1, "{dtype} value {j} bit {k}");
                }
            }
        }
    }

    #[test]
    fn unpacked_blocks_pack_to_the_same_bytes() {
        let mut random = Random::new(2);
        for dtype in FORMATS {
            let bits = codebook(dtype).unwrap().bits();
            let block: Vec<u8> = (0..dtype.block_bytes()).map(|_| random.bits() as u8).collect();
            let mut again = vec![0; block.len()];
            pack(bits, &unpack(bits, &block), &mut again);
            assert_eq!(again, block, "{dtype}");
        }
    }

    #[test]
    fn decoded_vector_has_the_norm_of_the_input() {
        for dtype in FORMATS {
            let book = codebook(dtype).unwrap();
            for (seed, sigma) in [(3, 1.0), (4, 1e-2), (5, 300.0)] {
                let x = gaussian(seed, sigma);
                let back =
                    decode_slice(&book, &Rotation::kv(LEN), &encode_slice(&book, &Rotation::kv(LEN), &x));
                // Half a step of the f16 scale, 2^-11, and a little f32 rounding.
                assert!((norm(&back) / norm(&x) - 1.0).abs() <= 4.9e-4, "{dtype} {sigma}");
            }
        }
    }

    #[test]
    fn levels_divided_by_a_norm_near_one_keep_their_index() {
        for dtype in FORMATS {
            let book = codebook(dtype).unwrap();
            for r in [0.88, 0.94, 1.0, 1.06, 1.12] {
                for (i, level) in book.levels().iter().enumerate() {
                    assert_eq!(usize::from(book.nearest(level / r)), i, "{dtype} {r}");
                }
            }
        }
    }

    #[test]
    fn zero_and_vanishing_vectors_get_scale_and_index_of_zero() {
        for (dtype, index) in FORMATS.into_iter().zip([2, 4, 8]) {
            let book = codebook(dtype).unwrap();
            for v in [0.0, -0.0, f32::from_bits(1), 1e-12, f32::NAN] {
                let coded = encode_rotated(&book, &[v; LEN]);
                assert_eq!(coded, CodedSlice { scale: f16::ZERO, indices: [index; LEN] }, "{dtype} {v}");
            }
        }
    }

    /// One coordinate carries the whole norm: the worst vector for a codebook.
    #[test]
    fn a_spike_stays_the_largest_coordinate_and_keeps_its_sign() {
        for dtype in FORMATS {
            let book = codebook(dtype).unwrap();
            let mut y = [0.0; LEN];
            y[17] = -2.0;
            let back = decode_rotated(&book, &encode_rotated(&book, &y));
            assert!(back.iter().enumerate().all(|(i, v)| i == 17 || v.abs() < back[17].abs()), "{dtype}");
            assert!(back[17] < 0.0 && (norm(&back) - 2.0).abs() <= 1e-3, "{dtype}: {}", norm(&back));
        }
    }
}
