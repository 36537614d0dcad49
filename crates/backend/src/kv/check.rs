//! Shape checks of the cache's ops, shared by every device.

use kvant_codec::tile::TILE;

use super::{ChannelScaleLayout, KvBatchEntry, KvLayer, KvTensor};
use crate::device::{Buffer, Page, Result};
use crate::{AttendParams, BackendError, BlockSelection, Selected, Selection};

/// Returns the rows that a batch reaches into its buffers.
pub fn batch_rows<P: Page>(parts: &[KvBatchEntry<'_, P>]) -> usize {
    parts.iter().map(|part| part.rows.range().end).max().unwrap_or(0)
}

/// Checks [`Backend::kv_append`](crate::Backend::kv_append).
///
/// # Errors
/// [`BackendError::Shape`] that names the operand at fault.
pub(crate) fn check_append<P: Page, B: Buffer>(
    parts: &[KvBatchEntry<'_, P>],
    [k, v]: [&B; 2],
    step_tiles: Option<&P>,
) -> Result<()> {
    const OP: &str = "kv_append";
    let step_tile_bytes = step_tiles.map_or(0, Page::n_bytes);
    for alike in of_one_layer(parts) {
        let layer = alike[0].layer;
        BackendError::check_equal(OP, "value heads", expected_value_tensors(layer), layer.v.len())?;
        for (what, tensors, x) in [("keys", &layer.k, k), ("values", &layer.v, v)] {
            let head_dim = common_head_dim(OP, "head size", tensors)?;
            let n_values = batch_rows(alike) * layer.k.len() * head_dim;
            BackendError::check_at_least(OP, what, n_values, x.n_values())?;
        }
        check_channel_scales(OP, alike)?;
    }
    parts.iter().try_for_each(|part| check_step_tiles(OP, part, step_tile_bytes))
}

/// Divides a batch where the layer changes: its sequences usually have the same.
fn of_one_layer<'a, 'b, P: Page>(
    parts: &'a [KvBatchEntry<'b, P>],
) -> impl Iterator<Item = &'a [KvBatchEntry<'b, P>]> {
    parts.chunk_by(|a, b| std::ptr::eq(a.layer, b.layer))
}

