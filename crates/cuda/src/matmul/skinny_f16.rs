//! Compiles the GEMM for few rows and quantized weights (`skinny_f16.cu`).

use kvant_codec::DType;
use kvant_codec::fields::FieldSpec;

use super::gemm::{STREAM_K_HEADER, Tiles};
use super::operand::{STEP, TO_BYTES_HEADER};
use super::skinny_q8::{self, FRAGMENTS_HEADER, GROUP};
use super::{ARITHMETIC_HEADER, EXPERT_TILES_HEADER, WEIGHTS_HEADER, constants, is_quantized};
use crate::half::{COPIES_HEADER, HALF_HEADER};
use crate::{Define, Source};

pub(super) static SOURCE: Source = Source {
    name: "skinny_f16.cu",
    text: include_str!("skinny_f16.cu"),
    headers: &[
        HALF_HEADER,
        EXPERT_TILES_HEADER,
        TO_BYTES_HEADER,
        WEIGHTS_HEADER,
        ARITHMETIC_HEADER,
        COPIES_HEADER,
        FRAGMENTS_HEADER,
        STREAM_K_HEADER,
    ],
    constants: || constants().whole("HALVES", STEP),
    options: &[],
};

/// Maximum shared memory of a block's ring where it has more than two stages: what an A100 has, and
/// for tiles of 128 features what any card has.
const RING_BYTES: [u32; 2] = [162 << 10, 98 << 10];

/// Returns whether it multiplies weights of this type: a lane has parts of groups, so that it
/// cannot rotate them.
pub(super) fn has(dtype: DType) -> bool {
    is_quantized(dtype) && !FieldSpec::is_rotated(dtype)
}

/// Returns the inputs of a step.
pub(super) fn step(dtype: DType) -> usize {
    GROUP * skinny_q8::stage_groups(dtype)
}

/// Returns `sizeof(Stage)` of `skinny_f16.cu`.
fn stage_bytes(dtype: DType, tiles: Tiles) -> u32 {
    let inputs = tiles.rows as usize * (step(dtype) + 16) * size_of::<u16>();
    (tiles.features as usize * skinny_q8::pitch(dtype) + inputs) as u32
}

fn stages(dtype: DType, tiles: Tiles) -> u32 {
    let [large, small] = RING_BYTES;
    let bytes = if tiles.features == 256 { large } else { small };
    (bytes / stage_bytes(dtype, tiles)).clamp(2, 6)
}

/// Returns the dynamic shared memory of a block.
pub(super) fn shared_bytes(dtype: DType, tiles: Tiles) -> u32 {
    stages(dtype, tiles) * stage_bytes(dtype, tiles)
}

/// Returns the macros of the variant for `dtype`, besides the type.
pub(super) fn defines(dtype: DType, tiles: Tiles) -> Vec<Define> {
    let [code_bytes, moved, block_groups] = skinny_q8::layout_defines(dtype);
    let Tiles { features, rows, .. } = tiles;
    let sizes = [("FEATURES", features), ("ROWS", rows), ("STAGES", stages(dtype, tiles))];
    [code_bytes, moved, block_groups].into_iter().chain(sizes).collect()
}
