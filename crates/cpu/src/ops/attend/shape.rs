//! The sizes of the method, and the operands that kernels share.

use bytemuck::{Pod, Zeroable};
use kvant_codec::tile::TILE;

use crate::simd::vec16::Lanes;

/// Tokens per softmax block.
pub(super) const BLOCK: usize = 128;

/// Tiles of a block.
pub(super) const BLOCK_TILES: usize = BLOCK / TILE;

/// Maximum queries of a chunk.
pub(super) const MAX_QUERIES: usize = 6;

/// Maximum number of queries whose scores are processed together: their intermediate results stay
/// in the L2 cache, and a matrix unit, which powers down between uses and takes 0.24 µs to wake,
/// gets more work at once.
pub(super) const QUERY_GROUP: usize = 96;

/// Dims of one row of [`Bytes`]; no block spans two rows.
pub(super) const SLICE: usize = 128;

/// Score of a masked token. Finite, so that a block without a visible token gives finite sums,
/// which the first visible one (whose score is far larger) multiplies by 2^(MASKED_SCORE - score) =
/// 0.
pub(super) const MASKED_SCORE: f32 = -1e30;

/// Signed bytes of one plane in fours: 128 dims of a query, or the weights of a block of tokens.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
pub(super) struct Bytes(pub(super) [[i8; 4]; 32]);

/// Scores (times log2 e), then weights, of one query over a block of tokens, by tile. Keys are read
/// in pairs of tiles, hence one tile of slack.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Scores(pub(super) [[f32; TILE]; BLOCK_TILES + 1]);

/// Sixteen dims of an output.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Lane(pub(super) [f32; 16]);

/// Evaluates `$body` with the constant `$N` equal to `$n`.
macro_rules! with_n {
    ($n:expr, $N:ident => $body:expr) => {
        match $n {
            1 => {
                const $N: usize = 1;
                $body
            }
            2 => {
                const $N: usize = 2;
                $body
            }
            3 => {
                const $N: usize = 3;
                $body
            }
            4 => {
                const $N: usize = 4;
                $body
            }
            5 => {
                const $N: usize = 5;
                $body
            }
            6 => {
                const $N: usize = 6;
                $body
            }
            n => unreachable!("a chunk of {n} queries"),
        }
    };
}

pub(super) use with_n;

/// Combines the sums of products with `P` byte planes.
#[inline(always)]
pub(super) fn joined<L: Lanes, const P: usize>(lanes: L, sums: [L::Ints; P]) -> L::Ints {
    if P == 2 { lanes.join(sums[0], sums[P - 1]) } else { sums[0] }
}