/// Checks [`Backend::attend`](crate::Backend::attend).
///
/// # Errors
/// As [`check_append`].
pub(crate) fn check_attend<P: Page, B: Buffer>(
    p: &AttendParams,
    parts: &[KvBatchEntry<'_, P>],
    [q, out]: [&B; 2],
    sinks: Option<&B>,
    step_tiles: Option<&P>,
) -> Result<()> {
    const OP: &str = "attend";
    let step_tile_bytes = step_tiles.map_or(0, Page::n_bytes);
    let [q, out] = [q, out].map(Buffer::n_values);
    let sinks = sinks.map(Buffer::n_values);
    BackendError::check_at_least(OP, "sinks", p.n_heads, sinks.unwrap_or(p.n_heads))?;
    BackendError::check_equal(OP, "query heads beyond whole groups", 0, p.n_heads % p.n_kv_heads.max(1))?;
    for alike in of_one_layer(parts) {
        let layer = alike[0].layer;
        BackendError::check_equal(OP, "key tensors", p.n_kv_heads, layer.k.len())?;
        BackendError::check_equal(OP, "value tensors", expected_value_tensors(layer), layer.v.len())?;
        if p.n_kv_heads > 0 {
            let k_head_dim = common_head_dim(OP, "key head size", &layer.k)?;
            BackendError::check_equal(OP, "key head size", p.k_head_dim, k_head_dim)?;
            let v_head_dim = match layer.is_shared_kv() {
                true => shared_value_dim(OP, &layer.k)?,
                false => common_head_dim(OP, "value head size", &layer.v)?,
            };
            BackendError::check_equal(OP, "value head size", p.v_head_dim, v_head_dim)?;
        }
        check_blocks(OP, alike)?;
        check_channel_scales(OP, alike)?;
    }
    let rows = batch_rows(parts);
    BackendError::check_at_least(OP, "queries", rows * p.n_heads * p.k_head_dim, q)?;
    BackendError::check_at_least(OP, "output", rows * p.n_heads * p.v_head_dim, out)?;
    parts.iter().try_for_each(|part| check_step_tiles(OP, part, step_tile_bytes))
}

/// Checks [`Backend::select_tokens`](crate::Backend::select_tokens).
///
/// # Errors
/// As [`check_append`].
pub(crate) fn check_select<P: Page, B: Buffer>(
    Selection { n_heads, n_used }: Selection,
    parts: &[KvBatchEntry<'_, P>],
    [q, weights, selected]: [&B; 3],
    step_tiles: Option<&P>,
) -> Result<()> {
    const OP: &str = "select_tokens";
    BackendError::check_at_least(OP, "tokens that a row attends to", 1, n_used)?;
    for part in parts {
        let rows = part.rows.range().end;
        BackendError::check_at_least(OP, "weights", rows * n_heads, weights.n_values())?;
        check_index(OP, part, [rows, n_heads], q, step_tiles)?;
        check_positions(OP, part, n_used, selected)?;
    }
    Ok(())
}

/// Checks [`Backend::select_blocks`](crate::Backend::select_blocks).
///
/// # Errors
/// As [`check_append`].
pub(crate) fn check_select_blocks<P: Page, B: Buffer>(
    BlockSelection { n_heads, n_used, size, n_local }: BlockSelection,
    parts: &[KvBatchEntry<'_, P>],
    [q, selected]: [&B; 2],
    step_tiles: Option<&P>,
) -> Result<()> {
    const OP: &str = "select_blocks";
    BackendError::check_at_least(OP, "blocks that a row attends to", n_local.max(1), n_used)?;
    BackendError::check_at_least(OP, "tokens of a block", 1, size)?;
    for part in parts {
        check_index(OP, part, [part.rows.range().end, n_heads], q, step_tiles)?;
        check_positions(OP, part, n_heads * n_used, selected)?;
    }
    Ok(())
}

/// Checks the keys of an index, and its queries `[rows, n_heads * head_dim]`.
pub(crate) fn check_index<P: Page, B: Buffer>(
    op: &'static str,
    part: &KvBatchEntry<'_, P>,
    [rows, n_heads]: [usize; 2],
    q: &B,
    step_tiles: Option<&P>,
) -> Result<()> {
    BackendError::check_equal(op, "key tensors of an index", 1, part.layer.k.len())?;
    let dim = part.layer.k[0].spec.head_dim;
    BackendError::check_at_least(op, "queries", rows * n_heads * dim, q.n_values())?;
    check_blocks(op, std::slice::from_ref(part))?;
    check_step_tiles(op, part, step_tiles.map_or(0, Page::n_bytes))
}

/// Checks [`Backend::attend_selected`](crate::Backend::attend_selected).
///
/// # Errors
/// As [`check_append`].
pub(crate) fn check_attend_selected<P: Page, B: Buffer>(
    p: &AttendParams,
    parts: &[KvBatchEntry<'_, P>],
    q_out: [&B; 2],
    Selected { numbers, n_used, block, n_lists, sinks, .. }: Selected<'_, B>,
    step_tiles: Option<&P>,
) -> Result<()> {
    const OP: &str = "attend_selected";
    check_attend(p, parts, q_out, sinks, step_tiles)?;
    BackendError::check_at_least(OP, "tokens of a block", 1, block)?;
    if n_lists != 1 {
        BackendError::check_equal(OP, "lists of a row", p.n_kv_heads, n_lists)?;
    }
    parts.iter().try_for_each(|part| check_positions(OP, part, n_lists * n_used, numbers))
}

/// Checks that a buffer has `n_used` positions or numbers of blocks of each row, and that they are
/// exact.
fn check_positions<P: Page, B: Buffer>(
    op: &'static str,
    part: &KvBatchEntry<'_, P>,
    n_used: usize,
    selected: &B,
) -> Result<()> {
    let n = part.rows.range().end * n_used;
    BackendError::check_at_least(op, "positions of selected tokens", n, selected.n_values())?;
    BackendError::check_at_least(
        op,
        "tokens with an exact position",
        part.rows.end(),
        1 << f32::MANTISSA_DIGITS,
    )
}

/// Checks that sequences of one layer have the blocks of their tokens.
fn check_blocks<P: Page>(op: &'static str, parts: &[KvBatchEntry<'_, P>]) -> Result<()> {
    let mut known = None;
    for KvTensor { spec, .. } in parts.first().into_iter().flat_map(|part| part.layer.tensors()) {
        // Most tensors of a layer are alike in these.
        let f16_tiles = Some((spec.sink_tiles, spec.tail_tiles));
        if f16_tiles == known {
            continue;
        }
        known = f16_tiles;
        for part in parts {
            let blocks = spec.main_end(part.rows.end()).div_ceil(TILE).div_ceil(super::TILES_PER_BLOCK);
            BackendError::check_at_least(op, "blocks", blocks, part.memory.blocks().len())?;
        }
    }
    Ok(())
}

fn expected_value_tensors(layer: &KvLayer) -> usize {
    if layer.is_shared_kv() { 0 } else { layer.k.len() }
}

/// Returns the value dimension of shared-KV tensors, equal for all heads.
fn shared_value_dim(op: &'static str, keys: &[KvTensor]) -> Result<usize> {
    let dim = keys.first().map_or(0, |tensor| tensor.spec.v_head_dim());
    for tensor in keys {
        BackendError::check_equal(op, "value head size", dim, tensor.spec.shared_kv.unwrap_or(0))?;
    }
    Ok(dim)
}

/// Checks the channel scales of sequences of one layer.
fn check_channel_scales<P: Page>(op: &'static str, parts: &[KvBatchEntry<'_, P>]) -> Result<()> {
    let pages = || parts.iter().filter_map(|part| part.channel_scales);
    if pages().next().is_none() {
        return Ok(());
    }
    let n_bytes = ChannelScaleLayout::of(parts[0].layer).n_values() * size_of::<f32>();
    let check =
        |page: &P| BackendError::check_at_least(op, "bytes of the channel scales", n_bytes, page.n_bytes());
    pages().try_for_each(check)
}

fn check_step_tiles<P: Page>(
    op: &'static str,
    part: &KvBatchEntry<'_, P>,
    step_tile_bytes: usize,
) -> Result<()> {
    match part.step_bytes() {
        0 => Ok(()),
        bytes => BackendError::check_at_least(
            op,
            "bytes of the step tiles",
            part.step_offset + bytes,
            step_tile_bytes,
        ),
    }
}

/// Returns the head dimension of one side, equal for all heads.
fn common_head_dim(op: &'static str, what: &'static str, tensors: &[KvTensor]) -> Result<usize> {
    let head_dim = tensors.first().map_or(0, |tensor| tensor.spec.head_dim);
    for tensor in tensors {
        BackendError::check_equal(op, what, head_dim, tensor.spec.head_dim)?;
    }
    Ok(head_dim)
}
