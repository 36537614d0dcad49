//! Appends keys and values to the KV cache.
//!
//! One launch applies RoPE to keys and queries, channel scales, zero padding and the Hadamard
//! rotation, and encodes into the tiles that [`KvTensorSpec::writes`] lists, for up to
//! [`MAX_SEQUENCES`] sequences and [`MAX_HEADS`] KV heads.
//!
//! The host plans the writes and passes them as a list. The list of a decode step travels in the
//! kernel parameters, so that a recorded step copies nothing; the list of a prefill is copied to
//! the device first.
//!
//! Where a block begins, a preceding launch sets its centre, for two reasons: every tile of the
//! block is encoded relative to it, and the rows that it averages may be overwritten. A decode step
//! needs this launch once in 128 tokens, when a new block changes the recorded step anyway.
//!
//! Trellis codes (turbo2t, turbo3t) are found by a Viterbi search through the values of a slice in
//! sequence; its states are the lanes of the warp that holds the row.
//!
//! [`KvTensorSpec::writes`]: kvant_backend::KvTensorSpec::writes

mod plan;

use std::ops::Range;
use std::sync::{Arc, LazyLock};

use bytemuck::{Pod, Zeroable};
use kvant_backend::{
    BackendError, ChannelScaleLayout, KvBatchEntry, KvLayer, KvTensor, KvTensorSpec, Result,
};
use kvant_codec::tile::TILE;
use kvant_codec::{Codebook, Rotation, Side, Trellis, block32, step, trellis, turbo};

use self::plan::WritePlan;
use crate::constants::Constants;
use crate::kv::{
    self, BOOKS, MAX_HEADS, MAX_PARAMS, MAX_SEQUENCES, MemoryParams, Offsets, SpecParams, is_same, small,
};
use crate::memory::Block;
use crate::rope::{HEADS_PER_BLOCK, HeadRope, ROPE_HEADER};
use crate::rotate::words;
use crate::{Context, CudaPage, DevicePtr, Header, Launch, Source};

const HEADERS: [Header; 5] = {
    let [half, rotate, tile] = kv::HEADERS;
    [ROPE_HEADER, half, rotate, tile, Header { name: "encode.cuh", text: include_str!("encode.cuh") }]
};

/// The kernels of this op.
pub(crate) static SOURCE: Source =
    Source { name: "append.cu", text: include_str!("append.cu"), headers: &HEADERS, constants, options: &[] };

const OP: &str = "kv_append";
/// Maximum number of levels of a codebook.
const MAX_LEVELS: usize = 16;
/// Entries of the write list that travel in the kernel parameters: enough for one token of each of
/// sixteen sequences.
const MAX_INLINE_ENTRIES: usize = 64;

/// Maximum number of rows of sequences that share a launch in any number. The grid has as many
/// chains for each sequence as the longest list of writes.
const FEW_ROWS: usize = 8;

/// `AppendTensor` of `append.cu`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct TensorParams {
    at: Offsets,
    spec: SpecParams,
    alpha: f32,
    plan: u16,
    rotates: u8,
    as_keys: u8,
}

/// `AppendSequence` of `append.cu`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct SequenceParams {
    memory: MemoryParams,
    balance: DevicePtr,
    first_row: u32,
    plans: u32,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct AppendParams {
    tensors: [TensorParams; 2 * MAX_HEADS],
    sequences: [SequenceParams; MAX_SEQUENCES],
    inline_entries: [plan::Entry; MAX_INLINE_ENTRIES],
    entries: DevicePtr,
    listed: DevicePtr,
    k_rope: HeadRope,
    q_rope: HeadRope,
    q: DevicePtr,
    k: DevicePtr,
    v: DevicePtr,
    rows: u32,
    n_query_heads: u32,
    n_sequences: u32,
    n_heads: u32,
    first_head: u32,
    n_kv_heads: u32,
    head_dims: [u32; 2],
    balance_at: [u32; 3],
    first_centre: u32,
    before: [u32; 4],
    after: [u32; 4],
    levels: [[f32; MAX_LEVELS]; BOOKS.len()],
    mids: [[f32; MAX_LEVELS]; BOOKS.len()],
    unused: [u32; 2],
}

const _: () = assert!(size_of::<AppendParams>() <= MAX_PARAMS);

