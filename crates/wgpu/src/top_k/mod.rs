//! Top-k selection of logits on the device, so that a few numbers cross to the host instead of a
//! row of the vocabulary's length. One launch and one read serve all rows of a step.

use bytemuck::{Pod, Zeroable};
use kvant_backend::{Candidate, TopK};

use crate::constants::Constants;
use crate::{Gpu, Part, Source, WgpuError};

/// The order of logits.
pub(crate) const RANK: Part = Part { name: "rank.wgsl", text: include_str!("rank.wgsl") };

pub(crate) static SOURCE: Source = Source {
    parts: &[RANK, Part { name: "top_k.wgsl", text: include_str!("top_k.wgsl") }],
    constants: || Constants::default().whole("THREADS", 64).whole("SLICE", SLICE),
};

/// Maximum k; beyond it, copying the row costs less.
pub(crate) const MAX_K: usize = 64;
/// Logits of a workgroup.
const SLICE: usize = 4096;

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Row {
    first: u32,
    k: u32,
    list: u32,
}

/// Selects the most probable tokens of rows of `logits` `[_, n_vocab]`; each k is from 1 to
/// `n_vocab` and [`MAX_K`].
pub(crate) fn top_k(
    gpu: &Gpu,
    logits: &wgpu::Buffer,
    n_vocab: usize,
    rows: &mut [TopK<'_>],
) -> Result<(), WgpuError> {
    if rows.is_empty() {
        return Ok(());
    }
    let n_slices = n_vocab.div_ceil(SLICE);
    let (mut described, mut n_found) = (Vec::with_capacity(rows.len()), 0);
    for TopK { row, k, .. } in rows.iter() {
        described.push(Row { first: (row * n_vocab) as u32, k: *k as u32, list: n_found as u32 });
        n_found += n_slices * k;
    }
    let mut found = vec![[0u32; 2]; n_found];
    let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut found);
    let on_device = gpu.scratch(bytes.len(), "candidates")?;
    let kernel = gpu.kernel(&SOURCE, "top_k")?;
    let (grid, bindings) = ([n_slices as u32, rows.len() as u32, 1], [(1, logits), (2, &on_device)]);
    gpu.launch(&kernel, grid, &(n_vocab as u32), &described, &bindings)?;
    gpu.read(&on_device, 0, bytes)?;
    let mut found = found.into_iter();
    for TopK { k, out, .. } in rows {
        out.clear();
        let of_row = found.by_ref().take(n_slices * *k).filter(|[id, _]| (*id as usize) < n_vocab);
        out.extend(of_row.map(|[id, bits]| Candidate { id, logit: f32::from_bits(bits) }));
        out.sort_unstable_by(Candidate::rank);
        out.truncate(*k);
    }
    Ok(())
}
