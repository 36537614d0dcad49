//! How the kernel for few rows and weights in codes (`coded.cu`) is compiled for a type, and launched.

use kvant_codec::DType;

use super::{SPANS, WEIGHTS_HEADER, coded_constants, is_rotated, layout};
use crate::half::{COPIES_HEADER, HALF_HEADER};
use crate::{Define, Source, gate};

pub(super) static CODED: Source = Source {
    name: "coded.cu",
    text: include_str!("coded.cu"),
    headers: &[HALF_HEADER, gate::HEADER, SPANS, WEIGHTS_HEADER, COPIES_HEADER],
    constants: || coded_constants().whole("WARPS", WARPS as usize),
    options: &[],
};

/// Rows that blocks multiply at once.
pub(super) const ROWS: [u32; 2] = [8, 16];
/// Output features of a block.
pub(super) const FEATURES: u32 = 32;
/// Warps of a block, where shared memory has room for what they ask for ahead.
const WARPS: u32 = 8;
/// Inputs of a slice.
const SLICE: usize = 256;

/// The macros of the variant for `dtype`, which has this number in kernels.
pub(super) fn defines(dtype: DType, number: u32, rows: u32) -> Vec<Define> {
    let [codes, tail] = layout::bytes_of(dtype, SLICE).map(|bytes| bytes as u32);
    vec![("TYPE", number), ("CODE_BYTES", codes), ("TAIL_BYTES", tail), ("ROWS", rows)]
}

/// Bytes of `Warp` of `coded.cu`, at most.
fn warp_bytes(dtype: DType) -> u32 {
    let [codes, tail] = layout::bytes_of(dtype, SLICE);
    let copy = if codes % 16 == 0 { 16 } else { 4 };
    let pitch = ((codes + tail.next_multiple_of(4)).div_ceil(copy) | 1) * copy;
    let stages = 2 * FEATURES as usize * pitch;
    // Of two groups of each feature: codes of one or two bytes, scales and minimums of one or two halves.
    let decoded = 2 * FEATURES as usize * if is_rotated(dtype) { 64 + 16 } else { 32 + 16 };
    (stages + decoded) as u32
}

/// Warps and dynamic shared memory of a block.
pub(super) fn block(dtype: DType, shared_per_block: u32) -> [u32; 2] {
    let warps = if WARPS * warp_bytes(dtype) <= shared_per_block { WARPS } else { WARPS / 2 };
    [warps, warps * warp_bytes(dtype)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_half_the_warps_fit_where_shared_memory_is_smallest() {
        for dtype in super::super::TYPES.into_iter().filter(|&dtype| super::super::is_coded(dtype)) {
            let [warps, bytes] = block(dtype, 99 << 10);
            assert!(bytes <= 99 << 10, "{dtype}: {warps} warps, {bytes} bytes");
            assert_eq!(block(dtype, 227 << 10)[0], WARPS, "{dtype}");
        }
    }
}
