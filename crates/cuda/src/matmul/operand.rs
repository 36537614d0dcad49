//! Activations: the input rows of matrix products, and their f16 and 8-bit forms, each computed
//! once.
//!
//! The rounding to f16 applies the gate of a feed-forward layer too: g and u are read once, 8 bytes
//! a value, and 2 are written. A gate by itself reads 8 and writes 4, which a rounding then reads
//! twice.

use bytemuck::NoUninit;
use kvant_codec::Rotation;

use crate::constants::Constants;
use crate::gate::{self, PendingGate};
use crate::half::HALF_HEADER;
use crate::memory::Block;
use crate::norm::{self, NormKind, NormParts, SUM_HEADER};
use crate::{Context, CudaError, DevicePtr, Header, Launch, Source, rotate};

pub(super) static QUANTIZE: Source = Source {
    name: "quantize.cu",
    text: include_str!("quantize.cu"),
    headers: &[gate::HEADER, HALF_HEADER, INPUT_TILE_HEADER, SUM_HEADER, TO_BYTES_HEADER],
    constants: || {
        rotate::constants(gate::constants(Constants::default()))
            .whole("THREADS", THREADS as usize)
            .whole("GATING_THREADS", GATING_THREADS as usize)
    },
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
/// Threads of a block that gates a row while it rounds it: one has the memory for few rows.
const GATING_THREADS: u32 = 512;
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

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct GatedHalvesParams {
    g: DevicePtr,
    u: DevicePtr,
    halves: DevicePtr,
    factors: DevicePtr,
    n_in: u32,
    pitch: u32,
    activation: u32,
    limit: f32,
}

/// Rows of inputs on the device, `[rows, n_in]`, normalized first where `norm` is given, or gated
/// where `gate` is.
pub(crate) struct Operand {
    pub x: DevicePtr,
    pub norm: Option<NormParts>,
    gate: Option<PendingGate>,
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
    /// Padded length of a row.
    pitch: u32,
}

impl Halves {
    fn new(cx: &Context, [rows, n_in]: [usize; 2]) -> Result<Self, CudaError> {
        let pitch = n_in.next_multiple_of(STEP);
        let bytes = rows * pitch * size_of::<u16>();
        let memory = cx.scratch(bytes + rows * size_of::<f32>())?;
        let (halves, factors) = (memory.ptr(), memory.ptr() + bytes as u64);
        Ok(Self { _memory: memory, halves, factors, pitch: pitch as u32 })
    }
}

impl Operand {
    /// The operand `x` `[rows, n_in]`.
    pub fn new(x: DevicePtr, [rows, n_in]: [usize; 2], norm: Option<NormParts>) -> Self {
        let (gate, normalized, halves, quantized) = (None, None, None, Vec::new());
        Self { x, norm, gate, rows, n_in, normalized, halves, quantized }
    }

    /// The operand `x *= a(g)` `[rows, n_in]`. What `x` holds after its products is arbitrary.
    pub fn gated(x: DevicePtr, shape: [usize; 2], gate: Option<PendingGate>) -> Self {
        Self { gate, ..Self::new(x, shape, None) }
    }

    /// Applies the gate to the inputs in f32, if that is yet to be done.
    pub(super) fn apply_gate(&mut self, cx: &Context) -> Result<(), CudaError> {
        match self.gate.take() {
            Some(gate) => gate::gate(cx, gate, self.x, self.rows * self.n_in),
            None => Ok(()),
        }
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
            let (x, shape) = (self.x, [self.rows, self.n_in]);
            let room = cx.gpu().properties().shared_per_block - STATIC_BYTES;
            let fused = self.gate.filter(|_| kept_bytes(self.n_in) <= room);
            self.halves = Some(match fused {
                Some(gate) => gated_to_halves(cx, gate, x, shape)?,
                None => {
                    self.apply_gate(cx)?;
                    to_halves(cx, x, shape, self.norm)?
                }
            });
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
    let made = Halves::new(cx, [rows, n_in])?;
    let (weight, eps) = norm.map_or((0, 0.0), |norm| (norm.weight, norm.eps));
    let Halves { halves, factors, pitch, .. } = made;
    let params = HalvesParams { x, weight, halves, factors, n_in: n_in as u32, pitch, eps, unused: 0 };
    cx.launch(cx.kernel(&QUANTIZE, "to_halves")?, Launch::linear(rows as u32, THREADS), &params)?;
    Ok(made)
}

fn gated_to_halves(
    cx: &Context,
    PendingGate { g, activation }: PendingGate,
    u: DevicePtr,
    [rows, n_in]: [usize; 2],
) -> Result<Halves, CudaError> {
    let made = Halves::new(cx, [rows, n_in])?;
    let (number, limit) = (gate::number(activation), activation.limit());
    let Halves { halves, factors, pitch, .. } = made;
    let params =
        GatedHalvesParams { g, u, halves, factors, n_in: n_in as u32, pitch, activation: number, limit };
    let launch = Launch { shared_bytes: kept_bytes(n_in), ..Launch::linear(rows as u32, GATING_THREADS) };
    cx.launch(cx.kernel(&QUANTIZE, "gated_to_halves")?, launch, &params)?;
    Ok(made)
}

/// Shared memory of that kernel besides: the largest magnitudes of its warps.
const STATIC_BYTES: u32 = GATING_THREADS / 32 * size_of::<u32>() as u32;

/// Returns the shared memory that holds a row while it is gated.
fn kept_bytes(n_in: usize) -> u32 {
    (n_in.next_multiple_of(4) * size_of::<f32>()) as u32
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

#[cfg(test)]
mod tests {
    use kvant_backend::Activation;

    use super::*;
    use crate::emulator;

    /// Returns the halves of an operand, and the factors of its rows.
    fn rounded(cx: &Context, operand: &mut Operand) -> (Vec<u8>, Vec<u8>) {
        let (rows, halves) = (operand.rows, operand.halves(cx).unwrap());
        let mut bytes = vec![0; rows * halves.pitch as usize * size_of::<u16>()];
        let mut factors = vec![0; rows * size_of::<f32>()];
        cx.gpu().read(halves.halves, &mut bytes).unwrap();
        cx.gpu().read(halves.factors, &mut factors).unwrap();
        (bytes, factors)
    }

    /// The bits are those of a gate by itself: of rows of any length, also those that shared memory
    /// does not hold, and of any size.
    #[test]
    fn a_row_is_gated_while_it_is_rounded() {
        let Some(cx) = emulator::context(89) else { return };
        let room = cx.gpu().properties().shared_per_block - STATIC_BYTES;
        let longest = room as usize / 16 * 4;
        for n_in in [1, 7, 64, 1023, 1024, 1025, 4100, longest, longest + 1] {
            let rows = 3;
            let wave = |i: usize, rate: f32| (i as f32 * rate).sin() * [4.0, 3e-7, 2e4][i / n_in];
            let g: Vec<f32> = (0..rows * n_in).map(|i| wave(i, 0.37)).collect();
            let u: Vec<f32> = (0..rows * n_in).map(|i| wave(i, 1.13)).collect();
            for activation in [Activation::Silu, Activation::Gelu, Activation::Clamped { limit: 2.0 }] {
                let on_g = emulator::upload(&cx, &g);
                let pending = PendingGate { g: on_g.ptr(), activation };
                let [on_u, gated] = [0, 1].map(|_| emulator::upload(&cx, &u));
                gate::gate(&cx, pending, gated.ptr(), rows * n_in).unwrap();
                let mut plain = Operand::new(gated.ptr(), [rows, n_in], None);
                let mut fused = Operand::gated(on_u.ptr(), [rows, n_in], Some(pending));
                let same = rounded(&cx, &mut fused) == rounded(&cx, &mut plain);
                assert!(same, "{activation:?} of rows of {n_in}");
                // Products of other kinds have them gated first.
                assert_eq!(fused.gate.is_some(), n_in <= longest);
                fused.apply_gate(&cx).unwrap();
                assert_eq!(emulator::download(&cx, &on_u), emulator::download(&cx, &gated));
            }
        }
    }
}
