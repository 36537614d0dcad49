//! Activations: the input rows of matrix products, and their f16 and 8-bit forms, each computed
//! once.

use bytemuck::NoUninit;
use kvant_codec::Rotation;

use crate::constants::Constants;
use crate::half::HALF_HEADER;
use crate::memory::Block;
use crate::norm::{self, NormKind, NormParts, SUM_HEADER};
use crate::{Context, CudaError, DevicePtr, Header, Launch, Source, rotate};

pub(super) static QUANTIZE: Source = Source {
    name: "quantize.cu",
    text: include_str!("quantize.cu"),
    headers: &[HALF_HEADER, INPUT_TILE_HEADER, SUM_HEADER, TO_BYTES_HEADER],
    constants: || rotate::constants(Constants::default()).whole("THREADS", THREADS as usize),
    options: &[],
};

/// Header of the conversion to 8 bits, for kernels that convert on the fly too.
pub(super) const TO_BYTES_HEADER: Header =
    Header { name: "to_bytes.cuh", text: include_str!("to_bytes.cuh") };
/// Header of the inputs of `skinny_q8.cu`.
pub(super) const INPUT_TILE_HEADER: Header =
    Header { name: "input_tile.cuh", text: include_str!("input_tile.cuh") };

/// Threads of a block, which processes a row, or a range of one.
const THREADS: u32 = 256;
/// Inputs that a block converts to 8 bits.
const RANGE: usize = 4 * THREADS as usize;

/// Values of a group: those that share a scale.
const GROUP: usize = 32;
/// Rows of `InputTile` of `input_tile.cuh`, and its bytes.
const TILE_ROWS: usize = 8;
pub(super) const INPUT_TILE_BYTES: usize = TILE_ROWS * (GROUP + 2 * size_of::<f32>());
/// Values of a step of the GEMM.
pub(super) const STEP: usize = 64;

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct QuantizeParams {
    x: DevicePtr,
    weight: DevicePtr,
    tiles: DevicePtr,
    factors: DevicePtr,
    n_in: u32,
    rows: u32,
    eps: f32,
    rotates: u32,
    signs: u32,
    sums: u32,
    offset: u32,
    unused: u32,
}

/// What the products with a type of weights need of the sums of the inputs' codes of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sums {
    /// Those of either half, 16 bits each.
    OfHalves,
    /// The sum times the scale, for minimums.
    AsFloats,
    /// The integer that the products begin with: minus `offset` times the sum.
    AsStarts { offset: u32 },
}

/// How the inputs are converted to 8 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Bytes {
    /// Rotate each group first.
    pub rotates: bool,
    pub sums: Sums,
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
    quantized: Vec<(Bytes, Quantized)>,
}

/// Inputs in 8 bits, `InputTile` `[rows / 8, n_in / 32]`.
pub(super) struct Quantized {
    _memory: Block,
    pub tiles: DevicePtr,
    /// The norm's factors, `[rows]`, or 0: products are multiplied by them.
    pub factors: DevicePtr,
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
        Self { x, norm, rows, n_in, normalized: None, halves: None, quantized: Vec::new() }
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

    /// Returns the inputs in 8 bits. `n_in` is a multiple of 32.
    pub(super) fn quantized(&mut self, cx: &Context, bytes: Bytes) -> Result<&Quantized, CudaError> {
        let index = match self.quantized.iter().position(|(of, _)| *of == bytes) {
            Some(index) => index,
            None => {
                let quantized = quantize(cx, self.x, [self.rows, self.n_in], self.norm, bytes)?;
                self.quantized.push((bytes, quantized));
                self.quantized.len() - 1
            }
        };
        Ok(&self.quantized[index].1)
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
    bytes: Bytes,
) -> Result<Quantized, CudaError> {
    let tile_rows = rows.next_multiple_of(TILE_ROWS);
    let tile_bytes = tile_rows / TILE_ROWS * (n_in / GROUP) * INPUT_TILE_BYTES;
    let memory = cx.scratch(tile_bytes + rows * size_of::<f32>())?;
    let (tiles, factors) = (memory.ptr(), norm.map_or(0, |_| memory.ptr() + tile_bytes as u64));
    let (sums, offset) = match bytes.sums {
        Sums::OfHalves => (0, 0),
        Sums::AsFloats => (1, 0),
        Sums::AsStarts { offset } => (2, offset),
    };
    let params = QuantizeParams {
        x,
        weight: norm.map_or(0, |norm| norm.weight),
        tiles,
        factors,
        n_in: n_in as u32,
        rows: rows as u32,
        eps: norm.map_or(0.0, |norm| norm.eps),
        rotates: u32::from(bytes.rotates),
        signs: Rotation::tq().before() as u32,
        sums,
        offset,
        unused: 0,
    };
    // One block more computes the norm's factor.
    let blocks = (n_in.div_ceil(RANGE) + usize::from(norm.is_some())) as u32;
    let launch = Launch { grid: [tile_rows as u32, blocks, 1], ..Launch::linear(1, THREADS) };
    cx.launch(cx.kernel(&QUANTIZE, "quantize")?, launch, &params)?;
    Ok(Quantized { _memory: memory, tiles, factors })
}
