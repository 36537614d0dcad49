//! Compiles and launches the kernel for few rows and quantized weights (`skinny_q8.cu`).

use kvant_codec::DType;

use super::operand::{INPUT_TILE_BYTES, INPUT_TILE_HEADER, TO_BYTES_HEADER};
use super::{ARITHMETIC_HEADER, EXPERT_TILES_HEADER, WEIGHTS_HEADER, layout, quantized_constants};
use crate::context::MAX_COUNTERS;
use crate::half::{COPIES_HEADER, HALF_HEADER};
use crate::{Define, GpuProperties, Header, Source, gate};

pub(super) const FRAGMENTS_HEADER: Header =
    Header { name: "fragments.cuh", text: include_str!("fragments.cuh") };

pub(super) static SOURCE: Source = Source {
    name: "skinny_q8.cu",
    text: include_str!("skinny_q8.cu"),
    headers: &[
        HALF_HEADER,
        gate::HEADER,
        EXPERT_TILES_HEADER,
        TO_BYTES_HEADER,
        WEIGHTS_HEADER,
        ARITHMETIC_HEADER,
        FRAGMENTS_HEADER,
        INPUT_TILE_HEADER,
        COPIES_HEADER,
    ],
    constants: quantized_constants,
    options: &[],
};

/// Rows that a block multiplies at once.
pub(super) const ROWS: [u32; 2] = [8, 16];
/// Output features of a tile.
pub(super) const FEATURES: u32 = 16;
/// Warps of a block: each has four classes of groups.
pub(super) const WARPS: u32 = 8;
/// Maximum number of blocks that share a tile: each has the classes of a warp.
const MAX_SPLITS: u32 = WARPS;
/// Maximum bytes of the rings of a block, in flight or being read, where a ring has more than two
/// stages. With two blocks on each multiprocessor an H100 needs 16 KB in flight in each.
const RINGS_BYTES: usize = 56 << 10;
/// Maximum bytes of the sums of the splits of all experts, most of which may have no slot.
const MAX_SHARE_BYTES: usize = 64 << 20;
/// What the driver reserves of each block.
const RESERVED: u32 = 1 << 10;
/// Upper bound of a block's static shared memory.
const STATIC: u32 = 16;
/// Inputs of a group.
pub(super) const GROUP: usize = 32;

/// Returns whether groups of 32 are stored in blocks of eight, and share bytes there.
fn is_in_eights(dtype: DType) -> bool {
    matches!(dtype.layout(), DType::Q2K | DType::Q3K | DType::Q4K | DType::Q5K | DType::Q6K)
}

/// Returns the groups of a stage: those of four classes in a window.
pub(super) fn stage_groups(dtype: DType) -> usize {
    if is_in_eights(dtype) { 8 } else { 4 }
}

/// Returns the macros of the variant for `dtype`, whose kernel type number is `number`.
pub(super) fn defines(dtype: DType, number: u32, rows: u32) -> Vec<Define> {
    let sizes = [("TYPE", number), ("STAGES", stages(dtype)), ("ROWS", rows)];
    sizes.into_iter().chain(layout_defines(dtype)).collect()
}

/// Returns the macros of a stage of a row, as `fragments.cuh` reads it.
pub(super) fn layout_defines(dtype: DType) -> [Define; 3] {
    let [codes, _] = layout::bytes_of(dtype, stage_groups(dtype) * GROUP);
    let moved = dtype.block_bytes() - layout::block_bytes(dtype);
    [
        ("CODE_BYTES", codes as u32),
        ("MOVED", moved as u32),
        ("BLOCK_GROUPS", (dtype.block_len() / GROUP) as u32),
    ]
}

/// Returns `PITCH` of `fragments.cuh`.
pub(super) fn pitch(dtype: DType) -> usize {
    let groups = stage_groups(dtype);
    let [codes, _] = layout::bytes_of(dtype, groups * GROUP);
    let moved = dtype.block_bytes() - layout::block_bytes(dtype);
    let tail = moved * groups.div_ceil(dtype.block_len() / GROUP);
    ((codes + tail.next_multiple_of(4)).div_ceil(16) | 1) * 16
}

/// Returns `STAGE_BYTES` of `skinny_q8.cu`.
fn stage_bytes(dtype: DType) -> usize {
    FEATURES as usize * pitch(dtype)
}

/// Returns the stages of a warp's ring: one is read, the others are in flight.
fn stages(dtype: DType) -> u32 {
    (RINGS_BYTES / (WARPS as usize * stage_bytes(dtype))).clamp(2, 8) as u32
}

/// The blocks of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Plan {
    /// Rows of a block.
    pub rows: u32,
    /// Blocks that share a tile, each with a part of the inputs.
    pub splits: u32,
    pub shared_bytes: u32,
    /// Blocks of a multiprocessor.
    of_sm: u32,
}

