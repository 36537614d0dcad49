//! Products `y = W x + bias` with weights of any type, which stay as they are in the file.
//!
//! Three ways, by the type and the number of rows:
//!
//! - few rows of float weights (`few.cu`): f32 throughout;
//! - few rows of coded weights (`dots.cu`): inputs in 8 bits, groups of 32 with a scale each (`quantise.cu`, which also
//!   normalises), so that 4 products are one `dp4a`. Codebooks (tq3_1s, tq4_1s) become signed bytes too, and their
//!   rotation is applied to the inputs, once, instead of to the weights;
//! - many rows (`many.cu`): tensor cores. Weights are decoded, and inputs rounded, to f16 (inputs beyond ±65,504 become
//!   infinite, and are seen); each weight is decoded once per 64 rows.
//!
//! Sums are f32 in all three.

mod operand;

use bytemuck::NoUninit;
use kvant_codec::{ByteBook, Codebook, DType, Rotation};

use crate::module::{Build, Header};
use crate::{Context, CudaError, DevicePtr, Launch, Source};

pub(crate) use operand::Operand;

static HEADERS: [Header; 2] = [
    Header { name: "weights.cuh", text: include_str!("weights.cuh") },
    Header { name: "codes.cuh", text: include_str!("codes.cuh") },
];
static FEW: Source = Source { name: "few.cu", text: include_str!("few.cu"), headers: &HEADERS, options: &[] };
static DOTS: Source =
    Source { name: "dots.cu", text: include_str!("dots.cu"), headers: &HEADERS, options: &[] };
static MANY: Source =
    Source { name: "many.cu", text: include_str!("many.cu"), headers: &HEADERS, options: &[] };

/// Output features of a block of the kernels for few rows: 8 warps, 2 each.
const FEATURES: u32 = 16;
/// Rows that its blocks multiply at once: one variant for decoding, one for more.
const ROWS: [u32; 2] = [1, 8];
/// From so many rows on the weights are decoded for tensor cores: fewer would be read at most twice anyway.
const MANY_ROWS: usize = 17;
/// Output features and rows of a block of the kernel for many rows.
const TILE: u32 = 64;

/// Types in the order of their numbers in `weights.cuh`; the first three have no codes.
pub(crate) const TYPES: [DType; 15] = [
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::Q8_0,
    DType::Q4_0,
    DType::Q4_1,
    DType::Q5_0,
    DType::Q5_1,
    DType::Q2K,
    DType::Q3K,
    DType::Q4K,
    DType::Q5K,
    DType::Q6K,
    DType::TQ3_1S,
    DType::TQ4_1S,
];
const FLOATS: usize = 3;

/// The parameter of `few.cu` and `many.cu`.
#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct ProductParams {
    w: DevicePtr,
    x: DevicePtr,
    bias: DevicePtr,
    y: DevicePtr,
    row_bytes: u64,
    n_in: u32,
    n_out: u32,
    rows: u32,
    accumulate: u32,
    levels: [f32; 16],
    signs: u32,
    unused: u32,
}

/// The parameter of `dots.cu`.
#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct DotsParams {
    w: DevicePtr,
    codes: DevicePtr,
    scales: DevicePtr,
    sums: DevicePtr,
    bias: DevicePtr,
    y: DevicePtr,
    row_bytes: u64,
    groups: u32,
    n_out: u32,
    rows: u32,
    accumulate: u32,
    /// The levels of the codebook as signed bytes.
    levels: [i8; 16],
    unit: f32,
    unused: u32,
}

/// The right operand of a product and where the result goes, shapes checked.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Product {
    /// `[n_out, n_in]`, of type `dtype`, as in the file.
    pub w: DevicePtr,
    pub dtype: DType,
    pub n_out: usize,
    /// `[n_out]`
    pub bias: Option<DevicePtr>,
    /// `[rows, n_out]`
    pub y: DevicePtr,
    /// Add to `y` instead of overwriting it.
    pub accumulate: bool,
}

/// Whether there is a kernel for this type of weights.
pub(crate) fn supports(dtype: DType) -> bool {
    TYPES.contains(&dtype)
}

/// The kernels for a type of weights, of few and of many rows.
pub(crate) fn kernel_names(dtype: DType) -> &'static str {
    if number(dtype) < FLOATS { "few, many (f16 mma)" } else { "dots (dp4a), many (f16 mma)" }
}

