//! Compiles and launches the GEMV kernel (`gemv.cu`).

use kvant_codec::DType;

use super::operand::TO_BYTES_HEADER;
use super::{ARITHMETIC_HEADER, EXPERT_TILES_HEADER, WEIGHTS_HEADER, layout, quantized_constants};
use crate::half::{COPIES_HEADER, HALF_HEADER};
use crate::{Define, Source, gate};

pub(super) static SOURCE: Source = Source {
    name: "gemv.cu",
    text: include_str!("gemv.cu"),
    headers: &[
        HALF_HEADER,
        gate::HEADER,
        EXPERT_TILES_HEADER,
        TO_BYTES_HEADER,
        WEIGHTS_HEADER,
        ARITHMETIC_HEADER,
        COPIES_HEADER,
    ],
    constants: || quantized_constants().whole("MAX_WARPS", MAX_WARPS as usize),
    options: &[],
};

/// Maximum number of warps of a block, where shared memory suffices for their rings.
const MAX_WARPS: u32 = 32;
/// Weights of a step of a warp.
const STEP: usize = 2048;
/// Maximum bytes of the rings of a block, in flight or being read, where a ring has more than two
/// steps. An H100 needs 32 KB in flight per multiprocessor at all times.
const RINGS_BYTES: usize = 136 << 10;
/// Static shared memory, and what the driver reserves of each block.
const RESERVED: u32 = 2 << 10;

/// Returns the macros of the variant for `dtype`, whose kernel type number is `number`.
pub(super) fn defines(dtype: DType, number: u32) -> Vec<Define> {
    let [codes, tail] = layout::bytes_of(dtype, STEP).map(|bytes| bytes as u32);
    vec![("TYPE", number), ("CODE_BYTES", codes), ("TAIL_BYTES", tail), ("STAGES", stages(dtype))]
}

fn stage_bytes(dtype: DType) -> usize {
    layout::bytes_of(dtype, STEP).iter().sum::<usize>().next_multiple_of(16)
}

/// Returns the steps of a warp's ring: one is read, the others are in flight.
fn stages(dtype: DType) -> u32 {
    (RINGS_BYTES / (MAX_WARPS as usize * stage_bytes(dtype))).clamp(2, 8) as u32
}

/// Returns the warps and the dynamic shared memory of a block, where a row of `n_in` inputs fits
/// beside the ring of one warp.
pub(super) fn block(dtype: DType, n_in: usize, shared_per_block: u32) -> Option<[u32; 2]> {
    const GROUP: usize = 32;
    // Codes, a scale, the sum of the codes and that of the squares.
    let row = (n_in.next_multiple_of(STEP) / GROUP * (GROUP + 3 * size_of::<f32>())) as u32;
    let ring = stages(dtype) * stage_bytes(dtype) as u32;
    let warps = (shared_per_block.saturating_sub(RESERVED + row) / ring).min(MAX_WARPS);
    (warps > 0).then_some([warps, row + warps * ring])
}

/// Returns the blocks that share the features of a row, for `rows` rows (of experts) and one block
/// per multiprocessor: the number with which the last block finishes first.
pub(super) fn blocks(n_sms: u32, rows: u32, features: u32) -> u32 {
    const MIN_BLOCKS: u32 = 8;
    let max_blocks = (n_sms / rows).max(MIN_BLOCKS).min(features);
    // The time of a multiprocessor is its rounds of blocks, each 1 / n of a row: least with the
    // most blocks of some number of rounds.
    let most = |rounds: u32| (rounds * n_sms / rows).min(max_blocks);
    let time = |&rounds: &u32| f64::from(rounds) / f64::from(most(rounds));
    let rounds = (1..=(rows * max_blocks).div_ceil(n_sms)).filter(|&rounds| most(rounds) > 0);
    rounds.min_by(|a, b| time(a).total_cmp(&time(b))).map_or(1, most)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_rows_leave_room_for_fewer_warps_and_at_last_for_none() {
        let warps = |dtype, n_in, kib: u32| block(dtype, n_in, kib << 10).map(|[warps, _]| warps);
        assert_eq!(warps(DType::Q4_0, 53_248, 227), Some(32));
        assert_eq!(warps(DType::Q8_0, 14_336, 227), Some(32));
        assert_eq!(warps(DType::Q8_0, 4096, 99), Some(21));
        assert_eq!(warps(DType::Q8_0, 1 << 18, 227), None);
    }

    #[test]
    fn blocks_spread_evenly_over_multiprocessors() {
        for (n_sms, rows, features, want) in
            [(132, 1, 4096, 132), (132, 1, 100, 100), (132, 8, 768, 16), (4, 3, 700, 4), (132, 132, 768, 1)]
        {
            assert_eq!(blocks(n_sms, rows, features), want, "{rows} rows, {features} features");
        }
        for rows in 1..300 {
            let n = blocks(132, rows, 4096);
            let rounds = f64::from((rows * n).div_ceil(132) * 132) / f64::from(n * rows);
            assert!(rounds < 1.25, "{rows} rows: {n} blocks each");
        }
    }
}
