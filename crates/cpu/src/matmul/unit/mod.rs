//! A matrix unit: registers of sixteen rows of 64 bytes, *tiles*, and their products of signed bytes.
//!
//! Tile `C` (0 to 3) holds sums `[16 rows of activations, 16 of weights]` of 32 bits, tile `A` (4, 5) some groups of four columns of
//! sixteen rows of activations, tile `B` (6, 7) the same columns of a panel:
//!
//! ```text
//! C[m][n] += sum over groups g, j in 0..4 of A[m][4 g + j] · B[g][4 n + j]
//! ```
//!
//! Sums go to memory, to one of a ring of slots, for there is no other way from a tile to a vector.

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(all(test, target_arch = "x86_64"))]
mod soft;

use super::kernels::PAIR;
use super::panel::{GROUPS, Line};
use super::quantise::Codes;
use super::simd::Simd;

#[cfg(all(test, target_arch = "x86_64"))]
pub(super) use soft::SoftUnit;

/// Rows of a tile.
pub(super) const ROWS: usize = 16;
/// Sums that are under way at once.
pub(super) const SLOTS: usize = 4;

/// The sums of a tile: a line for each row of activations, a word for each row of weights.
pub(super) type Products = [Line; ROWS];

/// Proof that this thread may use a matrix unit.
pub(super) trait Unit: Copy + Send + Sync {
    /// Its tiles, configured.
    type Tiles: Tiles;

    /// Configures the tiles of this thread for products of `groups` groups of four columns at once (at most [`GROUPS`]), until what is
    /// returned is dropped. A thread configures one at a time.
    fn open(self, groups: usize) -> Self::Tiles;
}

/// Configured tiles. Numbers of tiles are those of [`super::unit`]; others do not compile.
pub(super) trait Tiles {
    /// `C = 0`.
    fn zero<const C: usize>(&mut self);
    /// `A =` the groups from `first_group` of a block of sixteen rows.
    fn load_rows<const A: usize>(&mut self, rows: &[Codes; ROWS], first_group: usize);
    /// `B =` the groups from `first_group` of a block of panel `panel`, signed.
    fn load_panel<const B: usize>(
        &mut self,
        codes: &[[Line; PAIR]; GROUPS],
        first_group: usize,
        panel: usize,
    );
    /// `C += A · B`.
    fn dot<const C: usize, const A: usize, const B: usize>(&mut self);
    /// Slot `slot` `= C`.
    fn store<const C: usize>(&mut self, slot: usize);
    /// What was stored there last.
    fn stored(&self, slot: usize) -> &Products;
}

/// A kernel set: blocked products of codes by a matrix unit, and everything else by vectors.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tiled<S, U> {
    pub vectors: S,
    pub unit: U,
}

impl<S: Simd, U: Unit> Tiled<S, U> {
    pub fn new(vectors: S, unit: U) -> Self {
        Self { vectors, unit }
    }
}
