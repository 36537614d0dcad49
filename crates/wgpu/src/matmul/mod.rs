//! Matrix products of activations with weights of any file type: `y = W norm(x) + bias`.
//!
//! Quantized weights are multiplied with activations in 8 bits, as on the CPU (`operand.wgsl`,
//! `quantized.wgsl`): int8 dot products of four, and a scale for each 32 columns. Rotated types
//! have their levels in bytes, and use rotated activations. Float weights use the activations
//! unchanged (`floats.wgsl`). Weights are stored in panels (`layout.rs`); a thread has rows of them
//! for itself, and reads them once for several rows of activations.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use kvant_backend::Activation;
use kvant_codec::codebook::SIGMA_128;
use kvant_codec::fields::FieldSpec;
use kvant_codec::{ByteBook, DType, nf4, tq3t};

use crate::constants::Constants;
use crate::elementwise::{GATE, MATH, gate_constants, number};
use crate::kv::NONE;
use crate::matrix::Slab;
use crate::shader::Kernel;
use crate::{Gpu, Part, Source, WgpuError, groups};

mod layout;
mod operand;
mod order;
#[cfg(test)]
mod tests;

use layout::{Layout, scale_columns};
pub(crate) use layout::{PANEL, VECTOR_BYTES, pack_panels, row_vectors};
#[cfg(test)]
pub(crate) use operand::SOURCE as OPERAND;
use operand::Vectors;
pub(crate) use operand::{Operand, Rows};
pub(crate) use order::Order;
#[cfg(test)]
pub(crate) use order::SOURCE as ORDER;

const MATMUL: Part = Part { name: "matmul.wgsl", text: include_str!("matmul.wgsl") };

pub(crate) static QUANTIZED: Source = Source {
    parts: &[MATH, GATE, MATMUL, Part { name: "quantized.wgsl", text: include_str!("quantized.wgsl") }],
    constants,
};

pub(crate) static FLOATS: Source = Source {
    parts: &[MATH, GATE, MATMUL, Part { name: "floats.wgsl", text: include_str!("floats.wgsl") }],
    constants,
};

/// Returns the name of the kernel for weights of `dtype`.
pub(crate) fn kernel_name(dtype: DType) -> &'static str {
    if Layout::of(dtype).is_some() { "product (8-bit)" } else { "product (f32)" }
}

fn constants() -> Constants {
    let types = DType::weights().fold(Constants::default(), |constants, dtype| {
        constants.whole(&dtype.name().to_uppercase(), dtype as usize)
    });
    gate_constants(types).whole("PANEL", PANEL).whole("NONE", NONE as usize)
}

/// Shape of a workgroup.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    /// Rows, and outputs, of a thread.
    pub rows: usize,
    pub outputs: usize,
    /// Threads that share an output.
    pub slices: usize,
    /// Whether half of the outputs are those of the gated matrix.
    pub has_gate: bool,
}

impl Shape {
    /// For one row, and for several.
    ///
    /// A GPU is filled by few outputs if threads share them. On a CPU reads cost threads as much as
    /// arithmetic, whatever is read: the more outputs share a read, the better.
    const GPU: [Self; 2] = [
        Self { rows: 1, outputs: 1, slices: 4, has_gate: false },
        Self { rows: 8, outputs: 2, slices: 4, has_gate: false },
    ];
    const SOFTWARE: [Self; 2] = [
        Self { rows: 1, outputs: 4, slices: 1, has_gate: false },
        Self { rows: 4, outputs: 4, slices: 1, has_gate: false },
    ];

    fn of(gpu: &Gpu, rows: usize) -> Self {
        if rows > 1 { Self::for_block(gpu) } else { Self::all(gpu)[0] }
    }

    /// Returns the shape for a block of rows.
    fn for_block(gpu: &Gpu) -> Self {
        Self::all(gpu)[1]
    }

    fn all(gpu: &Gpu) -> [Self; 2] {
        if gpu.is_software() { Self::SOFTWARE } else { Self::GPU }
    }

    /// Returns the same shape with a gate.
    fn gated(self) -> Self {
        Self { outputs: self.outputs.max(2), has_gate: true, ..self }
    }

    /// Returns the outputs that a thread writes, and a workgroup.
    fn outputs_per_thread(self) -> usize {
        if self.has_gate { self.outputs / 2 } else { self.outputs }
    }

    fn group_outputs(self) -> usize {
        PANEL * self.outputs_per_thread()
    }

    /// Returns the kernel for weights of `dtype`.
    fn kernel(self, gpu: &Gpu, dtype: DType, name: &'static str) -> Result<Arc<Kernel>, WgpuError> {
        let Self { rows, outputs, slices, has_gate } = self;
        let number = dtype as usize | rows << 8 | outputs << 16 | slices << 24 | usize::from(has_gate) << 31;
        let source = if Layout::of(dtype).is_some() { &QUANTIZED } else { &FLOATS };
        gpu.variant(source, name, &[number as u32], || self.constants(dtype))
    }

