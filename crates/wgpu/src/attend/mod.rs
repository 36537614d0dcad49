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
pub(crate) use kernels::{ENDS, variants};
pub use tune::AttendTrial;
pub use variants::{AttendVariant, CodebookLookup, TypeClass};
pub use work::AttendWork;

use crate::{Gpu, WgpuPage, groups};
use kernels::SUMS;
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
    part_values: u32,
    jobs_at: u32,
    windows_at: u32,
    streams_at: u32,
    has_sinks: u32,
    scale: f32,
    soft_cap: f32,
    not_a_number: u32,
}

/// Activations that attention reads and writes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Buffers<'a> {
    pub q: &'a wgpu::Buffer,
    pub sinks: Option<&'a wgpu::Buffer>,
    pub out: &'a wgpu::Buffer,
}

/// Attends with the rows of each sequence, or runs only `stage` of it.
///
/// `ways` are the variants of the classes, [`TypeClass::ALL`]: the variant of the last class of any
/// KV tensor serves all, as all jobs have the same number of queries. The caller has checked the
/// shapes.
pub(crate) fn attend(
    gpu: &Gpu,
    arena: &wgpu::Buffer,
    (ways, stage): ([AttendVariant; 3], usize),
    params: &AttendParams,
    parts: &[KvBatchEntry<'_, WgpuPage>],
    band: Option<&WgpuPage>,
    Buffers { q, sinks, out }: Buffers<'_>,
) -> Result<()> {
    if params.n_kv_heads == 0 || parts.iter().all(|part| part.rows.n == 0) {
        return Ok(());
    }
    let group = params.n_heads / params.n_kv_heads;
    let max_queries = parts.iter().map(|part| part.rows.n * group).max().unwrap_or(0);
    let streams = || parts.iter().flat_map(|part| part.layer.tensors());
    let class = streams().map(|stream| TypeClass::of(stream.spec.dtype)).max().unwrap_or(TypeClass::Floats);
    let way = ways[class as usize];
    let slots = way.queries.min(max_queries.next_power_of_two()).clamp(4, MAX_SLOTS);
    let list = List::new(parts, group, slots, band)?;
    let query_values = 1 + streams().map(|stream| stream.spec.dim()).max().unwrap_or(0);
    let part_values = SUMS + streams().map(|stream| stream.spec.value_dim()).max().unwrap_or(0);
    let numbers = Params {
        heads: params.n_heads as u32,
        group: group as u32,
        k_head_dim: params.k_head_dim as u32,
        v_head_dim: params.v_head_dim as u32,
        slots: slots as u32,
        first_span: list.spans.start as u32,
        spans: list.spans.len() as u32,
        query_values: query_values as u32,
        part_values: part_values as u32,
        jobs_at: list.jobs_at as u32,
        windows_at: list.windows_at as u32,
        streams_at: list.streams_at as u32,
        has_sinks: sinks.is_some().into(),
        scale: params.scale,
        soft_cap: params.soft_cap.unwrap_or(0.0),
        not_a_number: f32::NAN.to_bits(),
        ..Params::zeroed()
    };
    let kernels = list.kinds.iter().map(|kind| kernels::of_kind(gpu, *kind, way, slots, stage));
    let kernels = kernels.collect::<Result<Vec<_>>>()?;
    let [prepare, join] = kernels::ends(gpu)?;

    let spans = list.spans.len();
    let queries_of_job = params.n_kv_heads * slots;
    let [prepared_of_job, left_of_job] =
        [query_values, spans * part_values].map(|values| queries_of_job * values * size_of::<f32>());
    let room = MAX_PARTIAL_BYTES.min(gpu.max_binding());
    let at_once = (room / left_of_job.max(prepared_of_job)).clamp(1, list.jobs);
    let prepared = gpu.scratch(at_once * prepared_of_job, "rotated queries")?;
    let left = gpu.scratch(at_once * left_of_job, "partial results of attention")?;
    let (prepared, left) = (&*prepared, &*left);
    for first in (0..list.jobs).step_by(at_once) {
        let jobs = at_once.min(list.jobs - first);
        let numbers = Params { jobs: jobs as u32, first_job: first as u32, ..numbers };
        let each_query = groups(jobs * queries_of_job, 1);
        gpu.launch(&prepare, each_query, &numbers, &list.words, &[(1, q), (2, prepared), (3, arena)])?;
        let sinks = sinks.unwrap_or(gpu.unused_buffer());
        for kernel in &kernels {
            let each_job = groups(jobs * params.n_kv_heads, spans);
            let bindings = [(1, prepared), (2, sinks), (3, arena), (5, left)];
            gpu.launch(kernel, each_job, &numbers, &list.words, &bindings)?;
        }
        let bindings = [(2, prepared), (3, arena), (4, out), (5, left)];
        gpu.launch(&join, each_query, &numbers, &list.words, &bindings)?;
    }
    Ok(())
}
