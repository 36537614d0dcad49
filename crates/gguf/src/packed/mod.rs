//! Types that files hold and nothing multiplies: they are unpacked to q8_0 when their data is asked for, or plain numbers to f32
//! (`number.rs`).
//!
//! All that become q8_0 have blocks of 256 values, each a whole number times what the block has in common, an f16 times a constant: with `s` a scale
//! of some bits for 16 or 32 values, `g` a level of a *grid* (a table of rows of 8 or 4 levels that a code is the number of), and
//! signs.
//!
//! | type | bytes | bits | value |
//! |---|---|---|---|
//! | iq1_s | 50 | 1.5625 | d/8 · (2s + 1) · (8g ± 1), s and the sign for 32 values |
//! | iq1_m | 56 | 1.75 | the same, s for 16 values, the sign for 8 |
//! | iq2_xxs | 66 | 2.0625 | ± d/8 · (2s + 1) · g, s for 32 values |
//! | iq2_xs | 74 | 2.3125 | the same, s for 16 values |
//! | iq2_s | 82 | 2.5625 | the same with a grid of 1024 rows |
//! | iq3_xxs | 98 | 3.0625 | ± d/4 · (2s + 1) · g, s for 32 values |
//! | iq3_s | 110 | 3.4375 | ± d · (2s + 1) · g, s for 32 values |
//! | tq1_0 | 54 | 1.6875 | d · (-1, 0 or 1), five to a byte |
//! | tq2_0 | 66 | 2.0625 | the same, four to a byte |
//!
//! A block of q8_0 (32 values, whole numbers up to 127 times an f16) holds these numbers as they are where they have a common factor
//! that leaves no more than that: only the scale is rounded then, by 2^-12 at most. So it is but for iq2_xs, iq2_s and iq1_m where two
//! scales in 32 values differ much: those are rounded to the 127th part of the largest value, as q8_0 rounds everything.
//!
//! The grids are constants of the format; `tools/reference/packed_types.py` writes them and the values that tests hold this to.

use half::f16;
use kvant_codec::DType;

mod number;
mod unpack;

use unpack::Numbers;

/// What files hold and nothing multiplies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Packed {
    /// 1.5625 bits.
    Iq1S,
    /// 1.75 bits.
    Iq1M,
    /// 2.0625 bits.
    Iq2Xxs,
    /// 2.3125 bits.
    Iq2Xs,
    /// 2.5625 bits.
    Iq2S,
    /// 3.0625 bits.
    Iq3Xxs,
    /// 3.4375 bits.
    Iq3S,
    /// 1.6875 bits: three levels.
    Tq1_0,
    /// 2.0625 bits: three levels.
    Tq2_0,
    /// nvfp4, which kernels have, with a scale of the whole tensor, which they have not: see `scaled.rs`.
    ScaledNvfp4,
    /// Whole numbers of 8 bits.
    I8,
    /// Of 16 bits.
    I16,
    /// Of 32 bits.
    I32,
    /// Of 64 bits.
    I64,
    /// IEEE binary64.
    F64,
}

/// Values of a block of any of them.
const BLOCK: usize = 256;
/// What they become.
const UNPACKED: DType = DType::Q8_0;
/// Values and bytes of a block of that.
const OUT: (usize, usize) = (UNPACKED.block_len(), UNPACKED.block_bytes());

impl Packed {
    /// Plain numbers, which become f32.
    pub const NUMBERS: [Self; 5] = [Self::I8, Self::I16, Self::I32, Self::I64, Self::F64];

    /// All others, which become [`Packed::UNPACKED`].
    pub const ALL: [Self; 10] = [
        Self::Iq1S,
        Self::Iq1M,
        Self::Iq2Xxs,
        Self::Iq2Xs,
        Self::Iq2S,
        Self::Iq3Xxs,
        Self::Iq3S,
        Self::Tq1_0,
        Self::Tq2_0,
        Self::ScaledNvfp4,
    ];

    /// What those of [`Packed::ALL`] are unpacked to.
    pub const UNPACKED: DType = UNPACKED;

    /// What it is unpacked to.
    pub fn unpacked(self) -> DType {
        if Self::NUMBERS.contains(&self) { DType::F32 } else { UNPACKED }
    }

    /// The name, the tensor type id in GGUF files, and the bytes of a block.
    const fn sheet(self) -> (&'static str, Option<u32>, usize) {
        match self {
            Self::Iq1S => ("iq1_s", Some(19), 50),
            Self::Iq1M => ("iq1_m", Some(29), 56),
            Self::Iq2Xxs => ("iq2_xxs", Some(16), 66),
            Self::Iq2Xs => ("iq2_xs", Some(17), 74),
            Self::Iq2S => ("iq2_s", Some(22), 82),
            Self::Iq3Xxs => ("iq3_xxs", Some(18), 98),
            Self::Iq3S => ("iq3_s", Some(21), 110),
            Self::Tq1_0 => ("tq1_0", Some(34), 54),
            Self::Tq2_0 => ("tq2_0", Some(35), 66),
            Self::ScaledNvfp4 => ("nvfp4 with a scale", None, DType::NVFP4.block_bytes()),
            Self::I8 => ("i8", Some(24), 1),
            Self::I16 => ("i16", Some(25), 2),
            Self::I32 => ("i32", Some(26), 4),
            Self::I64 => ("i64", Some(27), 8),
            Self::F64 => ("f64", Some(28), 8),
        }
    }