    /// Returns the constants of its kernel.
    fn constants(self, dtype: DType) -> Constants {
        let Self { rows, outputs, slices, has_gate } = self;
        let constants = Constants::default()
            .unrolling()
            .whole("TYPE", dtype.layout() as usize)
            .whole("ROWS", rows)
            .whole("OUTPUTS", outputs)
            .whole("SLICES", slices)
            .flag("HAS_GATE", has_gate)
            .whole("WRITTEN_OUTPUTS", self.outputs_per_thread())
            .whole("SHARED", ((slices - 1) * outputs * rows).max(1));
        let (Some(layout), Some(spec)) = (Layout::of(dtype), FieldSpec::of(dtype)) else {
            // Scales are stored apart.
            let columns = 8 * VECTOR_BYTES / (8 * dtype.block_bytes() / dtype.block_len());
            let levels = nf4::levels(dtype);
            return constants
                .whole("COLUMNS", columns)
                .whole("QUADS", columns / 4)
                .whole("SCALE_COLUMNS", scale_columns(dtype))
                .flag("HAS_LEVELS", levels.is_some())
                .wholes("LEVELS", &levels.map_or([0; 16], |levels| levels.map(f32::to_bits)));
        };
        let (table, unit) = table(spec);
        let word = |bytes: &[i8; 4]| u32::from_le_bytes(bytes.map(|byte| byte as u8));
        let words = table.unwrap_or_default();
        constants
            .whole("SEPARATE", layout.separate)
            .whole("PAIRS_AT", layout.pairs)
            .whole("BITS_AT", layout.bits)
            .whole("GROUPS_AT", layout.groups)
            .whole("GROUP", layout.group)
            .whole("ZERO", 0x0101_0101 * (128 - usize::from(spec.zero)))
            .flag("HAS_MIN", spec.has_min)
            .flag("HAS_HALVES", spec.sub_len == 16)
            .flag("HAS_TABLE", table.is_some())
            .vector("TABLE", std::array::from_fn(|i| word(&words.as_chunks().0[i])))
            .flag("HAS_WINDOWS", spec.trellis.is_some())
            .wholes("WINDOWS", &spec.trellis.map_or([0; 16], |levels| bytemuck::cast(*levels)))
            .float("UNIT", unit)
    }
}

/// Returns the levels of codes that are indices, and their unit in the scale.
fn table(spec: FieldSpec) -> (Option<[i8; 16]>, f32) {
    if spec.trellis.is_some() {
        return (None, tq3t::UNIT);
    }
    match (spec.book, spec.table) {
        (Some(book), _) => {
            let book = ByteBook::of(&book);
            // A byte of a codebook counts its steps, in units of the levels.
            (Some(book.bytes.map(|byte| (byte ^ 128) as i8)), book.step / SIGMA_128 as f32)
        }
        (None, Some(table)) => (Some(*table.levels()), table.unit()),
        (None, None) => (None, 1.0),
    }
}

/// A matrix, or one of several contiguous ones.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Weights<'a> {
    pub slabs: &'a [Slab],
    pub dtype: DType,
    /// Rows before its own.
    pub first: usize,
    pub n_out: usize,
    pub n_in: usize,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Params {
    rows: u32,
    n_in: u32,
    n_out: u32,
    w_rows: u32,
    w_vectors: u32,
    w_first: u32,
    x_first: u32,
    x_stride: u32,
    y_first: u32,
    y_stride: u32,
    has_bias: u32,
    bias_first: u32,
    accumulates: u32,
    blocks: u32,
    slots_per_row: u32,
    first_output: u32,
    end_output: u32,
    activation: u32,
    limit: f32,
}

/// Computes `y = w x + bias`, or adds that to `y`, for all rows of `x`.
pub(crate) fn multiply(
    gpu: &Gpu,
    w: Weights<'_>,
    x: &mut Operand<'_>,
    y: Rows<'_>,
    bias: Option<&wgpu::Buffer>,
    accumulates: bool,
) -> Result<(), WgpuError> {
    let rows = x.rows;
    let shape = Shape::of(gpu, rows);
    let kernel = shape.kernel(gpu, w.dtype, "matmul")?;
    let x = operand(w.dtype, x)?;
    for slab in w.slabs {
        // Rows of the matrix in the slab.
        let first = slab.rows.start.max(w.first);
        let n_out = slab.rows.end.min(w.first + w.n_out).saturating_sub(first);
        let params = Params {
            rows: rows as u32,
            n_out: n_out as u32,
            w_first: (first - slab.rows.start) as u32,
            y_first: (y.first + first - w.first) as u32,
            y_stride: y.stride as u32,
            has_bias: bias.is_some().into(),
            bias_first: (first - w.first) as u32,
            accumulates: accumulates.into(),
            ..params(&w, slab, x)
        };
        let bindings = [
            (1, x.buffer),
            (2, &slab.buffer),
            (3, bias.unwrap_or(gpu.unused_buffer())),
            (4, y.buffer),
            (6, &slab.buffer),
        ];
        let grid = groups(n_out.div_ceil(shape.group_outputs()), rows.div_ceil(shape.rows));
        gpu.count_work([rows, n_out, w.n_in]);
        gpu.launch::<_, u32>(&kernel, grid, &params, &[], &bindings)?;
    }
    Ok(())
}

