//! Products with weights as they are in the file, of any type: `y = W x + bias`, decoded to f32 and added up in f32.
//!
//! A warp has one output feature and eight rows; a lane decodes 32 weights in a row, three to five operations each, and
//! multiplies them with every row. Reads each weight once per eight rows: made for decoding, slow for long prompts.

use bytemuck::NoUninit;
use kvant_codec::{Codebook, DType, Rotation};

use crate::module::{Build, Header};
use crate::{Context, CudaError, DevicePtr, Launch, Source};

/// The kernel of this op.
pub(crate) static SOURCE: Source = Source {
    name: "product.cu",
    text: include_str!("product.cu"),
    headers: &[Header { name: "weights.cuh", text: include_str!("weights.cuh") }],
    options: &[],
};

/// Output features of a block, a warp each.
const WARPS: u32 = 4;
/// Rows that a warp multiplies at once, as in the kernel.
const ROWS: u32 = 8;

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
    (0..TYPES.len() as u32).map(|number| Build { source: &SOURCE, defines: vec![("TYPE", number)] })
}

/// Multiplies. The type must be one that [`supports`] names.
pub(crate) fn product(cx: &Context, p: &Product) -> Result<(), CudaError> {
    if p.rows == 0 || p.n_out == 0 {
        return Ok(());
    }
    let number = TYPES.iter().position(|&dtype| dtype == p.dtype).expect("a type that is supported");
    let kernel = cx.kernel_with(&SOURCE, &[("TYPE", number as u32)], "product")?;
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
    let grid = [params.n_out.div_ceil(WARPS), params.rows.div_ceil(ROWS), 1];
    cx.launch(kernel, Launch { grid, block: [WARPS * 32, 1, 1], shared_bytes: 0 }, &params)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::emulator;
    use kvant_codec::random::Random;

    /// Every type; rows that do not fill a tile, features that do not fill a block, a row of one block and of more than
    /// 32 groups; with and without bias and accumulation.
    #[test]
    fn products_equal_those_of_the_decoded_weights_in_f64() {
        let Some(cx) = emulator::context(80) else { return };
        let mut random = Random::new(5);
        for dtype in TYPES {
            let block = dtype.block_len();
            for (n_out, n_in, rows) in
                [(5, block.max(2), 1), (3, block * 33usize.div_ceil(block / 32 + 1), 3), (1, 256, 9)]
            {
                let mut values = vec![0.0; n_in];
                let row_bytes = dtype.row_bytes(n_in).unwrap();
                let (mut codes, mut w) = (vec![0; n_out * row_bytes], vec![0.0; n_out * n_in]);
                for (codes, w) in codes.chunks_mut(row_bytes).zip(w.chunks_mut(n_in)) {
                    random.fill_gaussian(&mut values, 0.1);
                    kvant_codec::encode(dtype, &values, codes).unwrap();
                    kvant_codec::decode(dtype, codes, w).unwrap();
                }
                let block = cx.arena().take(codes.len()).unwrap();
                cx.gpu().write(block.ptr(), &codes).unwrap();
                let mut fill = |len| {
                    let mut values = vec![0.0; len];
                    random.fill_gaussian(&mut values, 1.0);
                    values
                };
                let (x, bias, before) = (fill(rows * n_in), fill(n_out), fill(rows * n_out));
                let (on_x, on_bias) = (emulator::upload(&cx, &x), emulator::upload(&cx, &bias));
                for (with_bias, accumulate) in [(false, false), (true, true)] {
                    let y = match accumulate {
                        true => emulator::upload(&cx, &before),
                        false => emulator::poisoned(&cx, rows * n_out),
                    };
                    let bias_ptr = with_bias.then_some(on_bias.ptr());
                    let (w_ptr, x_ptr, y_ptr) = (block.ptr(), on_x.ptr(), y.ptr());
                    let p = Product {
                        w: w_ptr,
                        dtype,
                        n_out,
                        n_in,
                        x: x_ptr,
                        rows,
                        bias: bias_ptr,
                        y: y_ptr,
                        accumulate,
                    };
                    product(&cx, &p).unwrap();
                    let got = emulator::download(&cx, &y);
                    for (i, &got) in got.iter().enumerate() {
                        let (r, o) = (i / n_out, i % n_out);
                        let terms = w[o * n_in..][..n_in].iter().zip(&x[r * n_in..][..n_in]);
                        let terms = terms.map(|(&w, &x)| (f64::from(w), f64::from(x)));
                        // What a weight's rounding is relative to: the range of its block, 4 sigma at most.
                        let (sum, size) =
                            terms.fold((0.0, 0.0), |(sum, size), (w, x)| (sum + w * x, size + 0.4 * x.abs()));
                        let more = f64::from(bias[o]) * f64::from(u8::from(with_bias))
                            + f64::from(before[i]) * f64::from(u8::from(accumulate));
                        // A lane adds 32 products per group; 5 shuffles, bias and former value follow. Decoding may
                        // round twice more than the codec (fused or not), tq's butterflies five times.
                        let roundings = (n_in.div_ceil(1024) * 32 + 5 + 2 + 8) as f64;
                        let tol = roundings * f64::from(f32::EPSILON) * (size + more.abs());
                        let err = (f64::from(got) - sum - more).abs();
                        assert!(err <= tol, "{dtype}, [{n_out}, {n_in}], {rows} rows, value {i}: {got}");
                    }
                }
            }
        }
    }
}
