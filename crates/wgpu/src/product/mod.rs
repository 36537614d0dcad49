//! Products of activations with weights of any type that a file may hold. Weights lie as in the file and are decoded where they
//! are multiplied; activations stay as they are, and sums are in f32.

use bytemuck::{Pod, Zeroable};
use kvant_backend::{BackendError, Result};
use kvant_codec::{Codebook, DType, Rotation, Table};

use crate::constants::Constants;
use crate::each::NUMBERS;
use crate::matrix::Slab;
use crate::{Gpu, Part, Source, groups};

pub(crate) static SOURCE: Source = Source {
    parts: &[
        NUMBERS,
        Part { name: "weights.wgsl", text: include_str!("weights.wgsl") },
        Part { name: "product.wgsl", text: include_str!("product.wgsl") },
    ],
    constants,
};

/// Rows that share what is decoded.
const MOST_ROWS: usize = 8;

/// The types of weights.
pub(crate) fn types() -> impl Iterator<Item = DType> {
    DType::ALL.into_iter().filter(|dtype| dtype.ggml_id().is_some())
}

fn constants() -> Constants {
    let types = types().fold(Constants::default(), |constants, dtype| {
        constants.whole(&dtype.name().to_uppercase(), dtype as usize)
    });
    let levels = |table: Table| table.levels().map(f32::from);
    types
        .whole("THREADS", 32)
        .whole("MOST_ROWS", MOST_ROWS)
        .floats("IQ4_LEVELS", &levels(Table::IQ4))
        .floats("E2M1_LEVELS", &levels(Table::E2M1))
        .floats("TQ3_LEVELS", Codebook::TQ3.levels())
        .floats("TQ4_LEVELS", Codebook::GAUSS4.levels())
        .float("TQ_FACTOR", (1.0 / (Rotation::tq().len() as f64).sqrt()) as f32)
        .whole("TQ_SIGNS", Rotation::tq().before() as usize)
}

/// Rows in a buffer: `rows` of them, the first from value `first` on, the next ones `stride` values further.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rows<'a> {
    pub buffer: &'a wgpu::Buffer,
    pub first: usize,
    pub stride: usize,
}

/// A matrix, or one of several in a row.
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
    dtype: u32,
    rows: u32,
    n_in: u32,
    n_out: u32,
    row_bytes: u32,
    w_first: u32,
    x_first: u32,
    x_stride: u32,
    y_first: u32,
    y_stride: u32,
    has_bias: u32,
    bias_first: u32,
    accumulates: u32,
    slots: u32,
    slots_of_row: u32,
    first_output: u32,
    end_output: u32,
}

/// `y = w x + bias`, or that added to `y`, for `rows` rows.
pub(crate) fn product(
    gpu: &Gpu,
    w: Weights<'_>,
    rows: usize,
    x: Rows<'_>,
    y: Rows<'_>,
    bias: Option<&wgpu::Buffer>,
    accumulates: bool,
) -> Result<()> {
    let (kernel, row_bytes) = (gpu.kernel(&SOURCE, "product")?, row_bytes(&w)?);
    for slab in w.slabs {
        // Rows of the matrix that the slab has.
        let first = slab.rows.start.max(w.first);
        let n_out = slab.rows.end.min(w.first + w.n_out).saturating_sub(first);
        let params = Params {
            rows: rows as u32,
            n_out: n_out as u32,
            w_first: ((first - slab.rows.start) * row_bytes) as u32,
            x_first: x.first as u32,
            x_stride: x.stride as u32,
            y_first: (y.first + first - w.first) as u32,
            y_stride: y.stride as u32,
            has_bias: bias.is_some().into(),
            bias_first: (first - w.first) as u32,
            accumulates: accumulates.into(),
            ..params(&w)?
        };
        let bindings = [(1, x.buffer), (2, &slab.buffer), (3, bias.unwrap_or(gpu.nothing())), (4, y.buffer)];
        gpu.launch::<_, u32>(&kernel, groups(n_out, rows.div_ceil(MOST_ROWS)), &params, &[], &bindings)?;
    }
    Ok(())
}

/// The experts that rows have chosen.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Picks<'a> {
    /// `[slots]`: the experts of a row side by side.
    pub experts: &'a wgpu::Buffer,
    pub slots: usize,
    /// How many of them share a row of the input.
    pub of_row: usize,
}

/// `y = w[e] x + bias[e]` for each slot, e its expert: `x` `[slots / of_row, n_in]`, `y` `[slots, n_out]`, both from their start.
/// `w.n_out` counts rows of one expert.
pub(crate) fn chosen(
    gpu: &Gpu,
    w: Weights<'_>,
    picks: Picks<'_>,
    x: &wgpu::Buffer,
    y: &wgpu::Buffer,
    bias: Option<&wgpu::Buffer>,
) -> Result<()> {
    let Picks { experts, slots, of_row } = picks;
    let kernel = gpu.kernel(&SOURCE, "chosen")?;
    for slab in w.slabs {
        let params = Params {
            x_stride: w.n_in as u32,
            has_bias: bias.is_some().into(),
            slots: slots as u32,
            slots_of_row: of_row as u32,
            first_output: slab.rows.start as u32,
            end_output: slab.rows.end as u32,
            ..params(&w)?
        };
        let bindings = [(1, x), (2, &slab.buffer), (3, bias.unwrap_or(gpu.nothing())), (4, y), (5, experts)];
        gpu.launch::<_, u32>(&kernel, groups(slots * w.n_out, 1), &params, &[], &bindings)?;
    }
    Ok(())
}

/// What a launch is told of its weights.
fn params(w: &Weights<'_>) -> Result<Params> {
    Ok(Params {
        dtype: w.dtype as u32,
        n_in: w.n_in as u32,
        n_out: w.n_out as u32,
        row_bytes: row_bytes(w)? as u32,
        ..Params::zeroed()
    })
}

fn row_bytes(w: &Weights<'_>) -> Result<usize> {
    w.dtype.row_bytes(w.n_in).map_err(|error| BackendError::Unsupported {
        op: "project",
        wanted: error.to_string(),
        has: "rows of whole blocks".to_owned(),
    })
}
