//! The ops of recurrent layers: short convolutions, and linear attention with one matrix of state
//! per head.
//!
//! A thread processes a channel of a convolution, a block of threads 16 columns of a head's matrix
//! in registers; both process the tokens of a step in sequence, so that the state has the same bits
//! for every chunking of the tokens into steps. Each sequence is a launch.

use bytemuck::NoUninit;
use kvant_backend::{ConvForm, KeySharing, ShortConv, StateHeads, StateInputs, StateRule, TokenSpan};

use crate::constants::Constants;
use crate::half::HALF_HEADER;
use crate::module::Build;
use crate::norm::SUM_HEADER;
use crate::{Context, CudaError, Define, DevicePtr, Launch, Source};

/// The kernels of both ops.
static SOURCE: Source = Source {
    name: "recurrent.cu",
    text: include_str!("recurrent.cu"),
    headers: &[HALF_HEADER, SUM_HEADER],
    constants: || {
        let constants = Constants::default().whole("MAX_TAPS", ShortConv::MAX_TAPS);
        constants.whole("COLUMNS", StateHeads::COLUMNS).whole("THREADS", THREADS as usize)
    },
    options: &[],
};

/// Threads of a block: channels of a convolution, or eight for each column of a head.
const THREADS: u32 = 8 * StateHeads::COLUMNS as u32;

/// Returns the macros of this key size.
fn defines(k_dim: usize) -> [Define; 1] {
    [("K_DIM", k_dim as u32)]
}

/// Returns the variants for the key size in use; others are compiled on first use. (Convolutions
/// have no key size.)
pub(crate) fn builds() -> impl Iterator<Item = Build> {
    [CONV_DIM, 128].map(|dim| Build { source: &SOURCE, defines: defines(dim).to_vec() }).into_iter()
}

/// The key size that convolutions are compiled with.
const CONV_DIM: usize = StateHeads::COLUMNS;

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct ConvParams {
    x: DevicePtr,
    kernel: DevicePtr,
    state: DevicePtr,
    y: DevicePtr,
    first_row: u32,
    rows: u32,
    channels: u32,
    taps: u32,
    is_gated: u32,
    unused: u32,
}

/// Convolves some rows of `x` into `y`, from the state at `state`. The caller has checked the
/// shapes.
pub(crate) fn short_conv(
    cx: &Context,
    conv: ShortConv,
    rows: TokenSpan,
    state: DevicePtr,
    [x, kernel, y]: [DevicePtr; 3],
) -> Result<(), CudaError> {
    if rows.n == 0 || conv.channels == 0 {
        return Ok(());
    }
    let [first_row, n, channels, taps] = [rows.first, rows.n, conv.channels, conv.taps].map(|n| n as u32);
    let is_gated = (conv.form == ConvForm::Gated).into();
    let params = ConvParams { x, kernel, state, y, first_row, rows: n, channels, taps, is_gated, unused: 0 };
    let kernel = cx.kernel_with(&SOURCE, &defines(CONV_DIM), "short_conv")?;
    cx.launch(kernel, Launch::linear(channels.div_ceil(THREADS), THREADS), &params)
}

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct LinearAttentionParams {
    qkv: DevicePtr,
    step: DevicePtr,
    bias: DevicePtr,
    rate: DevicePtr,
    /// `write`, or `skip`.
    of_rule: DevicePtr,
    state: DevicePtr,
    y: DevicePtr,
    first_row: u32,
    rows: u32,
    n_k_heads: u32,
    n_v_heads: u32,
    v_dim: u32,
    is_tiled: u32,
    eps: f32,
    /// Of decays by Kimi's rule; 0 if there is none.
    bound: f32,
}

/// Applies linear attention to some tokens, into `y`, from the state at `state`. The caller has
/// checked the shapes.
pub(crate) fn linear_attention(
    cx: &Context,
    heads: &StateHeads,
    rows: TokenSpan,
    state: DevicePtr,
    inputs: StateInputs<DevicePtr>,
    y: DevicePtr,
) -> Result<(), CudaError> {
    if rows.n == 0 {
        return Ok(());
    }
    let StateInputs { qkv, step, bias, decay: rate, rule } = inputs;
    let (entry, of_rule, eps, bound) = match rule {
        StateRule::GatedDeltaNet { write, eps } => ("gated_delta_net", write, eps, 0.0),
        StateRule::KimiDelta { write, eps, bound } => ("kimi_delta", write, eps, bound.unwrap_or(0.0)),
        StateRule::Mamba2 { skip } => ("mamba2", skip, 0.0, 0.0),
    };
    let params = LinearAttentionParams {
        qkv,
        step,
        bias,
        rate,
        of_rule,
        state,
        y,
        first_row: rows.first as u32,
        rows: rows.n as u32,
        n_k_heads: heads.n_k_heads as u32,
        n_v_heads: heads.n_v_heads as u32,
        v_dim: heads.v_dim as u32,
        is_tiled: (heads.sharing == KeySharing::Tiled).into(),
        eps,
        bound,
    };
    let blocks = heads.n_out() / StateHeads::COLUMNS;
    let kernel = cx.kernel_with(&SOURCE, &defines(heads.k_dim), entry)?;
    cx.launch(kernel, Launch::linear(blocks as u32, THREADS), &params)
}