fn constants() -> Constants {
    with_trellis(with_steps(kv::constants()))
        .whole("WARPS", HEADS_PER_BLOCK as usize)
        .whole("MAX_INLINE_ENTRIES", MAX_INLINE_ENTRIES)
        .whole("N_BOOKS", BOOKS.len())
        .whole("MAX_LEVELS", MAX_LEVELS)
        .whole("MAX_KINDS", plan::MAX_PLAN_KEYS)
        .whole("Q8_0_ZERO", block32::Q8_0_ZERO.into())
        .whole("Q4_0_ZERO", block32::Q4_0_ZERO.into())
        .float("Q8_0_MAX_SCALE", block32::Q8_0_MAX_SCALE)
        .double("SQRT_128", 128f64.sqrt())
        .double("SQRT_64", 64f64.sqrt())
        .double("SQRT_32", 32f64.sqrt())
}

/// Adds the thresholds and levels of the search for the step size of a slice, for the upper half of
/// each of [`BOOKS`].
fn with_steps(constants: Constants) -> Constants {
    let padded = |values: Vec<i32>| values.into_iter().chain([0; MAX_LEVELS / 2]).take(MAX_LEVELS / 2);
    let upper = |book: &'static Codebook| book.levels().len() / 2;
    let thresholds = BOOKS.iter().flat_map(|book| {
        (0..step::STEPS).flat_map(move |k| {
            padded(book.mids()[upper(book)..].iter().map(|&mid| step::threshold(mid, k)).collect())
        })
    });
    let levels = BOOKS.iter().flat_map(|book| {
        padded(book.centroids()[upper(book)..].iter().map(|&level| step::level(level)).collect())
    });
    constants
        .whole("STEPS", step::STEPS)
        .whole("FIRST_STEP", step::FIRST_NUMERATOR)
        .whole("STEP_UNIT", step::STEP_DENOMINATOR)
        .float("STEP_ONE", step::MAGNITUDE_SCALE)
        .list("STEP_THRESHOLDS", thresholds)
        .list("STEP_LEVELS", levels)
}

/// Adds the constants of the turbo2t and turbo3t encoder.
fn with_trellis(constants: Constants) -> Constants {
    let tables = [Trellis::TURBO2T, Trellis::TURBO3T].map(|trellis| trellis.levels().map(i32::from));
    constants
        .whole("TRELLIS_WINDOW", trellis::WINDOW)
        .whole("TRELLIS_WINDOWS", trellis::LEVELS)
        .whole("TRELLIS_STRIDE", trellis::STRIDE)
        .whole("TRELLIS_LEAD", trellis::SEAM_OVERLAP)
        .whole("TRELLIS_FREE", trellis::COST_TAG_MASK as usize)
        .whole("TRELLIS_CLOSED", trellis::FORBIDDEN_COST as usize)
        .whole("TRELLIS_UNIT", trellis::BRANCH_FACTORS[0] as usize)
        .whole("TRELLIS_SQUARE_UNIT", trellis::BRANCH_FACTORS[1] as usize)
        .float("TRELLIS_PER_UNIT", Trellis::PER_UNIT)
        .float("TRELLIS_MAX", trellis::MAX_VALUE)
        .double("TRELLIS_NORM", Trellis::norm(1))
        .list("TRELLIS_TABLES", tables.into_iter().flatten())
}

/// New keys and values of the whole step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NewRows {
    /// `[rows, n_kv_heads * k_head_dim]`.
    pub k: DevicePtr,
    /// `[rows, n_kv_heads * v_head_dim]`.
    pub v: DevicePtr,
    /// First step tile; arbitrary when there are none.
    pub step_tiles: DevicePtr,
}

/// RoPE of the keys on their way into the cache, and of the queries in place.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RopeArgs {
    pub k: HeadRope,
    pub q: HeadRope,
    /// `[rows, n_query_heads * k_head_dim]`.
    pub queries: DevicePtr,
    pub n_query_heads: usize,
    /// Tokens of the step.
    pub rows: usize,
}

