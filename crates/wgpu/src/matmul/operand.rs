//! Activations: the input rows of matrix products, and the forms that kernels require, each
//! computed once.

use bytemuck::{Pod, Zeroable};
use kvant_codec::Rotation;

use super::Order;
use super::layout::{GROUP, VECTOR, VECTOR_BYTES};
use crate::constants::Constants;
use crate::elementwise::MATH;
use crate::kv::NONE;
use crate::norm::SUM;
use crate::scratch::Scratch;
use crate::{Gpu, Part, Source, WgpuError, groups};

pub(crate) static SOURCE: Source = Source {
    parts: &[MATH, SUM, Part { name: "operand.wgsl", text: include_str!("operand.wgsl") }],
    constants: || {
        Constants::default()
            .whole("THREADS", 64)
            .whole("ROTATION_SIGNS", Rotation::tq().before() as usize)
            .float("ROTATION_FACTOR", (1.0 / (Rotation::tq().len() as f64).sqrt()) as f32)
            // Below this 32 values count as zero, as on the CPU: the quotient 127 / max would
            // overflow.
            .float("TINY", 1e-30)
            .whole("NONE", NONE as usize)
    },
};

/// Rows of a tile of quantized rows, and its vectors of 32 columns.
const TILE: usize = 4;
const TILE_VECTORS: usize = 12;

/// Rows in a buffer, the first from value `first` on, `stride` values apart.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rows<'a> {
    pub buffer: &'a wgpu::Buffer,
    pub first: usize,
    pub stride: usize,
}

/// Rows `[rows, n]`, normalized first where `norm` is given, by a weight `[n]` and its eps.
#[derive(Debug)]
pub(crate) struct Operand<'a> {
    gpu: &'a Gpu,
    pub x: Rows<'a>,
    pub rows: usize,
    pub n: usize,
    pub norm: Option<(&'a wgpu::Buffer, f32)>,
    /// The order of slots that the rows are produced in, and the number of slots per row of `x`.
    order: Option<(&'a wgpu::Buffer, usize)>,
    padded: Option<Scratch<'a>>,
    quantized: Option<Scratch<'a>>,
    rotated: Option<Scratch<'a>>,
}

/// The input buffer of a product: its first vector, and vectors from one row to the next, for float
/// rows.
#[derive(Debug, Clone, Copy)]
pub(super) struct Vectors<'a> {
    pub buffer: &'a wgpu::Buffer,
    pub first: usize,
    pub stride: usize,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Params {
    rows: u32,
    n: u32,
    first: u32,
    stride: u32,
    padded: u32,
    has_norm: u32,
    eps: f32,
    nan_bits: u32,
    slots_per_row: u32,
}

impl<'a> Operand<'a> {
    pub fn new(
        gpu: &'a Gpu,
        x: Rows<'a>,
        [rows, n]: [usize; 2],
        norm: Option<(&'a wgpu::Buffer, f32)>,
    ) -> Self {
        Self { gpu, x, rows, n, norm, order: None, padded: None, quantized: None, rotated: None }
    }

    /// With an order, selects the rows of its slots, each shared by `slots_per_row` slots: one row
    /// for each of its positions.
    pub fn in_order<'b>(self, order: Option<&'b Order<'_>>, slots_per_row: usize) -> Operand<'b>
    where
        'a: 'b,
    {
        let Some(order) = order else { return self };
        let all = Operand::new(self.gpu, self.x, [order.n_positions, self.n], self.norm);
        Operand { order: Some((&order.list, slots_per_row)), ..all }
    }

    /// Returns the rows in f32.
    pub(super) fn floats(&mut self) -> Result<Vectors<'_>, WgpuError> {
        let Rows { buffer, first, stride } = self.x;
        let is_whole = [self.n, first, stride].iter().all(|len| len % VECTOR == 0);
        if self.norm.is_none() && self.order.is_none() && is_whole {
            return Ok(Vectors { buffer, first: first / VECTOR, stride: stride / VECTOR });
        }
        let stride = self.n.div_ceil(VECTOR);
        if self.padded.is_none() {
            let bytes = self.rows * stride * VECTOR_BYTES;
            self.padded = Some(self.produce("pad_rows", bytes)?);
        }
        let buffer = self.padded.as_deref().unwrap_or(buffer);
        Ok(Vectors { buffer, first: 0, stride })
    }

    /// Returns the rows in 8 bits, with each 32 of their values rotated first if `rotates`. `n` is
    /// a multiple of 32.
    pub(super) fn quantized(&mut self, rotates: bool) -> Result<Vectors<'_>, WgpuError> {
        let (scratch, name) = if rotates {
            (&self.rotated, "rotate_and_quantize_rows")
        } else {
            (&self.quantized, "quantize_rows")
        };
        if scratch.is_none() {
            let bytes = self.rows.div_ceil(TILE) * (self.n / GROUP) * TILE_VECTORS * VECTOR_BYTES;
            let scratch = Some(self.produce(name, bytes)?);
            *(if rotates { &mut self.rotated } else { &mut self.quantized }) = scratch;
        }
        let scratch = if rotates { &self.rotated } else { &self.quantized };
        Ok(Vectors { buffer: scratch.as_deref().unwrap_or(self.x.buffer), first: 0, stride: 0 })
    }

    fn produce(&self, name: &'static str, bytes: usize) -> Result<Scratch<'a>, WgpuError> {
        let gpu = self.gpu;
        let out = gpu.scratch(bytes, "operands of products")?;
        let (weight, eps) = self.norm.unwrap_or((gpu.unused_buffer(), 0.0));
        let (order, slots_per_row) = self.order.unwrap_or((gpu.unused_buffer(), 0));
        let params = Params {
            rows: self.rows as u32,
            n: self.n as u32,
            first: self.x.first as u32,
            stride: self.x.stride as u32,
            padded: self.n.next_multiple_of(VECTOR) as u32,
            has_norm: self.norm.is_some().into(),
            eps,
            nan_bits: f32::NAN.to_bits(),
            slots_per_row: slots_per_row as u32,
        };
        let bindings = [(1, self.x.buffer), (2, weight), (3, &out), (4, order)];
        let kernel = gpu.kernel(&SOURCE, name)?;
        gpu.launch::<_, u32>(&kernel, groups(self.rows, 1), &params, &[], &bindings)?;
        Ok(out)
    }
}
