//! The visible tokens of each row, as parameters of the kernels.

use std::ops::Range;

use kvant_backend::{BackendError, ChannelScaleLayout, KvBatchEntry, KvLayer, KvTensor, Result};
use kvant_codec::tile::{Side, TILE};

use super::kernels::{KernelKind, MAX_DIMS};
use super::{OP, SPAN};
use crate::WgpuPage;
use crate::kv::{NONE, balance, has_centres, number, word};

/// The visible tokens of each row; `Params::list` of `list.wgsl` documents the layout.
pub struct List {
    pub words: Vec<u32>,
    pub jobs: usize,
    /// Spans that any of the rows sees; at least one.
    pub spans: Range<usize>,
    pub jobs_at: usize,
    pub windows_at: usize,
    pub tensors_at: usize,
    /// Kinds of the KV tensors, without duplicates.
    pub kinds: Vec<KernelKind>,
}

impl List {
    /// Plans rows whose queries, `group` per row and KV head, are processed `slots` at a time.
    ///
    /// # Errors
    /// [`BackendError::Unsupported`] for types and heads without kernels.
    pub fn new(
        parts: &[KvBatchEntry<'_, WgpuPage>],
        group: usize,
        slots: usize,
        step_tiles: Option<&WgpuPage>,
    ) -> Result<Self> {
        let positions = |part: &KvBatchEntry<'_, WgpuPage>| part.rows.start..part.rows.end();
        let (mut words, mut first_span, mut end_span) = (Vec::new(), usize::MAX, 0);
        for (index, part) in parts.iter().enumerate() {
            for (row, position) in part.rows.range().zip(positions(part)) {
                let oldest = part.layer.window_start(position);
                words.extend([row, position, oldest, index].map(|n| n as u32));
                first_span = first_span.min(oldest / SPAN);
                end_span = end_span.max(position / SPAN + 1);
            }
        }
        let jobs_at = words.len();
        let mut first_row = 0;
        for part in parts {
            let n = part.rows.n * group;
            for first in (0..n).step_by(slots) {
                words.extend([first_row, first, slots.min(n - first)].map(|n| n as u32));
            }
            first_row += part.rows.n;
        }
        let (jobs, windows_at) = ((words.len() - jobs_at) / 3, words.len());
        for part in parts {
            for position in positions(part) {
                let window = |tensor: &KvTensor| tensor.spec.f16_window_start(position / TILE) as u32;
                let heads = (0..part.layer.k.len()).map(|head| tensors(part.layer, head).map(window));
                words.extend(heads.flatten());
            }
        }
        let tensors_at = words.len();
        let n_tensors: usize = parts.iter().map(|part| 2 * part.layer.k.len()).sum();
        let mut blocks_at = tensors_at + TENSOR_WORDS * n_tensors;
        let mut kinds = Vec::new();
        for part in parts {
            for head in 0..part.layer.k.len() {
                let kind = KernelKind::new(tensors(part.layer, head).map(|tensor| &tensor.spec))?;
                if !kinds.contains(&kind) {
                    kinds.push(kind);
                }
                let [keys, values] = tensors(part.layer, head);
                words.extend(tensor_words(part, keys, step_tiles, blocks_at, of_keys(part, head))?);
                words.extend(tensor_words(part, values, step_tiles, blocks_at, of_values(part, head))?);
            }
            blocks_at += part.memory.blocks().len();
        }
        for part in parts {
            let blocks = part.memory.blocks().iter();
            words.extend(blocks.map(|block| block.as_ref().map_or(NONE, |page| page.address(0))));
        }
        let spans = first_span..end_span;
        Ok(Self { words, jobs, spans, jobs_at, windows_at, tensors_at, kinds })
    }
}

/// Returns the tensors of keys and of values of a KV head; the same twice for a shared-KV tensor.
fn tensors(layer: &KvLayer, head: usize) -> [&KvTensor; 2] {
    [&layer.k[head], layer.values(head)]
}

/// Returns the offsets of the channel scales of queries of a KV head, and of their shifts.
fn of_keys(part: &KvBatchEntry<'_, WgpuPage>, head: usize) -> [u32; 2] {
    let query = ChannelScaleLayout::of(part.layer).query.start;
    [balance(part, query + head * part.layer.k[head].spec.head_dim), NONE]
}

/// Returns the offsets of the channel scales of outputs of a KV head, and of their shifts. Outputs
/// of shared-KV tensors have the scales of queries.
fn of_values(part: &KvBatchEntry<'_, WgpuPage>, head: usize) -> [u32; 2] {
    let Some(tensor) = part.layer.v.get(head) else { return of_keys(part, head) };
    let (of, column) = (ChannelScaleLayout::of(part.layer), head * tensor.spec.head_dim);
    match of.scales_values() {
        true => [of.out, of.out_shift].map(|range| balance(part, range.start + column)),
        false => [NONE; 2],
    }
}

/// Words of a KV tensor in the list.
pub const TENSOR_WORDS: usize = 18;

/// Returns the words of `Stream` of `list.wgsl`.
fn tensor_words(
    part: &KvBatchEntry<'_, WgpuPage>,
    tensor: &KvTensor,
    step_tiles: Option<&WgpuPage>,
    blocks_at: usize,
    [factors, shifts]: [u32; 2],
) -> Result<[u32; TENSOR_WORDS]> {
    let spec = &tensor.spec;
    if spec.stored_dim() > MAX_DIMS {
        return Err(BackendError::Unsupported {
            op: OP,
            requested: format!("heads of {}", spec.head_dim),
            has: format!("heads of up to {MAX_DIMS}"),
        });
    }
    let tiles = part.step_tiles(tensor);
    let step_tiles = match step_tiles {
        Some(page) if !tiles.is_empty() => page.address(part.step_tile_offset(tensor, tiles.start)),
        _ => NONE,
    };
    let within = |page: Option<_>, at: usize| page.map_or(NONE, |page: &WgpuPage| page.address(at));
    let [sink, tail] = [part.memory.sink(), part.memory.tail()].map(|page| page.map(|page| &***page));
    Ok([
        number(OP, spec)?,
        spec.stored_dim() as u32,
        spec.stored_value_dim() as u32,
        u32::from(spec.side == Side::K),
        spec.rotates.into(),
        spec.sink_tiles as u32,
        spec.tail_tiles as u32,
        word(tensor.main),
        word(spec.main_layout().bytes()),
        if has_centres(spec) { word(tensor.centre) } else { NONE },
        within(sink, tensor.sink),
        within(tail, tensor.tail),
        step_tiles,
        tiles.start as u32,
        tiles.end as u32,
        blocks_at as u32,
        factors,
        shifts,
    ])
}
