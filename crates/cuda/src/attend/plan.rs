//! Plans a launch of attention: kernel, tiles and KV splits of each sequence.

use bytemuck::{Pod, Zeroable};
use kvant_backend::{AttendParams, KvBatchEntry, KvLayer, Result, TokenSpan};
use kvant_codec::tile::TILE;

use super::divisor::Divisor;
use super::hopper::BlockShape;
use super::prompt::Partition;
use super::{OP, Part, QUERIES, WARPS, decode, hopper, prompt};
use crate::kv::{self, MemoryParams, small};
use crate::{Context, CudaPage, DevicePtr, GpuProperties};

/// Maximum number of queries of a KV head for split-KV; above it, warps share tiles.
const MAX_SPLIT_QUERIES: usize = 32;

/// The kernel that serves a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum KernelKind {
    /// Tiles go straight from memory to the tensor cores.
    Decode,
    /// Split-KV: each warp takes tiles of its own.
    Split,
    /// Prefill: warps share tiles, in blocks of this shape.
    Prefill(Partition),
    /// Prefill on compute capability 9.0: consumer warpgroups share tiles, which producers load.
    Warpgroups(BlockShape),
    /// Warps share tiles and outputs; the field counts the 16-query tiles of a block.
    LargeHead(usize),
}

impl KernelKind {
    /// Selects the kernel for `rows` with `group` queries of a KV head of `layer` each, on
    /// `device`. `large_head` is [`max_tiles`](super::large_head::max_tiles) of the layer.
    pub fn of(
        rows: TokenSpan,
        group: usize,
        layer: &KvLayer,
        large_head: Option<usize>,
        device: &GpuProperties,
    ) -> Self {
        let (queries, shared_bytes) = (rows.n * group, device.shared_per_block as usize);
        if let Some(max_query_tiles) = large_head {
            return Self::LargeHead(queries.div_ceil(QUERIES).clamp(1, max_query_tiles));
        }
        match queries {
            _ if rows.n <= decode::MAX_ROWS => Self::Decode,
            queries if queries <= MAX_SPLIT_QUERIES => Self::Split,
            _ if hopper::supports(rows, layer, device.arch) => Self::Warpgroups(BlockShape::of(layer)),
            _ => Self::Prefill(Partition::of(layer, shared_bytes)),
        }
    }

    /// Returns whether tiles are unpacked by a launch before.
    pub fn unpacks(self) -> bool {
        matches!(self, Self::Warpgroups(_))
    }

    pub fn queries_per_block(self) -> usize {
        match self {
            Self::Decode => decode::MAX_QUERIES,
            Self::Split => QUERIES,
            Self::Prefill(partition) => partition.queries(),
            Self::Warpgroups(block_shape) => block_shape.queries(),
            Self::LargeHead(tiles) => QUERIES * tiles,
        }
    }
}

/// `Sequence` of `attend.cuh`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct SequenceParams {
    memory: MemoryParams,
    balance: DevicePtr,
    first_row: u32,
    rows: u32,
    start: u32,
    window: u32,
    windows: u32,
    key_step_tiles: [u32; 2],
    value_step_tiles: [u32; 2],
    first_query: u32,
    padded: u32,
    first_partial: u32,
    splits: u32,
    split_tiles: u32,
    first_unpacked_tile: u32,
    n_unpacked_tiles: u32,
    by_splits: Divisor,
}

impl SequenceParams {
    /// Some rows of `sequence` in heads like `head`, without the plan of a launch.
    ///
    /// # Errors
    /// [`Unsupported`](kvant_backend::BackendError::Unsupported) beyond 32 bits, and when addresses
    /// cannot be written to the device.
    pub fn new(
        cx: &Context,
        sequence: &KvBatchEntry<'_, CudaPage>,
        rows: TokenSpan,
        head: usize,
        step_tiles: DevicePtr,
    ) -> Result<Self> {
        let in_step_tiles = |tensor| -> Result<[u32; 2]> {
            let tiles = sequence.step_tiles(tensor);
            Ok([small(OP, "tiles", tiles.start)?, tiles.len() as u32])
        };
        Ok(Self {
            memory: MemoryParams::new(cx, sequence, step_tiles)?,
            balance: kv::balance(sequence),
            first_row: small(OP, "rows", rows.range().end)? - rows.n as u32,
            rows: rows.n as u32,
            start: small(OP, "tokens", rows.end())? - rows.n as u32,
            window: small(OP, "tiles", sequence.layer.head_f16_window_start(head, rows.start / TILE))?,
            key_step_tiles: in_step_tiles(&sequence.layer.k[head])?,
            value_step_tiles: in_step_tiles(sequence.layer.values(head))?,
            ..Self::zeroed()
        })
    }

    /// The same rows with `splits` of `split_tiles` each, from number `first` of the launch on.
    pub fn with_splits(self, first: usize, splits: usize, split_tiles: usize) -> Result<Self> {
        Ok(Self {
            first_partial: small(OP, "splits", first)?,
            splits: splits as u32,
            by_splits: Divisor::new(splits),
            split_tiles: split_tiles as u32,
            ..self
        })
    }
}

/// The sequences of a launch, and the sizes of their buffers.
pub(super) struct Launched {
    pub sequences: Vec<SequenceParams>,
    /// The first tile in 16 bit of each tile of queries after a sequence's first.
    pub windows: Vec<u32>,
    /// Prepared queries.
    pub n_queries: usize,
    /// Partial results: one per query and split.
    pub n_partials: usize,
    /// Unpacked tiles.
    pub n_unpacked_tiles: usize,
    pub max_splits: usize,
    /// Maximum number of queries of a KV head of a sequence.
    pub max_queries: usize,
    /// Maximum number of unpacked tiles of a sequence.
    pub max_unpacked_tiles: usize,
}

