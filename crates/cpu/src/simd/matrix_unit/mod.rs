//! A matrix unit: registers of sixteen rows of 64 bytes, *tiles*, and their products.
//!
//! Tile `C` (0 to 3) holds sums `[16 rows, 16 columns]` of 32 bits, tile `A` (4, 5) some words of
//! four bytes of sixteen rows, tile `B` (6, 7) the same words of sixteen columns, a line for each:
//!
//! ```text
//! C[m][n] += sum over words w, j in 0..4 of A[m][4 w + j] · B[w][4 n + j]
//! ```
//!
//! Bytes of `A` are signed; the product determines whether those of `B` are. Sums are stored to
//! memory, to one of a ring of slots, for there is no other path from a tile to a vector.
//!
//! A word may also be two bf16, a *half* each, with sums in f32:
//!
//! ```text
//! C[m][n] += (sum over words w of A[m][2 w] · B[w][2 n])
//!          + (sum over words w of A[m][2 w + 1] · B[w][2 n + 1])
//! ```
//!
//! with both sums started at zero, in the order of the words; each product is added to its sum with
//! one rounding, to nearest and ties to even, and subnormal inputs and results count as zero.

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(all(any(test, debug_assertions), target_arch = "x86_64"))]
mod emulated;

#[cfg(all(any(test, debug_assertions), target_arch = "x86_64"))]
pub(crate) use emulated::EmulatedUnit;

use bytemuck::{Pod, Zeroable};

/// Rows of a tile.
pub(crate) const ROWS: usize = 16;
/// Maximum words of a row, and lines of sixteen columns.
pub(crate) const MAX_WORDS: usize = 16;
/// Sums in flight at once.
pub(crate) const SLOTS: usize = 4;

/// Sixteen sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C, align(64))]
pub(crate) struct Row(pub [u8; 64]);

impl Row {
    pub const ZERO: Self = Self([0; 64]);
}

/// The sums of a tile, row by row.
pub(crate) type Products = [Row; ROWS];

/// Proof that this thread may use a matrix unit.
pub(crate) trait Unit: Copy + Send + Sync {
    /// Its tiles, configured.
    type Tiles: Tiles;

    /// Minimum queries for which attention uses the unit.
    const MIN_QUERIES: usize;
    /// Maximum queries that share one pass of attention over the tokens.
    const QUERIES: usize;

    /// Configures the tiles of this thread for products of `words` words at once (at most
    /// [`MAX_WORDS`]), until the returned value is dropped. A thread has one configuration at a
    /// time.
    fn open(self, words: usize) -> Self::Tiles;
}

/// Configured tiles. Tile numbers are those of [`super::unit`]; others do not compile.
pub(crate) trait Tiles {
    /// Computes `C = 0`.
    fn zero<const C: usize>(&mut self);
    /// Loads into `A` the first words of sixteen rows that begin `stride` bytes apart.
    ///
    /// # Panics
    /// When a row ends beyond `bytes`.
    fn load_rows<const A: usize>(&mut self, bytes: &[u8], stride: usize);
    /// Loads into `B` as many lines of 64 bytes, which begin `stride` bytes apart.
    ///
    /// # Panics
    /// When a line ends beyond `bytes`.
    fn load_lines<const B: usize>(&mut self, bytes: &[u8], stride: usize);
    /// Computes `C += A · B`, bytes of `B` signed.
    fn dot_signed<const C: usize, const A: usize, const B: usize>(&mut self);
    /// Computes `C += A · B`, bytes of `B` unsigned.
    fn dot_unsigned<const C: usize, const A: usize, const B: usize>(&mut self);
    /// Computes `C += A · B`, bytes of `B` unsigned, where `A` has part `part` of integers, of 16
    /// bits ([`PARTS_SHARE_SUMS`](crate::simd::vec16::Lanes::PARTS_SHARE_SUMS)). No processor has a
    /// matrix unit beside such vectors.
    fn dot_part<const C: usize, const A: usize, const B: usize>(&mut self, part: usize) {
        unreachable!("a matrix unit multiplies part {part} of integers of 16 bits");
    }
    /// Computes `C += A · B` of halves.
    fn dot_halves<const C: usize, const A: usize, const B: usize>(&mut self);
    /// Loads these sums into `C`.
    fn load_sums<const C: usize>(&mut self, sums: &Products);
    /// Stores `C` to `sums`.
    fn store_sums<const C: usize>(&mut self, sums: &mut Products);
    /// Stores `C` to slot `slot`.
    fn store<const C: usize>(&mut self, slot: usize);
    /// Returns the last stored sums of slot `slot`.
    fn stored(&self, slot: usize) -> &Products;
}

/// The unit of sets without one.
#[derive(Debug, Clone, Copy)]
pub(crate) enum NoUnit {}

impl Unit for NoUnit {
    type Tiles = Self;

    const MIN_QUERIES: usize = usize::MAX;
    // With so many, unpacking a tile costs little beside reading it.
    const QUERIES: usize = 48;

    fn open(self, _: usize) -> Self {
        self
    }
}

impl Tiles for NoUnit {
    fn zero<const C: usize>(&mut self) {
        match *self {}
    }

    fn load_rows<const A: usize>(&mut self, _: &[u8], _: usize) {
        match *self {}
    }

    fn load_lines<const B: usize>(&mut self, _: &[u8], _: usize) {
        match *self {}
    }

    fn dot_signed<const C: usize, const A: usize, const B: usize>(&mut self) {
        match *self {}
    }

    fn dot_unsigned<const C: usize, const A: usize, const B: usize>(&mut self) {
        match *self {}
    }

    fn dot_halves<const C: usize, const A: usize, const B: usize>(&mut self) {
        match *self {}
    }

    fn load_sums<const C: usize>(&mut self, _: &Products) {
        match *self {}
    }

    fn store_sums<const C: usize>(&mut self, _: &mut Products) {
        match *self {}
    }

    fn store<const C: usize>(&mut self, _: usize) {
        match *self {}
    }

    fn stored(&self, _: usize) -> &Products {
        match *self {}
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests;
