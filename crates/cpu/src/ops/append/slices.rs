//! Appends in slices of 128 dims, up to 16 tokens at once: gathers the rows of a tile's slice,
//! rotates them in registers and encodes them together, so that a group of codes is packed once and
//! not code by code.
//!
//! All work happens in one buffer of a fixed size, without allocation.

use std::ops::Range;

use half::bf16;
use kvant_backend::{KvTensor, KvTensorSpec, TileLocation, TileRows, TileWrite, TokenSpan as StepRows};
use kvant_codec::DType;
use kvant_codec::finite::{F16_MAX, clamp};
use kvant_codec::tile::{Side, TILE, TileLayout, slices};

use super::encode::{Encode, Rows, SLICE};
use super::source::Source;
use super::target::Target;
use crate::simd::vec16::{Direction, Lanes, Op, Rotate};

/// Appends `rows.n` rows of `source` `[head_dim]` to one KV tensor.
pub(super) fn append<'a, L: Lanes>(
    lanes: L,
    tensor: &KvTensor,
    rows: StepRows,
    mut target: Target<'_>,
    source: Source<'a, impl Fn(usize) -> &'a [f32]>,
) {
    let spec = &tensor.spec;
    let (dim, is_coded) = (spec.stored_dim(), spec.dtype.code().is_some());
    for write in spec.writes(rows) {
        if is_coded {
            for dims in slices(dim, SLICE) {
                append_slice(lanes, spec, rows, &mut target, &write, dims, &source);
            }
        } else {
            for first in (0..dim).step_by(SLICE) {
                append_slice(
                    lanes,
                    spec,
                    rows,
                    &mut target,
                    &write,
                    first..(first + SLICE).min(dim),
                    &source,
                );
            }
        }
    }
}

/// Writes some dims of one tile.
fn append_slice<'a, L: Lanes>(
    lanes: L,
    spec: &KvTensorSpec,
    step: StepRows,
    target: &mut Target<'_>,
    write: &TileWrite,
    dims: Range<usize>,
    source: &Source<'a, impl Fn(usize) -> &'a [f32]>,
) {
    let mut rows = gather(lanes, spec, target, &write.rows(), dims.clone(), source);
    let all = write.slots();
    if write.in_step_tiles {
        let (layout, tile) = target.step_tile(write.tile);
        lanes.run(StoreFloats { layout, tile, dims: dims.clone(), slots: all.clone(), rows: &rows });
    }

    let (layout, tile) = target.tile(write.place);
    if layout.dtype().code().is_none() {
        let slots = if matches!(write.place, TileLocation::Main(_)) { all } else { write.new.clone() };
        return lanes.run(StoreFloats { layout, tile, dims, slots, rows: &rows });
    }
    if spec.centres {
        let place = 2 * dims.start..2 * dims.end;
        if let Some([own, next]) = spec.centre_rows(write, step) {
            let more = gather(lanes, spec, target, &next, dims.clone(), source);
            let (rows, out) = (
                [&rows[..own.new.end], &more[..next.new.end]],
                &mut target.centre(write.tile)[place.clone()],
            );
            lanes.run(PutCentre { rows, out });
        }
        lanes.run(TakeCentre { rows: &mut rows[all.clone()], centre: &target.centre(write.tile)[place] });
    }
    let (layout, tile) = target.tile(write.place);
    if spec.alpha != 1.0 {
        rows.as_flattened_mut().iter_mut().for_each(|v| *v *= spec.alpha);
    }
    let mut blocks = layout.blocks().skip_while(|block| block.dims.start < dims.start);
    let bytes = blocks.next().map_or(0, |block| block.bytes.start);
    let end = layout.blocks().take_while(|block| block.dims.end <= dims.end).last();
    let part = &mut tile[bytes..end.map_or(bytes, |block| block.bytes.end)];
    if all == (0..TILE) {
        let (dtype, side) = (layout.dtype(), layout.side());
        lanes.run(Encode { dtype, side, rows: &rows, dims: dims.len(), out: part });
    } else {
        // Only a KV tensor without a tail writes a tile in several steps.
        let layout = TileLayout::new(layout.dtype(), layout.side(), dims.len()).expect("whole blocks");
        all.for_each(|slot| layout.put(part, slot, &rows[slot][..dims.len()]));
    }
}

