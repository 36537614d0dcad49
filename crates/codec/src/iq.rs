//! iq1, iq2, iq3 and iq3x: GGUF's low-bit i-quants with every code expanded. No file contains these
//! formats.
//!
//! Files store the index of a row of a *grid*, a table of several hundred rows of 8 or 4 levels,
//! and signs: 1.6 to 3.4 bits per value, but a memory look-up per row, which is too slow for
//! kernels. The number of levels is small, however; storing the code of level and sign for each
//! value loses nothing. The block layouts are those of q3_K and iq4_xs
//! ([`DType::layout`](crate::DType::layout)), and a [`LevelTable`] gives the level of a code.
//!
//! | format | bits per value | file types | value |
//! |---|---|---|---|
//! | iq1 | 3.4375 | iq1_s, iq1_m | d · sc · level / 8, level ±1, ±7, ±9; sub-blocks of 16 |
//! | iq2 | 3.4375 | iq2_xxs, _xs, _s | d · sc · level / 8, level ±8, ±25, ±43; sub-blocks of 16 |
//! | iq3 | 4.25 | iq3_s | d · sc · level, level ±1, ±3 ... ±15; sub-blocks of 32 |
//! | iq3x | 4.25 | iq3_xxs | d · sc · level / 4, level ±4, ±12 ... ±52, ±62; sub-blocks of 32 |
//!
//! Codes: the index of the level's magnitude, with a sign bit above it (in iq1, the sign of the
//! offset that is added to 8 times a level of -1, 0 or 1). Code 3 of iq1 and iq2 is 0. The
//! encoders, for tests, are those of `iq4.rs`; non-finite numbers are handled as there.

use half::f16;

use crate::iq4::{self, Block};
use crate::{DType, LevelTable, kquant};

/// Scales per block of q3_K's layout: a sub-block has 16 values.
const SUBS: usize = 16;
/// A block of iq1 or iq2.
pub(crate) type TableBlock16 = Block<SUBS, 16>;

/// Writes a block of iq1 to iq3x: scales from -32 to 31, one for each sub-block, and codes.
///
/// # Panics
/// When `dtype` is none of them, or `block` does not have its size in bytes.
pub fn put(dtype: DType, d: f16, scales: &[i8; SUBS], codes: &[u8; kquant::LEN], block: &mut [u8]) {
    match dtype.layout() {
        DType::Q3K => kquant::put_q3(d, scales, codes, sized(block)),
        DType::IQ4XS => {
            let scales = std::array::from_fn(|j| scales[j]);
            iq4::put_xs(&Block { d, scales, codes: *codes }, sized(block));
        }
        _ => unreachable!("{dtype} has no codes that are written out"),
    }
}

fn sized<const B: usize>(block: &mut [u8]) -> &mut [u8; B] {
    block.try_into().expect("a block has the bytes of its format")
}

/// Encodes a block of iq1 or iq2.
pub(crate) fn pack(table: LevelTable, x: &[f32; kquant::LEN], block: &mut [u8; 110]) {
    let coded = TableBlock16::fit(table, &kquant::in_range(x), None);
    kquant::put_q3(coded.d, &coded.scales, &coded.codes, block);
}

pub(crate) fn read(block: &[u8; 110]) -> TableBlock16 {
    let (d, scales, codes) = kquant::get_q3(block);
    Block { d, scales, codes }
}
