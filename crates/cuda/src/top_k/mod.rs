//! Top-k selection of logits on the device, so that a few numbers cross to the host instead of
//! rows of the vocabulary's length.
//!
//! One launch and one read serve all rows of a step. The kernel loads each logit once, and memory
//! bounds it: 64 rows of 128,256 logits are 33 MB, 11 µs at 3 TB/s. Their instructions, 25 a logit
//! and 7.5 of these in the loop over all logits, take half as long.

use bytemuck::{NoUninit, Pod, Zeroable};
use kvant_backend::{Candidate, TopK};

use crate::constants::Constants;
use crate::context::MAX_COUNTERS;
use crate::half::HALF_HEADER;
use crate::{Context, CudaError, DevicePtr, Header, Launch, Source};

/// The kernel of this op.
pub(crate) static SOURCE: Source = Source {
    name: "top_k.cu",
    text: include_str!("top_k.cu"),
    headers: &[HALF_HEADER, RANK_HEADER],
    constants: || {
        let constants = Constants::default().whole("SLICE", SLICE).whole("THREADS", THREADS as usize);
        constants.whole("MAX_K", MAX_K).whole("MAX_ROWS", MAX_ROWS)
    },
    options: &[],
};

/// The order of logits.
pub(crate) const RANK_HEADER: Header = Header { name: "rank.cuh", text: include_str!("rank.cuh") };

/// Maximum k; beyond it, reading the row costs less.
pub(crate) const MAX_K: usize = 1024;
/// Logits that a block selects from.
const SLICE: usize = 8192;
const THREADS: u32 = 256;
/// Rows of a launch, as many as its parameters (4 KiB) describe with room to spare.
const MAX_ROWS: usize = 256;
// Only the last slice of a row may have fewer than k logits.
const _: () = assert!(MAX_K <= SLICE && MAX_ROWS <= MAX_COUNTERS);

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Row {
    row: u32,
    k: u32,
    first: u32,
}

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct KernelParams {
    logits: DevicePtr,
    keys: DevicePtr,
    candidates: DevicePtr,
    counters: DevicePtr,
    n_vocab: u32,
    n_slices: u32,
    rows: [Row; MAX_ROWS],
}

/// Selects the most probable tokens of rows of `logits` `[_, n_vocab]`; each k is from 1 to
/// `n_vocab` and [`MAX_K`].
pub(crate) fn top_k(
    cx: &Context,
    logits: DevicePtr,
    n_vocab: usize,
    rows: &mut [TopK<'_>],
) -> Result<(), CudaError> {
    if rows.is_empty() {
        return Ok(());
    }
    let kernel = cx.kernel(&SOURCE, "top_k")?;
    let (n, n_slices) = (rows.iter().map(|row| row.k).sum(), n_vocab.div_ceil(SLICE));
    let keys = cx.scratch(n * n_slices * size_of::<u64>())?;
    let mut candidates = vec![[0u32; 2]; n];
    let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut candidates);
    let on_device = cx.scratch(bytes.len())?;
    let mut params = KernelParams {
        logits,
        keys: keys.ptr(),
        candidates: on_device.ptr(),
        counters: cx.counters()?,
        n_vocab: n_vocab as u32,
        n_slices: n_slices as u32,
        rows: [Row::zeroed(); MAX_ROWS],
    };
    let mut first = 0;
    for rows in rows.chunks(MAX_ROWS) {
        for (of, row) in params.rows.iter_mut().zip(rows) {
            *of = Row { row: row.row as u32, k: row.k as u32, first };
            first += of.k;
        }
        let grid = [n_slices as u32, rows.len() as u32, 1];
        cx.launch(kernel, Launch { grid, block: [THREADS, 1, 1], shared_bytes: 0 }, &params)?;
    }
    cx.gpu().read(on_device.ptr(), bytes)?;
    let mut candidates = candidates.iter().map(|&[id, bits]| Candidate { id, logit: f32::from_bits(bits) });
    for TopK { k, out, .. } in rows {
        out.clear();
        out.extend(candidates.by_ref().take(*k));
    }
    Ok(())
}
