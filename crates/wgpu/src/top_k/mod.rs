//! Top-k selection of logits on the device, so that a few numbers cross to the host instead of a
//! row of the vocabulary's length.

use bytemuck::{Pod, Zeroable};
use kvant_backend::Candidate;

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
struct Params {
    first: u32,
    n: u32,
    k: u32,
}

/// Writes the `k` most probable, at least one and at most [`MAX_K`], of `n` logits from value
/// `first` on, into `out`, in the order of [`Candidate::rank`].
pub(crate) fn top_k(
    gpu: &Gpu,
    logits: &wgpu::Buffer,
    [first, n, k]: [usize; 3],
    out: &mut Vec<Candidate>,
) -> Result<(), WgpuError> {
    let n_slices = n.div_ceil(SLICE);
    let mut found = vec![[0u32; 2]; n_slices * k];
    let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut found);
    let on_device = gpu.scratch(bytes.len(), "candidates")?;
    let kernel = gpu.kernel(&SOURCE, "top_k")?;
    let params = Params { first: first as u32, n: n as u32, k: k as u32 };
    let bindings = [(1, logits), (2, &on_device)];
    gpu.launch::<_, u32>(&kernel, [n_slices as u32, 1, 1], &params, &[], &bindings)?;
    gpu.read(&on_device, 0, bytes)?;
    out.clear();
    let is_there = |[id, _]: &&[u32; 2]| (*id as usize) < n;
    out.extend(
        found.iter().filter(is_there).map(|&[id, bits]| Candidate { id, logit: f32::from_bits(bits) }),
    );
    out.sort_unstable_by(Candidate::rank);
    out.truncate(k);
    Ok(())
}
