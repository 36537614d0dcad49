//! Appends keys and values to the KV cache: the host plans the writes and passes them as lists.
//!
//! At most three launches: centres of blocks, which are the mean of rows that are still in the
//! tail; all writes that read the tail; and then the writes that replace its tiles. A decode step
//! has the last of them, and every sixteenth the second.

use bytemuck::{Pod, Zeroable};
use kvant_backend::{ChannelScaleLayout, KvBatchEntry, KvTensor, Result, TileLocation, TileRows, TileWrite};
use kvant_codec::tile::{Side, TILE};
use kvant_codec::{Codebook, DType, Rotation, Trellis, block32, finite, step, trellis};

use crate::constants::Constants;
use crate::elementwise::MATH;
use crate::kv::{NONE, TILES, balance, has_centres, number};
use crate::slabs::{Access, with_slabs};
use crate::{Gpu, Part, Source, WgpuPage, groups, kv};

pub(crate) static SOURCE: Source = Source {
    parts: &[
        MATH,
        TILES,
        Part { name: "integers.wgsl", text: include_str!("integers.wgsl") },
        Part { name: "encode.wgsl", text: include_str!("encode.wgsl") },
        Part { name: "trellis.wgsl", text: include_str!("trellis.wgsl") },
        Part { name: "append.wgsl", text: include_str!("append.wgsl") },
    ],
    constants,
};

const OP: &str = "kv_append";

/// The codebooks of turbo2, turbo3 and turbo4.
const BOOKS: [Codebook; 3] = [Codebook::GAUSS2, Codebook::GAUSS3, Codebook::GAUSS4];
/// Fractional bits of squares of centroids, 128 of which fit 64 bits: they are below 1/16.
const SQUARE_BITS: i32 = 60;
/// Squared norm below which a slice counts as zero.
const TINY: f64 = 1e-20;

/// `Write` of `append.wgsl`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Write {
    tile: u32,
    tail: u32,
    step_tile: u32,
    centre: u32,
    old_slots: u32,
    new_slots: u32,
    first_row: u32,
    dtype: u32,
    is_key: u32,
    of_keys: u32,
    rotates: u32,
    rounds_to_f16: u32,
    dim: u32,
    head_dim: u32,
    column: u32,
    width: u32,
    scale: u32,
    shift: u32,
    alpha: f32,
    next_tail: u32,
    next_old_slots: u32,
    next_new_slots: u32,
    next_row: u32,
    inverse_rows: f32,
}

fn constants() -> Constants {
    let masks = Rotation::kv(128);
    let with_signs = [("BEFORE", masks.before()), ("AFTER", masks.after())].into_iter().fold(
        kv::constants(),
        |constants, (name, mask)| {
            (0..4).fold(constants, |constants, i| {
                constants.whole(&format!("SIGNS_{name}_{i}"), (mask >> (32 * i)) as u32 as usize)
            })
        },
    );
    let with_factors = [128, 64, 32].into_iter().fold(with_signs, |constants, n: usize| {
        constants.float(&format!("FACTOR_{n}"), (1.0 / (n as f64).sqrt()) as f32)
    });
    let tiny = normal(TINY);
    with_trellises(with_books(with_factors))
        .whole("TINY_LOW", tiny.0 as u32 as usize)
        .whole("TINY_HIGH", (tiny.0 >> 32) as usize)
        .whole("TINY_DOWN", tiny.1.unsigned_abs() as usize)
        .whole("SQUARE_BITS", SQUARE_BITS as usize)
        .whole("Q8_0_ZERO", block32::Q8_0_ZERO.into())
        .whole("Q4_0_ZERO", block32::Q4_0_ZERO.into())
        .float("Q8_0_MAX_SCALE", block32::Q8_0_MAX_SCALE)
        .float("HALF_MAX", finite::F16_MAX)
        .float("MIN_NORMAL", f32::MIN_POSITIVE)
}

