//! Activations: the input rows of matrix products, and their f16 and 8-bit forms, each computed
//! once.

use bytemuck::NoUninit;
use kvant_codec::Rotation;

use crate::constants::Constants;
use crate::half::HALF_HEADER;
use crate::memory::Block;
use crate::norm::{self, NormKind, NormParts, SUM_HEADER};
use crate::{Context, CudaError, DevicePtr, Launch, Source, rotate};

pub(super) static QUANTIZE: Source = Source {
    name: "quantize.cu",
    text: include_str!("quantize.cu"),
    headers: &[HALF_HEADER, SUM_HEADER],
    constants: || rotate::constants(Constants::default()).whole("THREADS", THREADS as usize),
    options: &[],
};

/// Threads of a block, which processes a row, or a range of one.
const THREADS: u32 = 256;
/// Groups of each warp of a block that processes a range.
const GROUPS_OF_WARP: u32 = 2;

/// Values of a group: those that share a scale.
const GROUP: usize = 32;
/// Values of a step of the GEMM.
pub(super) const STEP: usize = 64;

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct QuantizeParams {
    x: DevicePtr,
    weight: DevicePtr,
    codes: DevicePtr,
    scales: DevicePtr,
    sums: DevicePtr,
    n_in: u32,
    eps: f32,
    rotates: u32,
    signs: u32,
}

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct HalvesParams {
    x: DevicePtr,
    weight: DevicePtr,
    halves: DevicePtr,
    factors: DevicePtr,
    n_in: u32,
    pitch: u32,
    eps: f32,
    unused: u32,
}

/// Rows of inputs on the device, `[rows, n_in]`, normalized first where `norm` is given.
pub(crate) struct Operand {
    pub x: DevicePtr,
    pub norm: Option<NormParts>,
    pub rows: usize,
    pub n_in: usize,
    normalized: Option<Block>,
    halves: Option<Halves>,
    quantized: Option<Quantized>,
    rotated: Option<Quantized>,
}

/// Inputs in 8 bits, in groups of 32: codes `[rows, n_in]`, scales and sums `[rows, n_in / 32]`.
pub(super) struct Quantized {
    _memory: Block,
    pub codes: DevicePtr,
    pub scales: DevicePtr,
    pub sums: DevicePtr,
}

/// Inputs in f16, rows padded with zeros to whole steps of 64, each times a power of two that
/// `factors` `[rows]` undo.
pub(super) struct Halves {
    _memory: Block,
    pub halves: DevicePtr,
    pub factors: DevicePtr,
}

impl Operand {
    /// The operand `x` `[rows, n_in]`.
    pub fn new(x: DevicePtr, [rows, n_in]: [usize; 2], norm: Option<NormParts>) -> Self {
        Self { x, norm, rows, n_in, normalized: None, halves: None, quantized: None, rotated: None }
    }

    /// Returns the inputs in f32, `[rows, n_in]`.
    pub(super) fn plain(&mut self, cx: &Context) -> Result<DevicePtr, CudaError> {
        let Some(norm) = self.norm else { return Ok(self.x) };
        if self.normalized.is_none() {
            let block = cx.scratch(self.rows * self.n_in * size_of::<f32>())?;
            norm::norm(cx, NormKind::Rms, self.x, norm, [self.rows, self.n_in], block.ptr())?;
            self.normalized = Some(block);
        }
        Ok(self.normalized.as_ref().map_or(self.x, Block::ptr))
    }

    /// Returns the inputs in f16.
    pub(super) fn halves(&mut self, cx: &Context) -> Result<&Halves, CudaError> {
        if self.halves.is_none() {
            self.halves = Some(to_halves(cx, self.x, [self.rows, self.n_in], self.norm)?);
        }
        Ok(self.halves.as_ref().expect("made above"))
    }

    /// Returns the inputs in 8 bits, each group rotated first where `rotates`. `n_in` is a multiple
    /// of 32.
    pub(super) fn quantized(&mut self, cx: &Context, rotates: bool) -> Result<&Quantized, CudaError> {
        let slot = if rotates { &mut self.rotated } else { &mut self.quantized };
        if slot.is_none() {
            *slot = Some(quantize(cx, self.x, [self.rows, self.n_in], self.norm, rotates)?);
        }
        Ok(slot.as_ref().expect("made above"))
    }
}

fn to_halves(
    cx: &Context,
    x: DevicePtr,
    [rows, n_in]: [usize; 2],
    norm: Option<NormParts>,
) -> Result<Halves, CudaError> {
    let pitch = n_in.next_multiple_of(STEP);
    let bytes = rows * pitch * size_of::<u16>();
    let memory = cx.scratch(bytes + rows * size_of::<f32>())?;
    let (halves, factors) = (memory.ptr(), memory.ptr() + bytes as u64);
    let (weight, eps) = norm.map_or((0, 0.0), |norm| (norm.weight, norm.eps));
    let (n_in, pitch) = (n_in as u32, pitch as u32);
    let params = HalvesParams { x, weight, halves, factors, n_in, pitch, eps, unused: 0 };
    cx.launch(cx.kernel(&QUANTIZE, "to_halves")?, Launch::linear(rows as u32, THREADS), &params)?;
    Ok(Halves { _memory: memory, halves, factors })
}

fn quantize(
    cx: &Context,
    x: DevicePtr,
    [rows, n_in]: [usize; 2],
    norm: Option<NormParts>,
    rotates: bool,
) -> Result<Quantized, CudaError> {
    let (n_codes, n_groups) = (rows * n_in, rows * n_in / GROUP);
    let memory = cx.scratch(n_codes + 2 * n_groups * size_of::<f32>())?;
    let codes = memory.ptr();
    let scales = codes + n_codes as u64;
    let sums = scales + (n_groups * size_of::<f32>()) as u64;
    let params = QuantizeParams {
        x,
        weight: norm.map_or(0, |norm| norm.weight),
        codes,
        scales,
        sums,
        n_in: n_in as u32,
        eps: norm.map_or(0.0, |norm| norm.eps),
        rotates: u32::from(rotates),
        signs: Rotation::tq().before() as u32,
    };
    let pieces = ((n_in / GROUP) as u32).div_ceil(GROUPS_OF_WARP * THREADS / 32);
    let launch = Launch { grid: [rows as u32, pieces, 1], ..Launch::linear(rows as u32, THREADS) };
    cx.launch(cx.kernel(&QUANTIZE, "quantize")?, launch, &params)?;
    Ok(Quantized { _memory: memory, codes, scales, sums })
}