/// Appends the new tokens of each sequence to every KV tensor of its layer.
///
/// The caller has reserved the memory and checked the shapes.
pub(crate) fn append(
    cx: &Context,
    sequences: &[KvBatchEntry<'_, CudaPage>],
    rows: NewRows,
    ropes: Option<RopeArgs>,
) -> Result<()> {
    // RoPE of the queries runs once, in the launch of the first sequences and heads.
    let mut queries = ropes.filter(|ropes| ropes.q.is_on());
    // Sequences of one layer share launches.
    for alike in sequences.chunk_by(|a, b| is_same(a.layer, b.layer)) {
        let (mut few, mut many) = (Vec::with_capacity(alike.len()), Vec::new());
        for sequence in alike {
            if sequence.rows.n <= FEW_ROWS { few.push(sequence) } else { many.push(sequence) }
        }
        let few = (!few.is_empty()).then_some(&few[..]);
        for sequences in few.into_iter().chain(many.chunks(MAX_SEQUENCES)) {
            let n_kv_heads = sequences[0].layer.k.len();
            BackendError::check_at_least(OP, "key heads", 1, n_kv_heads)?;
            for first in (0..n_kv_heads).step_by(MAX_HEADS) {
                let heads = first..n_kv_heads.min(first + MAX_HEADS);
                launch(cx, sequences, heads, rows, ropes.map(|ropes| ropes.k), queries.take())?;
            }
        }
    }
    Ok(())
}

/// Returns the KV tensors of some heads: keys, then values where they are stored separately.
fn tensors_of<'a>(layer: &'a KvLayer, heads: &Range<usize>) -> impl Iterator<Item = &'a KvTensor> + Clone {
    let values = layer.v.get(heads.clone()).unwrap_or_default();
    layer.k[heads.clone()].iter().chain(values)
}

/// The writes of a launch.
pub(crate) struct Writes {
    plan: WritePlan,
    sequences: Vec<SequenceParams>,
    /// The sequences on the device, if they are too many to travel with a launch.
    sequences_on_device: Option<Block>,
    /// The entries of the plan on the device, likewise.
    entries_on_device: Option<Block>,
}