    /// The name that other programs print.
    pub const fn name(self) -> &'static str {
        self.sheet().0
    }

    /// The tensor type id in GGUF files, where it has one of its own.
    pub const fn ggml_id(self) -> Option<u32> {
        self.sheet().1
    }

    /// Values of a block.
    pub const fn block_len(self) -> usize {
        match self {
            Self::ScaledNvfp4 => DType::NVFP4.block_len(),
            Self::I8 | Self::I16 | Self::I32 | Self::I64 | Self::F64 => 1,
            _ => BLOCK,
        }
    }

    /// Bytes of a block.
    pub const fn block_bytes(self) -> usize {
        self.sheet().2
    }

    /// The type behind a GGUF tensor type id, if it is one of these.
    pub fn from_ggml_id(id: u32) -> Option<Self> {
        Self::stored().find(|packed| packed.ggml_id() == Some(id))
    }

    /// Those that have a tensor type id of their own.
    pub(crate) fn stored() -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().chain(Self::NUMBERS).filter(|packed| packed.ggml_id().is_some())
    }

    /// Whole blocks as [`Packed::unpacked`], on every core.
    pub(crate) fn unpack(self, bytes: &[u8]) -> Vec<u8> {
        if Self::NUMBERS.contains(&self) {
            return number::as_f32(self, bytes);
        }
        let n_blocks = bytes.len() / self.block_bytes();
        let mut out = vec![0; n_blocks * BLOCK / OUT.0 * OUT.1];
        let n_threads = std::thread::available_parallelism().map_or(1, usize::from);
        let each = n_blocks.div_ceil(n_threads).max(1);
        let work = |bytes: &[u8], out: &mut [u8]| {
            let blocks =
                bytes.chunks_exact(self.block_bytes()).zip(out.chunks_exact_mut(BLOCK / OUT.0 * OUT.1));
            blocks.for_each(|(block, out)| recode(&self.numbers(block), out));
        };
        // Not every system has threads.
        if each >= n_blocks {
            work(bytes, &mut out);
            return out;
        }
        std::thread::scope(|scope| {
            let shares =
                bytes.chunks(each * self.block_bytes()).zip(out.chunks_mut(each * BLOCK / OUT.0 * OUT.1));
            shares.for_each(|(bytes, out)| _ = scope.spawn(move || work(bytes, out)));
        });
        out
    }
}

/// The numbers of a block as q8_0.
fn recode(numbers: &Numbers, out: &mut [u8]) {
    for (values, out) in numbers.values.chunks_exact(OUT.0).zip(out.chunks_exact_mut(OUT.1)) {
        let factor = values.iter().fold(0, |factor, value| common(factor, value.unsigned_abs())).max(1);
        let most = values.iter().map(|value| value.unsigned_abs()).max().unwrap_or(0);
        // A step of the codes in units of the block, and the codes.
        let step = if most / factor <= 127 { f32::from(factor) } else { f32::from(most) / 127.0 };
        let scale = f16::from_f32(numbers.unit * step);
        out[..2].copy_from_slice(&scale.to_le_bytes());
        for (code, value) in out[2..].iter_mut().zip(values) {
            *code = (f32::from(*value) / step).round() as i8 as u8;
        }
    }
}

/// The largest number that divides both.
fn common(a: u16, b: u16) -> u16 {
    if b == 0 { a } else { common(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each type with a block and its values, as PyPI `gguf` gives them.
    fn vectors() -> Vec<(Packed, &'static [u8], Vec<f32>)> {
        let (mut rest, mut all) = (&include_bytes!("vectors.bin")[..], Vec::new());
        while let Some((id, data)) = rest.split_first_chunk() {
            let packed = Packed::from_ggml_id(u32::from_le_bytes(*id)).unwrap();
            rest = data;
            for _ in 0..2 {
                let (block, data) = rest.split_at(packed.block_bytes());
                let (values, data) = data.split_at(4 * BLOCK);
                let values = values.as_chunks().0.iter().map(|value| f32::from_le_bytes(*value)).collect();
                all.push((packed, block, values));
                rest = data;
            }
        }
        assert_eq!(all.len(), 2 * 9);
        all
    }

    #[test]
    fn numbers_times_their_unit_are_the_values_that_gguf_py_gives() {
        for (packed, block, want) in vectors() {
            let numbers = packed.numbers(block);
            for (i, (number, want)) in numbers.values.iter().zip(want).enumerate() {
                let got = numbers.unit * f32::from(*number);
                assert!(
                    (got - want).abs() <= 1e-6 * want.abs(),
                    "{}: value {i}: got {got}, want {want}",
                    packed.name()
                );
            }
        }
    }

    #[test]
    fn unpacked_values_lose_the_rounding_of_a_scale_or_where_scales_differ_that_of_q8_0() {
        for (packed, block, want) in vectors() {
            let bytes = packed.unpack(block);
            let mut values = vec![0.0; BLOCK];
            kvant_codec::decode(UNPACKED, &bytes, &mut values).unwrap();
            let is_exact = !matches!(packed, Packed::Iq2Xs | Packed::Iq2S | Packed::Iq1M);
            for (got, want) in values.chunks(32).zip(want.chunks(32)) {
                let most = want.iter().fold(0.0_f32, |most, value| most.max(value.abs()));
                for (got, want) in got.iter().zip(want) {
                    // Half a step of 127, and half a unit in the last of the eleven digits of a scale.
                    let bound = want.abs() / 2048.0 + if is_exact { 0.0 } else { most / 254.0 };
                    assert!((got - want).abs() <= bound * 1.001, "{}: {got}, {want}", packed.name());
                }
            }
        }
    }

    #[test]
    fn ids_and_names_lead_back_and_are_no_others() {
        for packed in Packed::ALL.into_iter().chain(Packed::NUMBERS) {
            if let Some(id) = packed.ggml_id() {
                assert_eq!((Packed::from_ggml_id(id), DType::from_ggml_id(id)), (Some(packed), None));
            }
            assert!(packed.name().parse::<DType>().is_err());
        }
    }
}
