//! Appends keys and values to the KV cache: pads, rotates, and encodes rows into the tiles that the
//! plan of each KV tensor (K or V of one head) names.
//!
//! A new row is padded to the width of its KV tensor and, where that is rotated, rotated, whichever
//! region it is written to: sink, tail and step tiles hold rotated rows in f16, so that one query
//! serves all regions. A KV tensor with a tail encodes every row from its f16 values, whether it
//! passed through the tail or not: the code of a token does not depend on how prefill was batched.
//! Only rows encoded into a coded main tile have the centre of their block subtracted and are
//! scaled by the tensor's `alpha`.

use kvant_backend::KvBatchEntry;

use crate::host::page::CpuPage;
use crate::ops::channel_scales::HeadScales;
use crate::ops::context::KernelContext;
use crate::simd::vec16::with_lanes;

mod encode;
mod scalar;
mod slices;
mod source;
mod target;
mod trellis;

use source::Source;
use target::Targets;

/// Scratch memory, reused between calls so that decode does not allocate.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    targets: Targets,
}

/// See [`kvant_backend::Backend::kv_append`].
pub(crate) fn kv_append(
    KernelContext { isa, pool, scratch }: KernelContext<'_, Scratch>,
    parts: &mut [KvBatchEntry<'_, CpuPage>],
    [k, v]: [&[f32]; 2],
    step_tiles: Option<&mut CpuPage>,
) {
    scratch.targets.fill(parts, step_tiles);
    let (targets, parts) = (&scratch.targets, &*parts);
    // All sequences have the heads of the model; they differ in tests alone.
    let max_heads = parts.iter().map(|part| part.layer.k.len()).max().unwrap_or(0);
    pool.for_each(2 * max_heads * parts.len(), &|item| {
        let (index, head, is_key) = (item / (2 * max_heads), item % (2 * max_heads) / 2, item % 2 == 0);
        let part = &parts[index];
        let (tensors, x) = if is_key { (&part.layer.k, k) } else { (&part.layer.v, v) };
        let Some(tensor) = tensors.get(head) else { return };
        // SAFETY: `parts` and the step tiles are borrowed until the end of this function, and each
        // item is another (sequence, side, head), so that no other thread has this KV tensor.
        let target = unsafe { targets.of(index, part, tensor) };
        let (rows, head_dim) = (part.rows, tensor.spec.head_dim);
        let width = tensors.len() * head_dim;
        let row = |row| &x[(rows.first + row) * width + head * head_dim..][..head_dim];
        let balance = HeadScales::of(part, head).and_then(|of| if is_key { Some(of.key) } else { of.value });
        let source = Source { row, balance };
        with_lanes!(isa,
            lanes => slices::append(lanes, tensor, rows, target, source),
            _ => scalar::append(tensor, rows, target, source)
        );
    });
}
