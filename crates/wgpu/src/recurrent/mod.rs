//! The ops of recurrent layers: short convolutions, and linear attention with one matrix of state
//! per head.
//!
//! A thread processes a channel of a convolution, a workgroup 16 columns of a head's matrix, in
//! memory of their own; both process the tokens of a step in sequence, so that the state has the
//! same bits for every chunking of the tokens into steps. Each sequence is a launch, or a few.

use bytemuck::{Pod, Zeroable};
use kvant_backend::{ConvForm, KeySharing, ShortConv, StateBatchEntry, StateHeads, StateInputs, StateRule};

use crate::constants::Constants;
use crate::elementwise::MATH;
use crate::kv::word;
use crate::{Gpu, Part, Source, WgpuBuffer, WgpuError, WgpuPage, groups};

pub(crate) static SOURCE: Source = Source {
    parts: &[MATH, Part { name: "recurrent.wgsl", text: include_str!("recurrent.wgsl") }],
    constants: || {
        let constants = Constants::default().whole("MAX_TAPS", ShortConv::MAX_TAPS);
        constants
            .whole("CHANNELS", CHANNELS)
            .whole("COLUMNS", StateHeads::COLUMNS)
            .whole("THREADS", THREADS)
            .whole("MAX_K_DIM", StateHeads::MAX_K_DIM)
            .whole("MAX_VALUES_PER_THREAD", StateHeads::MAX_K_DIM * StateHeads::COLUMNS / THREADS)
    },
};

/// Channels of a workgroup of a convolution.
const CHANNELS: usize = 64;
/// Rows of a launch; more take several. A kernel should end soon, and lavapipe silently ends loops
/// after 65,535 iterations.
const ROWS: usize = 256;

/// Divides the rows of a sequence into launches; yields them with the slab of its state and the
/// word in it.
fn launches(part: &StateBatchEntry<'_, WgpuPage>) -> impl Iterator<Item = ([u32; 2], wgpu::Buffer, u32)> {
    let (rows, slab, state_at) = (part.rows.range(), part.page.slab(), word(part.page.at() + part.offset));
    let launch = move |first| [first, ROWS.min(rows.end - first)].map(|n| n as u32);
    part.rows.range().step_by(ROWS).map(move |first| (launch(first), slab.clone(), state_at))
}

/// Threads for 16 columns of a head: the number that every adapter supports.
const THREADS: usize = 256;

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct ConvParams {
    first_row: u32,
    rows: u32,
    channels: u32,
    taps: u32,
    is_gated: u32,
    state_at: u32,
}

/// Convolves the rows of each sequence of `x` into `y`. The caller has checked the shapes.
pub(crate) fn short_conv(
    gpu: &Gpu,
    parts: &[StateBatchEntry<'_, WgpuPage>],
    conv: ShortConv,
    [x, kernel, y]: [&wgpu::Buffer; 3],
) -> Result<(), WgpuError> {
    for ([first_row, rows], slab, state_at) in parts.iter().flat_map(launches) {
        let params = ConvParams {
            first_row,
            rows,
            channels: conv.channels as u32,
            taps: conv.taps as u32,
            is_gated: (conv.form == ConvForm::Gated).into(),
            state_at,
        };
        let bindings = [(1, x), (2, kernel), (3, &slab), (4, y)];
        let compiled = gpu.kernel(&SOURCE, "short_conv")?;
        gpu.launch::<_, u32>(
            &compiled,
            groups(conv.channels.div_ceil(CHANNELS), 1),
            &params,
            &[],
            &bindings,
        )?;
    }
    Ok(())
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct LinearAttentionParams {
    first_row: u32,
    rows: u32,
    n_k_heads: u32,
    n_v_heads: u32,
    k_dim: u32,
    v_dim: u32,
    is_tiled: u32,
    /// `DELTA`, `KIMI_DELTA` or `SPACE`.
    rule: u32,
    eps: f32,
    /// Of decays by Kimi's rule; 0 if there is none.
    bound: f32,
    state_at: u32,
}

/// Applies linear attention to the rows of each sequence, into `y`. The caller has checked the
/// shapes.
pub(crate) fn linear_attention(
    gpu: &Gpu,
    parts: &[StateBatchEntry<'_, WgpuPage>],
    heads: &StateHeads,
    inputs: StateInputs<&WgpuBuffer>,
    y: &wgpu::Buffer,
) -> Result<(), WgpuError> {
    let StateInputs { qkv, step, bias, decay: decay_rate, rule } = inputs.map(|buffer| &buffer.buffer);
    let (rule, rule_input, eps, bound) = match rule {
        StateRule::GatedDeltaNet { write, eps } => (0, write, eps, 0.0),
        StateRule::KimiDelta { write, eps, bound } => (1, write, eps, bound.unwrap_or(0.0)),
        StateRule::Mamba2 { skip } => (2, skip, 0.0, 0.0),
    };
    for ([first_row, rows], slab, state_at) in parts.iter().flat_map(launches) {
        let params = LinearAttentionParams {
            first_row,
            rows,
            n_k_heads: heads.n_k_heads as u32,
            n_v_heads: heads.n_v_heads as u32,
            k_dim: heads.k_dim as u32,
            v_dim: heads.v_dim as u32,
            is_tiled: (heads.sharing == KeySharing::Tiled).into(),
            rule,
            eps,
            bound,
            state_at,
        };
        let bindings = [(1, qkv), (2, rule_input), (3, &slab), (4, y), (5, step), (6, bias), (7, decay_rate)];
        let grid = [(heads.n_out() / StateHeads::COLUMNS) as u32, 1, 1];
        gpu.launch::<_, u32>(&*gpu.kernel(&SOURCE, "linear_attention")?, grid, &params, &[], &bindings)?;
    }
    Ok(())
}
