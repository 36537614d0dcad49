//! Products with weights as they are in the file, of any type: `y = W x + bias`, decoded to f32 and added up in f32.
//!
//! Few rows (`few.cu`): f32 throughout. A lane decodes 32 weights in a row, three to five operations each, and multiplies
//! them with one row or with eight. On an H200 that is about as many operations per byte of q4_0 as there are (25 weights
//! per clock and SM of 33 that the memory brings).
//!
//! Many rows (`many.cu`): tensor cores. Weights and inputs are rounded to f16 (inputs beyond ±65,504 become infinite, and
//! are seen), sums stay in f32. Each weight is decoded once per 64 rows.

use bytemuck::NoUninit;
use kvant_codec::{Codebook, DType, Rotation};

use crate::module::{Build, Header};
use crate::{Context, CudaError, DevicePtr, Launch, Source};

static HEADERS: [Header; 1] = [Header { name: "weights.cuh", text: include_str!("weights.cuh") }];
static FEW: Source = Source { name: "few.cu", text: include_str!("few.cu"), headers: &HEADERS, options: &[] };
static MANY: Source =
    Source { name: "many.cu", text: include_str!("many.cu"), headers: &HEADERS, options: &[] };

/// Output features of a block of the kernel for few rows: 8 warps, 2 each.
const FEATURES: u32 = 16;
/// Rows that its blocks multiply at once: one variant for decoding, one for more.
const ROWS: [u32; 2] = [1, 8];
/// From so many rows on the weights are decoded for tensor cores: fewer would be decoded at most twice anyway.
const MANY_ROWS: usize = 17;
/// Output features and rows of a block of the kernel for many rows.
const TILE: u32 = 64;

