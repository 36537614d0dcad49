//! Codes of a block of tokens as panels, the operands of the matrix path: unpacked once for all
//! queries of a pass. A panel is a tile of keys, or a column of sixteen dims of values.

use super::codes::{Expanded, OCTET_DIMS};
use super::planes::COLUMNS;
use super::shape::BLOCK_TILES;
use crate::simd::matrix_unit::Row;
use crate::simd::vec16::{Lanes, Op};

/// Bytes of a line of codes.
pub(super) const LINE: usize = 64;
/// Bytes of a column.
pub(super) const COLUMN_BYTES: usize = COLUMNS / 2 * size_of::<Expanded>();

/// The unpacked codes of a block of tokens.
#[derive(Debug, Default)]
pub(super) struct Panels {
    /// `[blocks of dims][tiles][octets]`. Whole bytes are multiplied in place, except those of a
    /// shared-KV tensor.
    pub(super) keys: Vec<Expanded>,
    /// `[columns][tiles][4 groups]`
    pub(super) values: Vec<Expanded>,
    /// Sums of all codes of each column, for weights of one byte plane.
    pub(super) sums: Vec<Row>,
}

impl Panels {
    /// Resizes the buffers for blocks of so many dims of keys and of values.
    pub(super) fn reset(&mut self, [k_dim, v_dim]: [usize; 2]) {
        self.keys.resize(k_dim.div_ceil(OCTET_DIMS) * BLOCK_TILES, Expanded::ZERO);
        let octets = v_dim.div_ceil(OCTET_DIMS);
        self.values.resize(octets * COLUMNS, Expanded::ZERO);
        self.sums.resize(octets * 2, Row::ZERO);
    }
}

/// Sums all codes of a column.
pub(super) struct SumCodes<'a> {
    pub(super) groups: &'a [[u8; LINE]],
    pub(super) sums: &'a mut Row,
}

impl Op for SumCodes<'_> {
    type Output = ();

    const MULTIPLIES_BYTES: bool = true;

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let mut sums = lanes.splat_i(0);
        for codes in self.groups {
            sums = lanes.dot(sums, lanes.codes_8(codes), [1; 4]);
        }
        lanes.store_codes(sums, &mut self.sums.0);
    }
}
