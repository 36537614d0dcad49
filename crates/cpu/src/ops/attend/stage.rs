//! Attention with stages of its reading left out, to measure where its time goes.
//!
//! An omitted stage reads the same few bytes over and over, which stay in the L1 cache; every
//! product, softmax and sum is still computed. The results of all stages but [`Stage::All`] are
//! meaningless.

use super::codes::{Coding, Expanded};

/// How much of the coded tiles is read. Each stage does what the one before does, and more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Stage {
    /// Products with constant codes and constant scales.
    Nothing,
    /// Scales are read.
    Scales,
    /// All bytes are loaded, but not unpacked.
    Bytes,
    /// The low planes are unpacked and looked up; differs from `All` for turbo3 and turbo3t only,
    /// which have high planes.
    LowBits,
    /// Everything is read.
    All,
}

impl Stage {
    /// Every stage, in ascending order.
    pub const ALL: [Self; 5] = [Self::Nothing, Self::Scales, Self::Bytes, Self::LowBits, Self::All];

    /// Their names in a table, in the same order.
    pub const NAMES: [&'static str; 5] = ["no dequant", "scales only", "all bytes", "low bits", "all"];

    /// Returns whether tiles are prefetched.
    pub(super) fn fetches(self) -> bool {
        self >= Self::Bytes
    }

    /// Returns the scales to read instead of those at the head of `block` and every `stride` bytes
    /// from there, and their stride.
    pub(super) fn scales(self, block: &[u8], stride: usize) -> (&[u8], usize) {
        match self {
            Self::Nothing => (&ONES, 0),
            _ => (block, stride),
        }
    }

    /// Returns the planes to read instead of `planes`, and their coding: octets of constant codes
    /// where the stage leaves codes out.
    pub(super) fn planes(self, coding: Coding, planes: &[u8]) -> (Coding, &[u8]) {
        match self {
            Self::Nothing | Self::Scales => (Coding::Whole, bytemuck::cast_slice(&BLANK)),
            Self::Bytes => {
                touch(planes);
                (Coding::Whole, bytemuck::cast_slice(&BLANK))
            }
            // Their low planes have the layout of turbo2.
            Self::LowBits if matches!(coding, Coding::Turbo3 | Coding::Turbo3T) => (Coding::Turbo2, planes),
            Self::LowBits | Self::All => (coding, planes),
        }
    }

    /// Returns whether [`Stage::planes`] returns constant codes.
    pub(super) fn is_blank(self) -> bool {
        self <= Self::Bytes
    }
}

/// Octets of the largest block, in whole bytes.
static BLANK: [Expanded; 4] = [Expanded([[130; 64]; 8]); 4];

/// Sixteen times 1 in f16.
static ONES: [u8; 32] = {
    let mut ones = [0; 32];
    let mut i = 1;
    while i < 32 {
        ones[i] = 0x3c;
        i += 2;
    }
    ones
};

/// Loads every byte.
fn touch(bytes: &[u8]) {
    let (words, rest) = bytes.as_chunks::<8>();
    let fold = words.iter().fold(0, |fold, word| fold ^ u64::from_ne_bytes(*word));
    std::hint::black_box((fold, rest.len()));
}