/// Types in the order of their numbers in `weights.cuh`.
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

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct KernelParams {
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

/// A product, its shapes checked.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Product {
    /// `[n_out, n_in]`, of type `dtype`, as in the file.
    pub w: DevicePtr,
    pub dtype: DType,
    pub n_out: usize,
    pub n_in: usize,
    /// `[rows, n_in]`
    pub x: DevicePtr,
    pub rows: usize,
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

/// Every variant there is to compile.
pub(crate) fn builds() -> impl Iterator<Item = Build> {
    (0..TYPES.len() as u32).flat_map(|number| {
        let few = ROWS.map(|rows| Build { source: &FEW, defines: vec![("TYPE", number), ("ROWS", rows)] });
        few.into_iter().chain([Build { source: &MANY, defines: vec![("TYPE", number)] }])
    })
}

/// Multiplies. The type must be one that [`supports`] names.
pub(crate) fn product(cx: &Context, p: &Product) -> Result<(), CudaError> {
    if p.rows == 0 || p.n_out == 0 {
        return Ok(());
    }
    let number = TYPES.iter().position(|&dtype| dtype == p.dtype).expect("a type that is supported");
    let dtype = ("TYPE", number as u32);
    let book = if p.dtype == DType::TQ3_1S { Codebook::TQ3 } else { Codebook::GAUSS4 };
    let mut levels = [0.0; 16];
    levels[..book.levels().len()].copy_from_slice(book.levels());
    let params = KernelParams {
        w: p.w,
        x: p.x,
        bias: p.bias.unwrap_or(0),
        y: p.y,
        row_bytes: p.dtype.row_bytes(p.n_in).expect("rows of whole blocks") as u64,
        n_in: p.n_in as u32,
        n_out: p.n_out as u32,
        rows: p.rows as u32,
        accumulate: u32::from(p.accumulate),
        levels,
        signs: Rotation::tq().before() as u32,
        unused: 0,
    };
    let (kernel, [features, rows], threads) = if p.rows < MANY_ROWS {
        let rows = ROWS[usize::from(p.rows > 1)];
        (cx.kernel_with(&FEW, &[dtype, ("ROWS", rows)], "product")?, [FEATURES, rows], 256)
    } else {
        (cx.kernel_with(&MANY, &[dtype], "product_many")?, [TILE, TILE], 128)
    };
    let grid = [params.n_out.div_ceil(features), params.rows.div_ceil(rows), 1];
    cx.launch(kernel, Launch { grid, block: [threads, 1, 1], shared_bytes: 0 }, &params)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::emulator;
    use kvant_codec::random::Random;

    /// Weights as they are in a file, and what they decode to, `[n_out, n_in]`.
    fn weights(random: &mut Random, dtype: DType, [n_out, n_in]: [usize; 2]) -> (Vec<u8>, Vec<f32>) {
        let row_bytes = dtype.row_bytes(n_in).unwrap();
        let (mut codes, mut w) = (vec![0; n_out * row_bytes], vec![0.0; n_out * n_in]);
        let mut values = vec![0.0; n_in];
        for (codes, w) in codes.chunks_mut(row_bytes).zip(w.chunks_mut(n_in)) {
            random.fill_gaussian(&mut values, 0.1);
            kvant_codec::encode(dtype, &values, codes).unwrap();
            kvant_codec::decode(dtype, codes, w).unwrap();
        }
        (codes, w)
    }

    fn gaussian(random: &mut Random, len: usize) -> Vec<f32> {
        let mut values = vec![0.0; len];
        random.fill_gaussian(&mut values, 1.0);
        values
    }

    /// Holds one product, with and without bias and accumulation, to plain sums in f64. `per_term` is the relative error
    /// of one product of a weight and an input.
    fn check(cx: &Context, random: &mut Random, dtype: DType, shape: [usize; 2], rows: usize, per_term: f64) {
        let [n_out, n_in] = shape;
        let (codes, w) = weights(random, dtype, shape);
        let on_w = cx.arena().take(codes.len()).unwrap();
        cx.gpu().write(on_w.ptr(), &codes).unwrap();
        let (x, bias) = (gaussian(random, rows * n_in), gaussian(random, n_out));
        let before = gaussian(random, rows * n_out);
        let (on_x, on_bias) = (emulator::upload(cx, &x), emulator::upload(cx, &bias));
        for with_more in [false, true] {
            let y = match with_more {
                true => emulator::upload(cx, &before),
                false => emulator::poisoned(cx, rows * n_out),
            };
            let p = Product {
                w: on_w.ptr(),
                dtype,
                n_out,
                n_in,
                x: on_x.ptr(),
                rows,
                bias: with_more.then_some(on_bias.ptr()),
                y: y.ptr(),
                accumulate: with_more,
            };
            product(cx, &p).unwrap();
            for (i, got) in emulator::download(cx, &y).into_iter().enumerate() {
                let (r, o) = (i / n_out, i % n_out);
                let terms = w[o * n_in..][..n_in].iter().zip(&x[r * n_in..][..n_in]);
                // What the error of a weight is relative to: the range of its block, 4 sigma at most.
                let (sum, size) = terms.fold((0.0, 0.0), |(sum, size), (&w, &x)| {
                    (sum + f64::from(w) * f64::from(x), size + 0.4 * f64::from(x).abs())
                });
                let more = if with_more { f64::from(bias[o]) + f64::from(before[i]) } else { 0.0 };
                // In f32: a lane adds 32 products per group; 5 shuffles, bias and former value follow. Decoding may
                // round twice more than the codec (fused or not), tq's butterflies five times.
                let roundings = (n_in.div_ceil(1024) * 32 + 5 + 2 + 8) as f64;
                let tol = (roundings * f64::from(f32::EPSILON) + per_term) * (size + more.abs());
                let err = (f64::from(got) - sum - more).abs();
                assert!(err <= tol, "{dtype}, {shape:?}, {rows} rows, value {i}: {got} for {}", sum + more);
            }
        }
    }

    /// Every type; rows that do not fill a tile, features that do not fill a block, a row of one block and of more than
    /// 32 groups.
    #[test]
    fn few_rows_equal_plain_sums_of_the_decoded_weights() {
        let Some(cx) = emulator::context(80) else { return };
        let mut random = Random::new(5);
        for dtype in TYPES {
            let block = dtype.block_len();
            check(&cx, &mut random, dtype, [17, block.max(2)], 1, 0.0);
            check(&cx, &mut random, dtype, [3, block * 1280usize.div_ceil(block)], 3, 0.0);
            check(&cx, &mut random, dtype, [1, 256], 9, 0.0);
        }
        check(&cx, &mut random, DType::F16, [2, 1057], 16, 0.0);
    }

    #[test]
    fn many_rows_equal_plain_sums_but_for_the_rounding_to_f16() {
        let Some(cx) = emulator::context(80) else { return };
        let mut random = Random::new(6);
        // Both factors are rounded to 11 bits.
        let per_term = 2.0 * f64::from(2.0f32.powi(-11));
        for dtype in TYPES {
            check(&cx, &mut random, dtype, [65, dtype.block_len().max(32)], 17, per_term);
            check(&cx, &mut random, dtype, [3, 512], 66, per_term);
        }
        check(&cx, &mut random, DType::F16, [64, 41], 64, per_term);
        check(&cx, &mut random, DType::Q4_0, [130, 96], 129, per_term);
    }
}
