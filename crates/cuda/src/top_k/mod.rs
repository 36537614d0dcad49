//! Top-k selection of logits on the device, so that a few numbers cross to the host instead of a
//! row of the vocabulary's length.
//!
//! 150,000 logits are 37 blocks and then one: some 20 µs; copying a row over PCIe and scanning it
//! on the host takes several times as long.

use bytemuck::NoUninit;
use kvant_backend::Candidate;

use crate::constants::Constants;
use crate::half::HALF_HEADER;
use crate::{Context, CudaError, DevicePtr, Header, Launch, Source};

/// The kernel of this op.
pub(crate) static SOURCE: Source = Source {
    name: "top_k.cu",
    text: include_str!("top_k.cu"),
    headers: &[HALF_HEADER, RANK_HEADER],
    constants: || Constants::default().whole("SLICE", SLICE),
    options: &[],
};

/// The order of logits.
pub(crate) const RANK_HEADER: Header = Header { name: "rank.cuh", text: include_str!("rank.cuh") };

/// Maximum k: each round leaves at most a quarter.
pub(crate) const MAX_K: usize = SLICE / 4;
/// Logits that a block sorts.
const SLICE: usize = 4096;
const THREADS: u32 = 512;
/// The upper half of the key of either zero.
const ZERO: u32 = 1 << 31;

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct KernelParams {
    logits: DevicePtr,
    keys: DevicePtr,
    best: DevicePtr,
    len: u32,
    k: u32,
}

/// Writes the `k` most probable of `len` logits (at least one; `k` at most `len` and [`MAX_K`])
/// into `out`, in the order of [`Candidate::rank`].
pub(crate) fn top_k(
    cx: &Context,
    logits: DevicePtr,
    len: usize,
    k: usize,
    out: &mut Vec<Candidate>,
) -> Result<(), CudaError> {
    let kernel = cx.kernel(&SOURCE, "top_k")?;
    let mut params = KernelParams { logits, keys: 0, best: 0, len: len as u32, k: k as u32 };
    // The input of a round stays allocated until the next has been queued.
    let mut keys = None;
    loop {
        let blocks = (params.len as usize).div_ceil(SLICE);
        let best = cx.scratch(blocks * k * size_of::<u64>())?;
        params.best = best.ptr();
        cx.launch(kernel, Launch::linear(blocks as u32, THREADS), &params)?;
        if blocks == 1 {
            return read(cx, best.ptr(), logits, k, out);
        }
        params = KernelParams { logits: 0, keys: best.ptr(), len: (blocks * k) as u32, ..params };
        drop(keys.replace(best));
    }
}

/// Converts keys back to tokens.
fn read(
    cx: &Context,
    best: DevicePtr,
    logits: DevicePtr,
    k: usize,
    out: &mut Vec<Candidate>,
) -> Result<(), CudaError> {
    let mut keys = [0u64; MAX_K];
    cx.gpu().read(best, bytemuck::cast_slice_mut(&mut keys[..k]))?;
    out.clear();
    for key in &keys[..k] {
        let (order, id) = ((key >> 32) as u32, !(*key as u32));
        let logit = match order {
            // The two zeros share a key, and so do NaN and positive infinity.
            u32::MAX | ZERO => {
                let mut logit = 0.0f32;
                cx.gpu().read(logits + 4 * u64::from(id), bytemuck::bytes_of_mut(&mut logit))?;
                logit
            }
            order if order >> 31 == 1 => f32::from_bits(order & 0x7fff_ffff),
            order => f32::from_bits(!order),
        };
        out.push(Candidate { id, logit });
    }
    Ok(())
}