impl Plan {
    /// Returns the plan for `rows` rows of `n_in` inputs: with two blocks per multiprocessor where
    /// shared memory suffices, and as few splits as it allows. Where 16 rows are too many for it,
    /// blocks take 8. `None` where these are too many too.
    pub fn new(dtype: DType, rows: usize, n_in: usize, gpu: &GpuProperties) -> Option<Self> {
        let wanted = ROWS[usize::from(rows > ROWS[0] as usize)];
        let plans = [(wanted, 2), (wanted, 1), (ROWS[0], 2), (ROWS[0], 1)];
        plans.into_iter().find_map(|(rows, of_sm)| Self::with_rows(dtype, rows, n_in, of_sm, gpu))
    }

    fn with_rows(dtype: DType, rows: u32, n_in: usize, of_sm: u32, gpu: &GpuProperties) -> Option<Self> {
        let splits = (0..=MAX_SPLITS.ilog2()).map(|log| 1 << log);
        let plan =
            |splits| Self { rows, splits, shared_bytes: shared_bytes(dtype, rows, n_in, splits), of_sm };
        let fits =
            |plan: &Self| of_sm * (plan.shared_bytes + STATIC + RESERVED) <= gpu.shared_per_block + RESERVED;
        splits.map(plan).find(fits)
    }

    /// Returns the blocks of a launch, in teams of `splits`: all that run at once, or one team per
    /// round.
    pub fn blocks(&self, n_sms: u32, tiles: u32, row_blocks: u32) -> u32 {
        let max_teams = (self.of_sm * n_sms / self.splits).min(MAX_COUNTERS as u32) / row_blocks;
        self.splits * tiles.div_ceil(self.splits).min(max_teams).max(1)
    }

    /// Returns whether a block takes `rows` rows of each of `n_tiles` experts with `n_out`
    /// features, and the splits have counters and little memory.
    pub fn has_room(&self, [n_out, n_tiles]: [usize; 2], rows: usize) -> bool {
        let tiles = n_out.div_ceil(FEATURES as usize) as u32;
        let has_shares =
            n_tiles <= MAX_COUNTERS && self.share_bytes(tiles, n_tiles as u32) <= MAX_SHARE_BYTES;
        rows <= self.rows as usize && (self.splits == 1 || has_shares)
    }

    /// Returns the bytes of the sums of all splits.
    pub fn share_bytes(&self, tiles: u32, row_blocks: u32) -> usize {
        let of_tile = 2 * self.splits * self.rows * FEATURES * size_of::<f32>() as u32;
        row_blocks as usize * tiles as usize * of_tile as usize
    }
}

/// Returns the dynamic shared memory of a block: two of `Sums` of `skinny_q8.cu`, the rings, and
/// the inputs of a split.
fn shared_bytes(dtype: DType, rows: u32, n_in: usize, splits: u32) -> u32 {
    let sums = 2 * WARPS * rows * (FEATURES + 4) * size_of::<f32>() as u32;
    let rings = WARPS as usize * stages(dtype) as usize * stage_bytes(dtype);
    let window = WARPS as usize * stage_groups(dtype);
    let tiles = (n_in / GROUP).div_ceil(window) * window / splits as usize;
    let inputs = (rows / ROWS[0]) as usize * tiles * INPUT_TILE_BYTES;
    sums + (rings + inputs) as u32
}

#[cfg(test)]
mod tests {
    use super::super::{TYPES, is_quantized};
    use super::*;
    use crate::emulator;

    #[test]
    fn every_type_has_a_plan_for_long_rows() {
        for (arch, n_in) in [(80, 53_248), (89, 18_432), (90, 53_248)] {
            let gpu = emulator::properties(arch);
            for dtype in TYPES.into_iter().filter(|&dtype| is_quantized(dtype)) {
                for rows in [1, 8, 9, 16] {
                    let plan = Plan::new(dtype, rows, n_in, &gpu).unwrap();
                    assert!(plan.shared_bytes <= gpu.shared_per_block, "{dtype} {plan:?}");
                }
            }
        }
    }

    #[test]
    fn two_blocks_share_a_multiprocessor_where_they_can() {
        let gpu = emulator::properties(90);
        let splits = |rows, n_in| {
            let plan = Plan::new(DType::Q4_0, rows, n_in, &gpu).unwrap();
            (plan.rows, plan.splits, plan.of_sm)
        };
        assert_eq!(splits(8, 4096), (8, 1, 2));
        assert_eq!(splits(8, 14_336), (8, 4, 2));
        assert_eq!(splits(16, 4096), (16, 2, 2));
        assert_eq!(splits(16, 14_336), (16, 8, 2));
        assert_eq!(Plan::new(DType::Q4_0, 8, 1 << 18, &gpu), None);
    }

    #[test]
    fn teams_are_as_many_as_run_at_once() {
        let plan = Plan { rows: 8, splits: 4, shared_bytes: 0, of_sm: 2 };
        assert_eq!(plan.blocks(132, 896, 1), 264);
        assert_eq!(plan.blocks(132, 10, 1), 12);
        assert_eq!(plan.blocks(4, 896, 2), 4);
    }
}