/// Adds the constants of the turbo encoder.
fn with_books(constants: Constants) -> Constants {
    let upper = |book: &Codebook| book.levels().len() / 2;
    // Above every value.
    let padded = |values: Vec<u32>| values.into_iter().chain([u32::MAX; 8]).take(8);
    let thresholds = BOOKS.iter().flat_map(|book| {
        let of = move |k| book.mids()[upper(book)..].iter().map(move |&mid| step::threshold(mid, k) as u32);
        (0..step::STEPS).flat_map(move |k| padded(of(k).collect()))
    });
    let levels = BOOKS.iter().flat_map(|book| {
        padded(book.centroids()[upper(book)..].iter().map(|&level| step::level(level) as u32).collect())
    });
    let squares = BOOKS.iter().flat_map(|book| {
        let of = |centroid: &f32| (f64::from(*centroid).powi(2) * 2f64.powi(SQUARE_BITS)) as u64;
        let all: Vec<u64> = book.centroids().iter().map(of).chain([0; 16]).take(16).collect();
        all.into_iter().flat_map(|square| [square as u32, (square >> 32) as u32])
    });
    let mids = BOOKS.iter().flat_map(|book| book.mids().iter().copied().chain([f32::MAX; 16]).take(16));
    constants
        .whole("STEPS", step::STEPS)
        .float("STEP_ONE", step::MAGNITUDE_SCALE)
        .wholes("STEP_THRESHOLDS", &thresholds.collect::<Vec<_>>())
        .wholes("STEP_LEVELS", &levels.collect::<Vec<_>>())
        .floats("STEP_FACTORS", &(0..step::STEPS).map(step::factor).collect::<Vec<_>>())
        .wholes("SQUARES", &squares.collect::<Vec<_>>())
        .floats("MIDS", &mids.collect::<Vec<_>>())
}

/// Adds the constants of the trellis encoder.
fn with_trellises(constants: Constants) -> Constants {
    let tables = [Trellis::TURBO2T, Trellis::TURBO3T];
    let levels = tables.iter().flat_map(|trellis| trellis.levels().map(|level| i32::from(level) as u32));
    constants
        .whole("TRELLIS_WINDOW", trellis::WINDOW)
        .whole("TRELLIS_WINDOWS", trellis::LEVELS)
        .whole("TRELLIS_STRIDE", trellis::STRIDE)
        .whole("TRELLIS_SEAM_OVERLAP", trellis::SEAM_OVERLAP)
        .whole("MAX_STATES", tables.map(|trellis| trellis.states()).into_iter().max().unwrap_or(0))
        .integer("TRELLIS_TAG_MASK", trellis::COST_TAG_MASK)
        .integer("TRELLIS_FORBIDDEN_COST", trellis::FORBIDDEN_COST)
        .integer("TRELLIS_UNIT", trellis::BRANCH_FACTORS[0].into())
        .integer("TRELLIS_SQUARE_UNIT", trellis::BRANCH_FACTORS[1].into())
        .float("TRELLIS_PER_UNIT", Trellis::PER_UNIT)
        .float("TRELLIS_MAX_VALUE", trellis::MAX_VALUE)
        .wholes("TRELLIS_TABLES", &levels.collect::<Vec<_>>())
}

/// Returns `x`, a normal number, as 64 bits with the highest set, and a power of two.
fn normal(x: f64) -> (u64, i32) {
    let (bits, hidden) = (x.to_bits(), 1 << 52);
    (((bits & (hidden - 1)) | hidden) << 11, (bits >> 52) as i32 - 1075 - 11)
}

/// Returns the constants of the kernels for `n_slabs` slabs.
pub(crate) fn variant(n_slabs: usize) -> Constants {
    Constants::default().slabs(n_slabs, Access::ReadWrite)
}

/// The writes of a step.
#[derive(Default)]
struct Lists {
    centres: Vec<Write>,
    first: Vec<Write>,
    tails: Vec<Write>,
}

