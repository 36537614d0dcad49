//! Float types in memory.

use crate::simd::vec16::Lanes;

/// A float type in memory: 16 values in `B` bytes.
pub(super) trait Floats<const B: usize> {
    fn load<L: Lanes>(lanes: L, x: &[u8; B]) -> L::Floats;
}

pub(super) struct F16;
pub(super) struct BF16;
pub(super) struct F32;

impl Floats<32> for F16 {
    #[inline(always)]
    fn load<L: Lanes>(lanes: L, x: &[u8; 32]) -> L::Floats {
        lanes.load_f16(x)
    }
}

impl Floats<32> for BF16 {
    #[inline(always)]
    fn load<L: Lanes>(lanes: L, x: &[u8; 32]) -> L::Floats {
        lanes.load_bf16(x)
    }
}

impl Floats<64> for F32 {
    #[inline(always)]
    fn load<L: Lanes>(lanes: L, x: &[u8; 64]) -> L::Floats {
        lanes.load_f32(x)
    }
}

/// Calls a generic function with the [`Floats`] of a dtype, and the number of bytes of 16 values.
macro_rules! with_floats {
    ($dtype:expr, $F:ident, $B:ident => $body:expr) => {
        match $dtype {
            DType::F16 => {
                type $F = $crate::ops::attend::floats::F16;
                const $B: usize = 32;
                $body
            }
            DType::BF16 => {
                type $F = $crate::ops::attend::floats::BF16;
                const $B: usize = 32;
                $body
            }
            DType::F32 => {
                type $F = $crate::ops::attend::floats::F32;
                const $B: usize = 64;
                $body
            }
            dtype => unreachable!("{dtype} is not a float type"),
        }
    };
}
pub(super) use with_floats;