/// Every variant there is to compile.
pub(crate) fn builds() -> impl Iterator<Item = Build> {
    let types = (0..TYPES.len()).flat_map(|number| {
        let few = if number < FLOATS { &FEW } else { &DOTS };
        let dtype = ("TYPE", number as u32);
        let few = ROWS.map(|rows| Build { source: few, defines: vec![dtype, ("ROWS", rows)] });
        few.into_iter().chain([Build { source: &MANY, defines: vec![dtype] }])
    });
    types.chain([Build { source: &operand::QUANTISE, defines: Vec::new() }])
}

fn number(dtype: DType) -> usize {
    TYPES.iter().position(|&known| known == dtype).expect("a type that is supported")
}

fn codebook(dtype: DType) -> Codebook {
    if dtype == DType::TQ3_1S { Codebook::TQ3 } else { Codebook::GAUSS4 }
}

/// Multiplies. The type must be one that [`supports`] names.
pub(crate) fn product(cx: &Context, x: &mut Operand, p: &Product) -> Result<(), CudaError> {
    if x.rows == 0 || p.n_out == 0 {
        return Ok(());
    }
    let dtype = ("TYPE", number(p.dtype) as u32);
    let few_rows = ROWS[usize::from(x.rows > 1)];
    let few = [dtype, ("ROWS", few_rows)];
    if x.rows >= MANY_ROWS {
        let kernel = cx.kernel_with(&MANY, &[dtype], "product_many")?;
        launch(cx, kernel, [TILE, TILE], 128, x.rows, p.n_out, &params(cx, x, p)?)
    } else if number(p.dtype) < FLOATS {
        let kernel = cx.kernel_with(&FEW, &few, "product")?;
        launch(cx, kernel, [FEATURES, few_rows], 256, x.rows, p.n_out, &params(cx, x, p)?)
    } else {
        let kernel = cx.kernel_with(&DOTS, &few, "dots")?;
        launch(cx, kernel, [FEATURES, few_rows], 256, x.rows, p.n_out, &dots_params(cx, x, p)?)
    }
}

/// Queues a kernel whose blocks have `tile` features and rows each.
fn launch<P: NoUninit>(
    cx: &Context,
    kernel: crate::KernelId,
    tile: [u32; 2],
    threads: u32,
    rows: usize,
    n_out: usize,
    params: &P,
) -> Result<(), CudaError> {
    let grid = [(n_out as u32).div_ceil(tile[0]), (rows as u32).div_ceil(tile[1]), 1];
    cx.launch(kernel, Launch { grid, block: [threads, 1, 1], shared_bytes: 0 }, params)
}

fn row_bytes(p: &Product, n_in: usize) -> u64 {
    p.dtype.row_bytes(n_in).expect("rows of whole blocks") as u64
}

fn params(cx: &Context, x: &mut Operand, p: &Product) -> Result<ProductParams, CudaError> {
    let mut levels = [0.0; 16];
    let book = codebook(p.dtype);
    levels[..book.levels().len()].copy_from_slice(book.levels());
    Ok(ProductParams {
        w: p.w,
        x: x.plain(cx)?,
        bias: p.bias.unwrap_or(0),
        y: p.y,
        row_bytes: row_bytes(p, x.n_in),
        n_in: x.n_in as u32,
        n_out: p.n_out as u32,
        rows: x.rows as u32,
        accumulate: u32::from(p.accumulate),
        levels,
        signs: Rotation::tq().before() as u32,
        unused: 0,
    })
}

fn dots_params(cx: &Context, x: &mut Operand, p: &Product) -> Result<DotsParams, CudaError> {
    let (rows, n_in) = (x.rows, x.n_in);
    let rotates = matches!(p.dtype, DType::TQ3_1S | DType::TQ4_1S);
    let codes = x.quantised(cx, rotates)?;
    let (levels, unit) = byte_levels(&codebook(p.dtype));
    Ok(DotsParams {
        w: p.w,
        codes: codes.codes,
        scales: codes.scales,
        sums: codes.sums,
        bias: p.bias.unwrap_or(0),
        y: p.y,
        row_bytes: row_bytes(p, n_in),
        groups: (n_in / 32) as u32,
        n_out: p.n_out as u32,
        rows: rows as u32,
        accumulate: u32::from(p.accumulate),
        levels,
        unit,
        unused: 0,
    })
}

/// The levels as signed bytes, and what one unit of them stands for.
fn byte_levels(book: &Codebook) -> ([i8; 16], f32) {
    let bytes = ByteBook::of(book);
    // Centroids are levels over the square root of 128.
    (bytes.bytes.map(|byte| (byte ^ 0x80).cast_signed()), bytes.step * 128f32.sqrt())
}

#[cfg(test)]
mod tests;