impl Writes {
    /// Returns the writes of some heads: of an earlier layer, if these depend on nothing else.
    fn of(
        cx: &Context,
        sequences: &[&KvBatchEntry<'_, CudaPage>],
        heads: &Range<usize>,
        step_tiles: DevicePtr,
    ) -> Result<Arc<Self>> {
        let mut of_layer = vec![step_tiles];
        let kind = |tensor: &KvTensor| (plan::write_kind(&tensor.spec), kv::has_centres(&tensor.spec));
        let mut last = None;
        for tensor in tensors_of(sequences[0].layer, heads) {
            if last != Some(kind(tensor)) {
                let ([sink_tiles, tail_tiles], has_centres) = kind(tensor);
                of_layer.extend([sink_tiles as u64, tail_tiles as u64, has_centres.into()]);
                last = Some(kind(tensor));
            }
        }
        let make = || Self::new(cx, sequences, heads, step_tiles);
        cx.append_plans().get(&of_layer, sequences.iter().copied(), make)
    }

    fn new(
        cx: &Context,
        sequences: &[&KvBatchEntry<'_, CudaPage>],
        heads: &Range<usize>,
        step_tiles: DevicePtr,
    ) -> Result<Self> {
        let plan = WritePlan::new(sequences, heads)?;
        let params = |(index, sequence): (usize, &&KvBatchEntry<'_, CudaPage>)| -> Result<_> {
            Ok(SequenceParams {
                memory: MemoryParams::new(cx, sequence, step_tiles)?,
                balance: kv::balance(sequence),
                first_row: small(OP, "rows", sequence.rows.range().end)? - sequence.rows.n as u32,
                plans: plan.plans_of_sequence(index),
            })
        };
        let sequences = sequences.iter().enumerate().map(params).collect::<Result<Vec<_>>>()?;
        let listed = |is_long: bool, bytes: &[u8]| if is_long { cx.list(bytes).map(Some) } else { Ok(None) };
        Ok(Self {
            sequences_on_device: listed(sequences.len() > MAX_SEQUENCES, bytemuck::cast_slice(&sequences))?,
            entries_on_device: listed(
                plan.entries().len() > MAX_INLINE_ENTRIES,
                bytemuck::cast_slice(plan.entries()),
            )?,
            plan,
            sequences,
        })
    }
}

/// The parameters that all launches have in common: masks and codebooks.
static TABLES: LazyLock<AppendParams> = LazyLock::new(|| {
    let mut params = AppendParams::zeroed();
    let masks = Rotation::kv(turbo::LEN);
    (params.before, params.after) = (words(masks.before()), words(masks.after()));
    for (book, (levels, mids)) in BOOKS.iter().zip(params.levels.iter_mut().zip(&mut params.mids)) {
        levels[..book.centroids().len()].copy_from_slice(book.centroids());
        mids[..book.mids().len()].copy_from_slice(book.mids());
    }
    params
});

fn launch(
    cx: &Context,
    sequences: &[&KvBatchEntry<'_, CudaPage>],
    heads: Range<usize>,
    rows: NewRows,
    k_rope: Option<HeadRope>,
    queries: Option<RopeArgs>,
) -> Result<()> {
    let layer = sequences[0].layer;
    let writes = Writes::of(cx, sequences, &heads, rows.step_tiles)?;
    let list = &writes.plan;
    let mut params = *TABLES;
    let tensors = tensors_of(layer, &heads);
    let n_tensors = tensors.clone().count();
    let mut last: Option<(&KvTensorSpec, TensorParams)> = None;
    for (to, tensor) in params.tensors.iter_mut().zip(tensors.clone()) {
        let spec = &tensor.spec;
        // Most tensors are stored as the one before.
        let of_spec = match last.filter(|(known, _)| *known == spec) {
            Some((_, params)) => params,
            None => TensorParams {
                at: Offsets::zeroed(),
                spec: SpecParams::new(OP, spec)?,
                alpha: spec.alpha,
                plan: list.plan_of(spec),
                rotates: spec.rotates.into(),
                as_keys: (spec.side == Side::K).into(),
            },
        };
        *to = TensorParams { at: Offsets::new(OP, tensor)?, ..of_spec };
        last = Some((spec, of_spec));
    }
    match &writes.sequences_on_device {
        Some(on_device) => params.listed = on_device.ptr(),
        None => params.sequences[..writes.sequences.len()].copy_from_slice(&writes.sequences),
    }
    match &writes.entries_on_device {
        Some(on_device) => params.entries = on_device.ptr(),
        None => params.inline_entries[..list.entries().len()].copy_from_slice(list.entries()),
    }
    (params.k, params.v) = (rows.k, rows.v);
    params.n_heads = heads.len() as u32;
    params.first_head = heads.start as u32;
    params.n_kv_heads = small(OP, "heads", layer.k.len())?;
    let head_dim = |tensors: &[KvTensor]| tensors.get(heads.start).map_or(0, |s| s.spec.head_dim as u32);
    params.head_dims = [head_dim(&layer.k), head_dim(&layer.v)];
    let balance = ChannelScaleLayout::of(layer);
    for (to, from) in params.balance_at.iter_mut().zip([balance.key, balance.value, balance.value_shift]) {
        *to = kv::begin(OP, &from)?;
    }
    params.k_rope = k_rope.unwrap_or(HeadRope::zeroed());
    let (first_centre, n_centres) = list.centres();
    if n_centres > 0 {
        params.first_centre = small(OP, "centres", first_centre)?;
        let grid = [small(OP, "centres", n_centres)?, n_tensors as u32, 1];
        let launch = Launch { grid, block: [32 * HEADS_PER_BLOCK, 1, 1], shared_bytes: 0 };
        cx.launch(cx.kernel(&SOURCE, "centres")?, launch, &params)?;
    }
    // The sequences, each with a block per tensor and chain, then the query heads in as many.
    let per_sequence = n_tensors * list.max_chains().max(1) as usize;
    let mut n_groups = if list.max_chains() > 0 { sequences.len() } else { 0 };
    params.n_sequences = n_groups as u32;
    if let Some(ropes) = queries {
        (params.q_rope, params.q) = (ropes.q, ropes.queries);
        (params.rows, params.n_query_heads) = (ropes.rows as u32, ropes.n_query_heads as u32);
        let n_heads = small(OP, "query heads", ropes.rows * ropes.n_query_heads)?;
        n_groups += (n_heads.div_ceil(HEADS_PER_BLOCK) as usize).div_ceil(per_sequence);
    }
    if n_groups == 0 {
        return Ok(());
    }
    let dim = tensors.map(|tensor| tensor.spec.stored_dim()).max().unwrap_or(0);
    // At most codes `[16][dim]` and scales `[16][dim / 32]`.
    let shared_bytes = (TILE * dim + TILE * dim / block32::LEN * size_of::<u16>()) as u32;
    let grid = [small(OP, "blocks", n_groups)?, n_tensors as u32, list.max_chains().max(1)];
    let launch = Launch { grid, block: [32 * HEADS_PER_BLOCK, 1, 1], shared_bytes };
    Ok(cx.launch(cx.kernel(&SOURCE, "append")?, launch, &params)?)
}

#[cfg(test)]
mod tests;
