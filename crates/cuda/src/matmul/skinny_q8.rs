//! Compiles and launches the kernel for few rows and quantized weights (`skinny_q8.cu`).

use kvant_codec::DType;
use kvant_codec::fields::FieldSpec;

use super::{EXPERT_TILES_HEADER, WEIGHTS_HEADER, layout, quantized_constants};
use crate::half::{COPIES_HEADER, HALF_HEADER};
use crate::{Define, Source, gate};

pub(super) static SOURCE: Source = Source {
    name: "skinny_q8.cu",
    text: include_str!("skinny_q8.cu"),
    headers: &[HALF_HEADER, gate::HEADER, EXPERT_TILES_HEADER, WEIGHTS_HEADER, COPIES_HEADER],
    constants: || quantized_constants().whole("WARPS", WARPS as usize),
    options: &[],
};

/// Rows that a block multiplies at once.
pub(super) const ROWS: [u32; 2] = [8, 16];
/// Output features of a block.
pub(super) const FEATURES: u32 = 32;
/// Warps of a block, where shared memory suffices for their prefetched slices.
const WARPS: u32 = 8;
/// Inputs of a slice.
const SLICE: usize = 256;

/// Returns the macros of the variant for `dtype`, whose kernel type number is `number`.
pub(super) fn defines(dtype: DType, number: u32, rows: u32) -> Vec<Define> {
    let [codes, tail] = layout::bytes_of(dtype, SLICE).map(|bytes| bytes as u32);
    vec![("TYPE", number), ("CODE_BYTES", codes), ("TAIL_BYTES", tail), ("ROWS", rows)]
}

/// Returns an upper bound on the bytes of `Warp` of `skinny_q8.cu`.
fn warp_bytes(dtype: DType) -> u32 {
    let [codes, tail] = layout::bytes_of(dtype, SLICE);
    let copy = if codes % 16 == 0 { 16 } else { 4 };
    let pitch = ((codes + tail.next_multiple_of(4)).div_ceil(copy) | 1) * copy;
    let stages = 2 * FEATURES as usize * pitch;
    // Two groups of each feature: codes of one or two bytes, scales and minimums of one or two
    // halves of a group.
    let decoded = 2 * FEATURES as usize * if FieldSpec::book_of(dtype).is_some() { 64 + 16 } else { 32 + 16 };
    (stages + decoded) as u32
}

/// Returns the warps and the dynamic shared memory of a block.
pub(super) fn block(dtype: DType, shared_per_block: u32) -> [u32; 2] {
    let warps = if WARPS * warp_bytes(dtype) <= shared_per_block { WARPS } else { WARPS / 2 };
    [warps, warps * warp_bytes(dtype)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_half_the_warps_fit_where_shared_memory_is_smallest() {
        for dtype in super::super::TYPES.into_iter().filter(|&dtype| super::super::is_quantized(dtype)) {
            let [warps, bytes] = block(dtype, 99 << 10);
            assert!(bytes <= 99 << 10, "{dtype}: {warps} warps, {bytes} bytes");
            assert_eq!(block(dtype, 227 << 10)[0], WARPS, "{dtype}");
        }
    }
}