impl Launched {
    /// Plans the sequences of one kernel, for heads of their layer with the same storage format.
    pub fn new(
        cx: &Context,
        p: &AttendParams,
        heads: &[usize],
        parts: &[Part<'_, '_>],
        step_tiles: DevicePtr,
    ) -> Result<Self> {
        let mut all = Self {
            sequences: Vec::with_capacity(parts.len()),
            windows: Vec::new(),
            n_queries: 0,
            n_partials: 0,
            n_unpacked_tiles: 0,
            max_splits: 0,
            max_queries: 0,
            max_unpacked_tiles: 0,
        };
        for part in parts {
            all.push(cx, p, heads, *part, step_tiles)?;
        }
        small(OP, "shares", all.n_partials)?;
        Ok(all)
    }

    fn push(
        &mut self,
        cx: &Context,
        p: &AttendParams,
        heads: &[usize],
        Part { sequence, rows, kernel_kind }: Part<'_, '_>,
        step_tiles: DevicePtr,
    ) -> Result<()> {
        let head = heads[0];
        let queries = rows.n * (p.n_heads / p.n_kv_heads);
        let padded = queries.next_multiple_of(kernel_kind.queries_per_block());
        let tiles = max_tiles(p, kernel_kind, rows, sequence.layer, head);
        let n_unpacked_tiles =
            if kernel_kind.unpacks() { n_visible_tiles(rows, sequence.layer, head) } else { 0 };
        let split_tiles = match kernel_kind {
            KernelKind::Prefill(_) => {
                prompt::split_tiles(cx, tiles, p.n_kv_heads * padded / kernel_kind.queries_per_block())
            }
            KernelKind::Warpgroups(_) => {
                let heads = hopper::heads_at_once(sequence.layer, n_unpacked_tiles, p.n_kv_heads);
                prompt::split_tiles(cx, tiles, heads * padded / kernel_kind.queries_per_block())
            }
            KernelKind::Decode | KernelKind::Split | KernelKind::LargeHead(_) => {
                split_tiles(cx, tiles, p.n_kv_heads * padded / kernel_kind.queries_per_block())
            }
        };
        let splits = tiles.div_ceil(split_tiles);
        self.sequences.push(SequenceParams {
            windows: self.windows.len() as u32,
            first_query: small(OP, "queries", self.n_queries)?,
            padded: padded as u32,
            first_partial: self.n_partials as u32,
            splits: splits as u32,
            split_tiles: split_tiles as u32,
            first_unpacked_tile: small(OP, "tiles", self.n_unpacked_tiles)?,
            n_unpacked_tiles: n_unpacked_tiles as u32,
            ..SequenceParams::new(cx, sequence, rows, head, step_tiles)?
        });
        let window = |tile| small(OP, "tiles", sequence.layer.head_f16_window_start(head, tile));
        for tile in rows.start / TILE + 1..rows.end().div_ceil(TILE) {
            self.windows.push(window(tile)?);
        }
        self.n_queries += heads.len() * padded;
        self.n_partials += heads.len() * splits * padded;
        self.n_unpacked_tiles += heads.len() * n_unpacked_tiles;
        self.max_splits = self.max_splits.max(splits);
        self.max_queries = self.max_queries.max(queries);
        self.max_unpacked_tiles = self.max_unpacked_tiles.max(n_unpacked_tiles);
        Ok(())
    }
}

/// Returns the tiles that tokens from position `first` to `last` attend to: `visible_tiles` of
/// `attend.cuh`.
fn visible_tiles(layer: &KvLayer, head: usize, [first, last]: [usize; 2]) -> usize {
    let (oldest, end) = (layer.window_start(first) / TILE, last / TILE + 1);
    let codes = layer.head_f16_window_start(head, last / TILE).min(end).saturating_sub(oldest);
    codes + end.saturating_sub(layer.head_f16_window_start(head, first / TILE).max(oldest))
}

/// Returns the maximum number of tiles that a block of queries attends to.
fn max_tiles(
    p: &AttendParams,
    kernel_kind: KernelKind,
    rows: TokenSpan,
    layer: &KvLayer,
    head: usize,
) -> usize {
    let (group, per_block) = (p.n_heads / p.n_kv_heads, kernel_kind.queries_per_block());
    let visible = |first_query: usize| {
        let last_query = (first_query + per_block).min(rows.n * group) - 1;
        visible_tiles(layer, head, [first_query, last_query].map(|query| rows.start + query / group))
    };
    (0..rows.n * group).step_by(per_block).map(visible).max().unwrap_or(0)
}

/// Returns the tiles that any token of a sequence attends to.
pub(super) fn n_visible_tiles(rows: TokenSpan, layer: &KvLayer, head: usize) -> usize {
    visible_tiles(layer, head, [rows.start, rows.end() - 1])
}

/// Returns the tiles per KV split: few enough that all multiprocessors have work, but several per
/// warp.
fn split_tiles(cx: &Context, tiles: usize, blocks: usize) -> usize {
    let target_blocks = 4 * cx.gpu().properties().n_sms as usize;
    let splits = (target_blocks / blocks.max(1)).max(1);
    tiles.div_ceil(splits).max(2 * WARPS).next_multiple_of(WARPS)
}
