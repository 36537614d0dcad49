//! Attention: a kernel for each pair of types, compiled on first use. The host computes the visible
//! tokens of each row and passes them as a list.

mod kernels;
mod list;
mod tune;
mod variants;
mod work;

use bytemuck::{Pod, Zeroable};
use kvant_backend::{AttendParams, KvBatchEntry, Result};

pub(crate) use kernels::STAGES;
#[cfg(test)]
pub(crate) use kernels::variants;
pub use tune::AttendTrial;
pub use variants::{AttendVariant, CodebookLookup, TypeClass};
pub use work::AttendWork;

use crate::gpu::product;
use crate::recording::MAX_WORK;
use crate::slabs::with_slabs;
use crate::{Gpu, WgpuPage, groups};
use kernels::{KernelVariant, SUMS};
use list::List;
use variants::MAX_SLOTS;

const OP: &str = "attend";
/// Tokens of a span (KV split), which one workgroup attends to.
const SPAN: usize = 1024;
/// Maximum bytes of partial results; more rows take several launches.
const MAX_PARTIAL_BYTES: usize = 32 << 20;

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Params {
    heads: u32,
    group: u32,
    k_head_dim: u32,
    v_head_dim: u32,
    slots: u32,
    jobs: u32,
    first_job: u32,
    first_span: u32,
    spans: u32,
    query_values: u32,
    partial_values: u32,
    jobs_at: u32,
    windows_at: u32,
    tensors_at: u32,
    has_sinks: u32,
    scale: f32,
    soft_cap: f32,
    nan_bits: u32,
}

/// The operands of the op. Shapes have been checked.
#[derive(Clone, Copy)]
pub(crate) struct AttendArgs<'a> {
    pub params: &'a AttendParams,
    pub parts: &'a [KvBatchEntry<'a, WgpuPage>],
    pub q: &'a wgpu::Buffer,
    pub sinks: Option<&'a wgpu::Buffer>,
    pub step_tiles: Option<&'a WgpuPage>,
    pub out: &'a wgpu::Buffer,
}

/// Attends with the rows of each sequence, or runs only `stage` of it.
///
/// `variants` are those of the classes, [`TypeClass::ALL`]: the variant of the last class of any KV
/// tensor serves all, as all jobs have the same number of queries.
pub(crate) fn attend(
    gpu: &Gpu,
    slabs: &[wgpu::Buffer],
    variants: [AttendVariant; 3],
    stage: usize,
    AttendArgs { params, parts, q, sinks, step_tiles, out }: AttendArgs<'_>,
) -> Result<()> {
    if params.n_kv_heads == 0 || parts.iter().all(|part| part.rows.n == 0) {
        return Ok(());
    }
    let group = params.n_heads / params.n_kv_heads;
    let max_queries = parts.iter().map(|part| part.rows.n * group).max().unwrap_or(0);
    let tensors = || parts.iter().flat_map(|part| part.layer.tensors());
    let class = tensors().map(|tensor| TypeClass::of(tensor.spec.dtype)).max().unwrap_or(TypeClass::Floats);
    let variant = variants[class as usize];
    let slots = variant.queries.min(max_queries.next_power_of_two()).clamp(4, MAX_SLOTS);
    let list = List::new(parts, group, slots, step_tiles)?;
    let query_values = 1 + tensors().map(|tensor| tensor.spec.stored_dim()).max().unwrap_or(0);
    let partial_values = SUMS + tensors().map(|tensor| tensor.spec.stored_value_dim()).max().unwrap_or(0);
    let kernel_params = Params {
        heads: params.n_heads as u32,
        group: group as u32,
        k_head_dim: params.k_head_dim as u32,
        v_head_dim: params.v_head_dim as u32,
        slots: slots as u32,
        first_span: list.spans.start as u32,
        spans: list.spans.len() as u32,
        query_values: query_values as u32,
        partial_values: partial_values as u32,
        jobs_at: list.jobs_at as u32,
        windows_at: list.windows_at as u32,
        tensors_at: list.tensors_at as u32,
        has_sinks: sinks.is_some().into(),
        scale: params.scale,
        soft_cap: params.soft_cap.unwrap_or(0.0),
        nan_bits: f32::NAN.to_bits(),
        ..Params::zeroed()
    };
    let (words, chunks, n_slabs) = (variant.words, kernels::chunks_at_a_time(gpu, slots), slabs.len());
    let kernels = list.kinds.iter().map(|&kind| {
        let kernel = KernelVariant { kind, words, slots, chunks, n_slabs, stage };
        kernels::variant_kernel(gpu, variant.look_ups, kernel)
    });
    let kernels = kernels.collect::<Result<Vec<_>>>()?;
    let [prepare, combine] = kernels::prologue_epilogue(gpu, slabs.len())?;

    let spans = list.spans.len();
    let queries_of_job = params.n_kv_heads * slots;
    let [prepared_of_job, partials_of_job] =
        [query_values, spans * partial_values].map(|values| queries_of_job * values * size_of::<f32>());
    let max_bytes = MAX_PARTIAL_BYTES.min(gpu.max_binding());
    let work_of_job = [queries_of_job, spans * SPAN, query_values + partial_values];
    let jobs_of_work = usize::try_from(MAX_WORK / product(work_of_job).max(1)).unwrap_or(usize::MAX);
    let jobs_of_memory = max_bytes / partials_of_job.max(prepared_of_job);
    let jobs_per_launch = jobs_of_memory.min(jobs_of_work).clamp(1, list.jobs);
    let prepared = gpu.scratch(jobs_per_launch * prepared_of_job, "rotated queries")?;
    let partials = gpu.scratch(jobs_per_launch * partials_of_job, "partial results of attention")?;
    let (prepared, partials) = (&*prepared, &*partials);
    for first in (0..list.jobs).step_by(jobs_per_launch) {
        let jobs = jobs_per_launch.min(list.jobs - first);
        let kernel_params = Params { jobs: jobs as u32, first_job: first as u32, ..kernel_params };
        let query_grid = groups(jobs * queries_of_job, 1);
        let [queries, tokens, values] = work_of_job;
        gpu.count_work([jobs, queries, tokens, values]);
        let bindings = with_slabs(&[(1, q), (2, prepared)], slabs);
        gpu.launch(&prepare, query_grid, &kernel_params, &list.words, &bindings)?;
        let sinks = sinks.unwrap_or(gpu.unused_buffer());
        for kernel in &kernels {
            let job_grid = groups(jobs * params.n_kv_heads, spans);
            let bindings = with_slabs(&[(1, prepared), (2, sinks), (5, partials)], slabs);
            gpu.launch(kernel, job_grid, &kernel_params, &list.words, &bindings)?;
        }
        let bindings = with_slabs(&[(2, prepared), (4, out), (5, partials)], slabs);
        gpu.launch(&combine, query_grid, &kernel_params, &list.words, &bindings)?;
    }
    Ok(())
}