/// Writes the mean of some rows in f16: see `kvant_codec::tile::put_centre`.
struct PutCentre<'a> {
    rows: [&'a [[f32; SLICE]]; 2],
    out: &'a mut [u8],
}

impl Op for PutCentre<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let n_rows: usize = self.rows.iter().map(|rows| rows.len()).sum();
        let by = lanes.splat(1.0 / n_rows.max(1) as f32);
        for (i, out) in self.out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let mut sum = lanes.splat(0.0);
            for rows in self.rows {
                for row in rows {
                    sum = lanes.add(sum, lanes.load(&row.as_chunks().0[i]));
                }
            }
            out.copy_from_slice(lanes.to_f16(lanes.mul(sum, by)).as_flattened());
        }
    }
}

/// Subtracts a centre in f16 from rows.
struct TakeCentre<'a> {
    rows: &'a mut [[f32; SLICE]],
    centre: &'a [u8],
}

impl Op for TakeCentre<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        for (i, centre) in self.centre.as_chunks().0.iter().enumerate() {
            let centre = lanes.load_f16(centre);
            for row in self.rows.iter_mut() {
                let x = &mut row.as_chunks_mut().0[i];
                lanes.store(lanes.sub(lanes.load(x), centre), x);
            }
        }
    }
}

/// Returns a slice of the rows of a tile as they are encoded: padded, rotated, and rounded to f16
/// where the tensor has an f16 tail.
fn gather<'a, L: Lanes>(
    lanes: L,
    spec: &KvTensorSpec,
    target: &mut Target<'_>,
    TileRows { tile, old, new, first_row }: &TileRows,
    dims: Range<usize>,
    source: &Source<'a, impl Fn(usize) -> &'a [f32]>,
) -> Rows {
    let mut rows = [[0.0; SLICE]; TILE];
    for (i, out) in rows[new.clone()].iter_mut().enumerate() {
        source.read(first_row + i, dims.clone(), out);
        out.iter_mut().for_each(|v| *v = clamp(*v, F16_MAX));
    }
    let fresh = rows[new.clone()].as_flattened_mut();
    if spec.rotates {
        lanes.run(Rotate { rows: &mut *fresh, width: SLICE, slice: 0..dims.len(), way: Direction::Forward });
    }
    if spec.tail_tiles > 0 {
        lanes.run(RoundToF16 { rows: fresh });
    }
    if !old.is_empty() {
        let (layout, tile) = target.tile(TileLocation::Tail(tile % spec.tail_tiles));
        lanes.run(LoadF16 { layout, tile, dims, rows: &mut rows[old.clone()] });
    }
    rows
}

/// Rounds values to f16: rows of a tensor with an f16 tail are encoded from f16, however long they
/// stay in the tail.
struct RoundToF16<'a> {
    rows: &'a mut [f32],
}

impl Op for RoundToF16<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        for x in self.rows.as_chunks_mut::<16>().0 {
            let halves = lanes.to_f16(lanes.load(x));
            let bytes: &[u8; 32] = halves.as_flattened().try_into().expect("16 halves");
            lanes.store(lanes.load_f16(bytes), x);
        }
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
trait FloatFormat<const B: usize> {
    fn from<L: Lanes>(lanes: L, x: &[f32; 16]) -> [[u8; B]; 16];
}

struct F16;
struct BF16;
struct F32;

impl FloatFormat<2> for F16 {
    #[inline(always)]
    fn from<L: Lanes>(lanes: L, x: &[f32; 16]) -> [[u8; 2]; 16] {
        lanes.to_f16(lanes.load(x))
    }
}

impl FloatFormat<2> for BF16 {
    #[inline(always)]
    fn from<L: Lanes>(_: L, x: &[f32; 16]) -> [[u8; 2]; 16] {
        x.map(|v| bf16::from_f32(v).to_le_bytes())
    }
}

impl FloatFormat<4> for F32 {
    #[inline(always)]
    fn from<L: Lanes>(_: L, x: &[f32; 16]) -> [[u8; 4]; 16] {
        x.map(f32::to_le_bytes)
    }
}

impl StoreFloats<'_> {
    #[inline(always)]
    fn store<L: Lanes, F: FloatFormat<B>, const B: usize>(self, lanes: L) {
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