/// Appends the new tokens of each sequence to every KV tensor of its layer. The caller has reserved
/// the memory and checked the shapes.
pub(crate) fn append(
    gpu: &Gpu,
    slabs: &[wgpu::Buffer],
    parts: &[KvBatchEntry<'_, WgpuPage>],
    [k, v]: [&wgpu::Buffer; 2],
    step_tiles: Option<&WgpuPage>,
) -> Result<()> {
    let mut lists = Lists::default();
    for part in parts {
        for tensors in [&part.layer.k, &part.layer.v] {
            for (head, tensor) in tensors.iter().enumerate() {
                lists.push(part, tensor, head, step_tiles)?;
            }
        }
    }
    for (name, list) in [("centre", lists.centres), ("append", lists.first), ("append", lists.tails)] {
        // A list travels in the parameters of its launch.
        for list in list.chunks(4096) {
            let kernel = gpu.variant(&SOURCE, name, &[slabs.len() as u32], || variant(slabs.len()))?;
            let bindings = with_slabs(&[(1, k), (2, v)], slabs);
            gpu.launch(&kernel, groups(list.len(), 1), &(), list, &bindings)?;
        }
    }
    Ok(())
}

impl Lists {
    /// Adds the writes of a step to one KV tensor.
    fn push(
        &mut self,
        part: &KvBatchEntry<'_, WgpuPage>,
        tensor: &KvTensor,
        head: usize,
        step_tiles: Option<&WgpuPage>,
    ) -> Result<()> {
        let spec = &tensor.spec;
        let common = common(part, tensor, head)?;
        for write in spec.writes(part.rows) {
            let tail = tail(part, tensor, &write.rows());
            let centre = match write.place {
                TileLocation::Main(tile) if has_centres(spec) => {
                    let block = part.memory.tile(tensor, TileLocation::Main(tile)).page;
                    block.address(tensor.centre)
                }
                _ => NONE,
            };
            if let Some([own, next]) = spec.centre_rows(&write, part.rows) {
                let n_rows = own.new.end + next.new.end;
                self.centres.push(Write {
                    tail,
                    centre,
                    next_tail: self::tail(part, tensor, &next),
                    next_old_slots: slots(&next.old),
                    next_new_slots: slots(&next.new),
                    next_row: (part.rows.first + next.first_row) as u32,
                    inverse_rows: 1.0 / n_rows as f32,
                    ..with_slots(common, part, &own)
                });
            }
            let all = Write { tail, centre, ..with_slots(common, part, &write.rows()) };
            let tile = part.memory.tile(tensor, write.place);
            let tile_at = tile.page.address(tile.offset);
            let in_tail = matches!(write.place, TileLocation::Tail(_));
            let step_tile = match step_tiles {
                Some(page) if write.in_step_tiles => page.address(part.step_tile_offset(tensor, write.tile)),
                _ => NONE,
            };
            if !in_tail || step_tile != NONE {
                let dtype = if matches!(write.place, TileLocation::Main(_)) { all.dtype } else { F16 };
                let tile = if in_tail { NONE } else { tile_at };
                self.first.push(Write { tile, step_tile, dtype, ..all });
            }
            if in_tail && !write.new.is_empty() {
                self.tails.push(new_rows(Write { tile: tile_at, dtype: F16, ..all }, &write));
            }
        }
        Ok(())
    }
}

/// The number of f16 in kernels.
const F16: u32 = {
    assert!(matches!(kv::TYPES[1], DType::F16));
    1
};

/// Returns the fields shared by all writes to a KV tensor.
fn common(part: &KvBatchEntry<'_, WgpuPage>, tensor: &KvTensor, head: usize) -> Result<Write> {
    let spec = &tensor.spec;
    let layout = ChannelScaleLayout::of(part.layer);
    let (column, n_heads) = (head * spec.head_dim, part.layer.k.len());
    // Shared-KV tensors store keys, in tiles with the layout of values.
    let of_keys = spec.side == Side::K || spec.shared_kv.is_some();
    let [scale, shift] = match of_keys {
        true => [balance(part, layout.key.start + column), NONE],
        false if layout.scales_values() => {
            [layout.value, layout.value_shift].map(|range| balance(part, range.start + column))
        }
        false => [NONE; 2],
    };
    Ok(Write {
        tile: NONE,
        tail: NONE,
        step_tile: NONE,
        centre: NONE,
        dtype: number(OP, spec)?,
        is_key: u32::from(spec.side == Side::K),
        of_keys: of_keys.into(),
        rotates: spec.rotates.into(),
        rounds_to_f16: u32::from(spec.tail_tiles > 0),
        dim: spec.stored_dim() as u32,
        head_dim: spec.head_dim as u32,
        column: column as u32,
        width: (n_heads * spec.head_dim) as u32,
        scale,
        shift,
        alpha: spec.alpha,
        ..Write::zeroed()
    })
}

/// Returns `common` with the slots of a tile.
fn with_slots(common: Write, part: &KvBatchEntry<'_, WgpuPage>, rows: &TileRows) -> Write {
    Write {
        old_slots: slots(&rows.old),
        new_slots: slots(&rows.new),
        first_row: (part.rows.first + rows.first_row) as u32,
        ..common
    }
}

/// Returns `write` without the slots that stay in the tail.
fn new_rows(all: Write, write: &TileWrite) -> Write {
    Write { tail: NONE, old_slots: 0, new_slots: slots(&write.new), ..all }
}

/// Returns the position of the tile in the tail, if slots of it are there.
fn tail(part: &KvBatchEntry<'_, WgpuPage>, tensor: &KvTensor, rows: &TileRows) -> u32 {
    if rows.old.is_empty() {
        return NONE;
    }
    let tile = part.memory.tile(tensor, TileLocation::Tail(rows.tile % tensor.spec.tail_tiles));
    tile.page.address(tile.offset)
}

/// Packs a range of slots into a word.
fn slots(range: &std::ops::Range<usize>) -> u32 {
    debug_assert!(range.end <= TILE, "{range:?}");
    (range.start | range.end << 16) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_normal_number_is_its_bits_times_a_power_of_two() {
        for x in [TINY, 1.0, 0.1, 1e30] {
            let (m, exponent) = normal(x);
            assert!(m >> 63 == 1 && m as f64 * 2f64.powi(exponent) == x, "{x}");
        }
    }
}
