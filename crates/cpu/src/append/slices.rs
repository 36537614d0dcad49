//! Appending in slices of 128 dims, up to 16 tokens at once: the rows of a tile's slice are gathered, rotated in
//! registers and coded together, so that a group of codes is put together once, not code by code.
//!
//! Everything works in one buffer of a fixed size; nothing is allocated.

use half::bf16;
use kvant_backend::{Place, Stream, TileWrite};
use kvant_codec::DType;
use kvant_codec::finite::{F16_MAX, clamp};
use kvant_codec::tile::{Side, TILE, TileLayout};

use super::encode::Encode;
use super::is_coded;
use crate::CpuPage;
use crate::lanes::{Lanes, Op, Rotate, Way};

/// Dims that are worked on together: a slice of the rotation.
pub(super) const SLICE: usize = 128;

/// A slice of the rows of a tile. Slots that are not written hold zeros.
pub(super) type Rows = [[f32; SLICE]; TILE];

/// Appends `row(0) .. row(rows)` `[head_dim]` to one stream.
pub(super) fn append<'a, L: Lanes>(
    lanes: L,
    stream: &mut Stream<CpuPage>,
    rows: usize,
    row: impl Fn(usize) -> &'a [f32],
) {
    let plan = stream.plan(rows);
    for write in plan.writes() {
        for first in (0..stream.spec().dim()).step_by(SLICE) {
            append_slice(lanes, stream, &write, first, &row);
        }
    }
    stream.commit(plan);
}

/// Writes dims `first .. first + 128` (or to the end) of one tile.
fn append_slice<'a, L: Lanes>(
    lanes: L,
    stream: &mut Stream<CpuPage>,
    write: &TileWrite,
    first: usize,
    row: &impl Fn(usize) -> &'a [f32],
) {
    let spec = *stream.spec();
    let dims = first..(first + SLICE).min(spec.dim());
    let mut rows = [[0.0; SLICE]; TILE];
    for (i, out) in rows[write.from_rows.clone()].iter_mut().enumerate() {
        let row = row(write.first_row + i);
        let slice = &row[first.min(row.len())..dims.end.min(row.len())];
        out.iter_mut().zip(slice).for_each(|(out, &v)| *out = clamp(v, F16_MAX));
    }
    if spec.rotates() {
        let slices = rows[write.from_rows.clone()].as_flattened_mut();
        lanes.run(Rotate { slices, way: Way::Forward });
    }
    let mut slots = write.from_rows.clone();
    if let Some((tail, moved)) = &write.from_tail {
        let from = stream.tile_at(*tail);
        let tile = &from.page.as_bytes()[from.offset..][..from.layout.bytes()];
        lanes.run(LoadF16 { layout: from.layout, tile, dims: dims.clone(), rows: &mut rows[moved.clone()] });
        slots = moved.start..slots.end.max(moved.end);
    }
    if matches!(write.place, Place::Main(_)) && is_coded(spec.dtype) && spec.alpha != 1.0 {
        rows.as_flattened_mut().iter_mut().for_each(|v| *v *= spec.alpha);
    }

    let (layout, page, offset) = stream.tile_mut(write.place);
    let tile = &mut page.as_mut_bytes()[offset..][..layout.bytes()];
    if !is_coded(layout.dtype()) {
        return lanes.run(StoreFloats { layout, tile, dims, slots, rows: &rows });
    }
    let blocks = first / layout.block_dims()..dims.end / layout.block_dims();
    let part = &mut tile[blocks.start * layout.block_bytes()..blocks.end * layout.block_bytes()];
    if slots == (0..TILE) {
        lanes.run(Encode { layout, rows: &rows, out: part });
    } else {
        // Only a stream without a tail writes tiles in parts.
        let layout = TileLayout::new(layout.dtype(), layout.side(), dims.len()).expect("whole blocks");
        slots.for_each(|slot| layout.put(part, slot, &rows[slot][..dims.len()]));
    }
}

/// Reads a slice of the first slots of an f16 tile.
struct LoadF16<'a> {
    layout: TileLayout,
    tile: &'a [u8],
    dims: std::ops::Range<usize>,
    /// `[slots]`
    rows: &'a mut [[f32; SLICE]],
}

impl Op for LoadF16<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let (sixteens, _) = self.tile.as_chunks::<32>();
        let mut loaded = [0.0; 16];
        match self.layout.side() {
            Side::K => {
                for (i, tokens) in sixteens[self.dims].iter().enumerate() {
                    lanes.store(lanes.load_f16(tokens), &mut loaded);
                    self.rows.iter_mut().zip(loaded).for_each(|(row, v)| row[i] = v);
                }
            }
            Side::V => {
                let rows = sixteens.chunks_exact(self.layout.dim() / 16);
                for (out, row) in self.rows.iter_mut().zip(rows) {
                    let (out, _) = out.as_chunks_mut();
                    for (out, dims) in out.iter_mut().zip(&row[self.dims.start / 16..self.dims.end / 16]) {
                        lanes.store(lanes.load_f16(dims), out);
                    }
                }
            }
        }
    }
}

/// Writes a slice of some slots of a float tile.
struct StoreFloats<'a> {
    layout: TileLayout,
    tile: &'a mut [u8],
    dims: std::ops::Range<usize>,
    slots: std::ops::Range<usize>,
    rows: &'a Rows,
}

impl Op for StoreFloats<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        match self.layout.dtype() {
            DType::F16 => self.store::<L, F16, 2>(lanes),
            DType::BF16 => self.store::<L, BF16, 2>(lanes),
            DType::F32 => self.store::<L, F32, 4>(lanes),
            dtype => unreachable!("{dtype} is not a float type"),
        }
    }
}

/// A float format of `B` bytes.
trait Format<const B: usize> {
    fn from<L: Lanes>(lanes: L, x: &[f32; 16]) -> [[u8; B]; 16];
}

struct F16;
struct BF16;
struct F32;

impl Format<2> for F16 {
    #[inline(always)]
    fn from<L: Lanes>(lanes: L, x: &[f32; 16]) -> [[u8; 2]; 16] {
        lanes.to_f16(lanes.load(x))
    }
}

impl Format<2> for BF16 {
    #[inline(always)]
    fn from<L: Lanes>(_: L, x: &[f32; 16]) -> [[u8; 2]; 16] {
        x.map(|v| bf16::from_f32(v).to_le_bytes())
    }
}

impl Format<4> for F32 {
    #[inline(always)]
    fn from<L: Lanes>(_: L, x: &[f32; 16]) -> [[u8; 4]; 16] {
        x.map(f32::to_le_bytes)
    }
}

impl StoreFloats<'_> {
    #[inline(always)]
    fn store<L: Lanes, F: Format<B>, const B: usize>(self, lanes: L) {
        let width = self.layout.dim();
        let (values, _) = self.tile.as_chunks_mut::<B>();
        for slot in self.slots {
            let (row, _) = self.rows[slot].as_chunks::<16>();
            for (dim, row) in self.dims.clone().step_by(16).zip(row) {
                let row = F::from(lanes, row);
                match self.layout.side() {
                    Side::K => {
                        let places = values[TILE * dim + slot..].iter_mut().step_by(TILE);
                        places.zip(row).for_each(|(out, v)| *out = v);
                    }
                    Side::V => values[width * slot + dim..][..16].copy_from_slice(&row),
                }
            }
        }
    }
}