/// Computes `y = a(gate x) (up x)` for all rows of `x`, a the activation, with matrices of one
/// shape and type, split alike.
pub(crate) fn gated(
    gpu: &Gpu,
    [gate, up]: [Weights<'_>; 2],
    activation: Activation,
    x: &mut Operand<'_>,
    y: &wgpu::Buffer,
) -> Result<(), WgpuError> {
    let rows = x.rows;
    let shape = Shape::of(gpu, rows).gated();
    let kernel = shape.kernel(gpu, gate.dtype, "matmul")?;
    let x = operand(gate.dtype, x)?;
    for (slab, of_up) in gate.slabs.iter().zip(up.slabs) {
        let n_out = slab.rows.len();
        let params = Params {
            rows: rows as u32,
            n_out: n_out as u32,
            y_first: slab.rows.start as u32,
            y_stride: gate.n_out as u32,
            activation: number(activation),
            limit: activation.limit(),
            ..params(&gate, slab, x)
        };
        let bindings =
            [(1, x.buffer), (2, &slab.buffer), (3, gpu.unused_buffer()), (4, y), (6, &of_up.buffer)];
        let grid = groups(n_out.div_ceil(shape.group_outputs()), rows.div_ceil(shape.rows));
        gpu.count_work([2, rows, n_out, gate.n_in]);
        gpu.launch::<_, u32>(&kernel, grid, &params, &[], &bindings)?;
    }
    Ok(())
}

/// The experts selected by the router.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SelectedExperts<'a> {
    /// `[slots]`: the experts of a row are contiguous.
    pub experts: &'a wgpu::Buffer,
    pub slots: usize,
    /// Slots that share a row of the input.
    pub slots_per_row: usize,
    /// Order of the slots, if several slots of an expert are processed at once.
    pub order: Option<&'a Order<'a>>,
}

/// Computes `y = w[e] x + bias[e]` for each slot, e its expert.
///
/// `x` has `slots / slots_per_row` rows, or with an order the rows of [`Operand::in_order`]; `y` is
/// `[slots, n_out]`, from its start. `w.n_out` counts rows of one expert.
pub(crate) fn multiply_experts(
    gpu: &Gpu,
    w: Weights<'_>,
    selected: SelectedExperts<'_>,
    x: &mut Operand<'_>,
    y: &wgpu::Buffer,
    bias: Option<&wgpu::Buffer>,
) -> Result<(), WgpuError> {
    let SelectedExperts { experts, slots, slots_per_row, order } = selected;
    let shape = if order.is_some() { Shape::for_block(gpu) } else { Shape::of(gpu, 1) };
    let blocks = order.map_or(slots, |order| order.n_positions) / shape.rows;
    let kernel = shape.kernel(gpu, w.dtype, "expert_matmul")?;
    let x = operand(w.dtype, x)?;
    for slab in w.slabs {
        let params = Params {
            has_bias: bias.is_some().into(),
            blocks: blocks as u32,
            slots_per_row: slots_per_row as u32,
            first_output: slab.rows.start as u32,
            end_output: slab.rows.end as u32,
            ..params(&w, slab, x)
        };
        let bindings = [
            (1, x.buffer),
            (2, &slab.buffer),
            (3, bias.unwrap_or(gpu.unused_buffer())),
            (4, y),
            (5, experts),
            (6, &slab.buffer),
            (7, order.map_or(gpu.unused_buffer(), |order| &order.list)),
        ];
        let grid = groups(blocks * w.n_out.div_ceil(shape.group_outputs()), 1);
        gpu.count_work([blocks * shape.rows, slab.rows.len().min(w.n_out), w.n_in]);
        gpu.launch::<_, u32>(&kernel, grid, &params, &[], &bindings)?;
    }
    Ok(())
}

/// Returns the rows in the form that weights of `dtype` require.
fn operand<'a>(dtype: DType, x: &'a mut Operand<'_>) -> Result<Vectors<'a>, WgpuError> {
    match FieldSpec::of(dtype) {
        Some(_) => x.quantized(FieldSpec::is_rotated(dtype)),
        None => x.floats(),
    }
}

/// Returns the launch parameters of weights and inputs.
fn params(w: &Weights<'_>, slab: &Slab, x: Vectors<'_>) -> Params {
    Params {
        n_in: w.n_in as u32,
        n_out: w.n_out as u32,
        w_rows: slab.rows.len() as u32,
        w_vectors: row_vectors(w.dtype, w.n_in) as u32,
        x_first: x.first as u32,
        x_stride: x.stride as u32,
        ..Params::zeroed()
    }
}

/// Returns every variant to compile.
#[cfg(test)]
pub(crate) fn variants() -> impl Iterator<Item = (&'static Source, Constants)> {
    let shapes = || Shape::GPU.into_iter().chain(Shape::SOFTWARE);
    let of_type = move |dtype: DType| {
        let source = if Layout::of(dtype).is_some() { &QUANTIZED } else { &FLOATS };
        shapes().flat_map(|shape| [shape, shape.gated()]).map(move |shape| (source, shape.constants(dtype)))
    };
    DType::weights().flat_map(of_type)
}
