//! Products held to plain sums in f64.

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

/// Inputs that 8 bits hold exactly: whole numbers with a 127 in each group.
fn whole(random: &mut Random, len: usize) -> Vec<f32> {
    (0..len).map(|i| if i % 32 == 5 { 127.0 } else { f32::from(random.bits() as i8).max(-127.0) }).collect()
}

fn gaussian(random: &mut Random, len: usize) -> Vec<f32> {
    let mut values = vec![0.0; len];
    random.fill_gaussian(&mut values, 1.0);
    values
}

/// What the kernel that is chosen may err by, beside the roundings of f32, for one output: the row `w` `[n_in]` times
/// the input `x` `[n_in]`.
fn rounding_of_the_operands(dtype: DType, rows: usize, w: &[f32], x: &[f32]) -> f64 {
    let squares = |v: &[f32]| v.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>();
    if rows >= MANY_ROWS {
        // Both factors are rounded to 11 bits.
        let products = w.iter().zip(x).map(|(&w, &x)| f64::from(w * x).abs());
        return products.sum::<f64>() * f64::from(2.0f32.powi(-10));
    }
    if number(dtype) < FLOATS {
        return 0.0;
    }
    // Inputs are rounded to steps of max / 127, which is below 5.5 / 127 for unit Gaussians, and bytes of a codebook to
    // steps of 2.8 / 127 in units of the weights' deviation, 0.1 (twice that for a block's scale at most). The errors
    // are as good as independent: six standard deviations, of step / sqrt(12) each.
    let is_book = matches!(dtype, DType::TQ3_1S | DType::TQ4_1S);
    let book_step = if is_book { 0.2 * 2.8 / 127.0 } else { 0.0 };
    let variance = squares(w) * (5.5f64 / 127.0).powi(2) + squares(x) * f64::powi(book_step, 2);
    6.0 * (variance / 12.0).sqrt()
}

/// Holds products of unit Gaussians to plain sums in f64.
fn check(cx: &Context, random: &mut Random, dtype: DType, shape: [usize; 2], rows: usize) {
    let x = gaussian(random, rows * shape[1]);
    let tolerance = |w: &[f32], x: &[f32]| rounding_of_the_operands(dtype, rows, w, x);
    check_inputs(cx, random, dtype, shape, &x, &tolerance);
}

/// Holds one product, with and without bias and accumulation, to plain sums in f64, but for the roundings of f32 and
/// what `tolerance` tells for a row of weights and one of inputs.
fn check_inputs(
    cx: &Context,
    random: &mut Random,
    dtype: DType,
    shape: [usize; 2],
    x: &[f32],
    tolerance: &dyn Fn(&[f32], &[f32]) -> f64,
) {
    let [n_out, n_in] = shape;
    let rows = x.len() / n_in;
    let (codes, w) = weights(random, dtype, shape);
    let on_w = cx.arena().take(codes.len()).unwrap();
    cx.gpu().write(on_w.ptr(), &codes).unwrap();
    let (biases, before) = (gaussian(random, n_out), gaussian(random, rows * n_out));
    let (on_x, on_bias) = (emulator::upload(cx, x), emulator::upload(cx, &biases));
    for with_more in [false, true] {
        let y = match with_more {
            true => emulator::upload(cx, &before),
            false => emulator::poisoned(cx, rows * n_out),
        };
        let bias = with_more.then_some(on_bias.ptr());
        let p = Product { w: on_w.ptr(), dtype, n_out, bias, y: y.ptr(), accumulate: with_more };
        product(cx, &mut Operand::new(on_x.ptr(), [rows, n_in], None), &p).unwrap();
        for (i, got) in emulator::download(cx, &y).into_iter().enumerate() {
            let (r, o) = (i / n_out, i % n_out);
            let (w, x) = (&w[o * n_in..][..n_in], &x[r * n_in..][..n_in]);
            // What the error of a weight is relative to: the range of its block, 4 sigma at most.
            let (sum, size) = w.iter().zip(x).fold((0.0, 0.0), |(sum, size), (&w, &x)| {
                (sum + f64::from(w) * f64::from(x), size + 0.4 * f64::from(x).abs())
            });
            let more = if with_more { f64::from(biases[o]) + f64::from(before[i]) } else { 0.0 };
            // In f32: a lane adds 32 products per group; 5 shuffles, bias and former value follow. Decoding may
            // round twice more than the codec (fused or not), tq's butterflies five times.
            let roundings = (n_in.div_ceil(1024) * 32 + 5 + 2 + 8) as f64;
            let tol = roundings * f64::from(f32::EPSILON) * (size + more.abs());
            let tol = tol + tolerance(w, x);
            let err = (f64::from(got) - sum - more).abs();
            assert!(err <= tol, "{dtype}, {shape:?}, {rows} rows, value {i}: {got} for {}", sum + more);
        }
    }
}

/// Every type; rows that do not fill a tile, features that do not fill a block, a row of one block and of more than
/// 32 groups.
#[test]
fn few_rows_equal_plain_sums_but_for_the_rounding_of_inputs_to_bytes() {
    let Some(cx) = emulator::context(80) else { return };
    let mut random = Random::new(5);
    for dtype in TYPES {
        let block = dtype.block_len();
        check(&cx, &mut random, dtype, [17, block.max(2)], 1);
        check(&cx, &mut random, dtype, [3, block * 1280usize.div_ceil(block)], 3);
        check(&cx, &mut random, dtype, [1, 256], 9);
    }
    check(&cx, &mut random, DType::F16, [2, 1057], 16);
}

#[test]
fn whole_numbers_times_codes_are_exact_but_for_the_scales() {
    let Some(cx) = emulator::context(80) else { return };
    let mut random = Random::new(7);
    // A codebook's bytes are no whole numbers, and its inputs are rotated.
    for &dtype in &TYPES[FLOATS..TYPES.len() - 2] {
        let x = whole(&mut random, 2 * 512);
        check_inputs(&cx, &mut random, dtype, [5, 512], &x, &|_, _| 0.0);
    }
}

#[test]
fn many_rows_equal_plain_sums_but_for_the_rounding_to_f16() {
    let Some(cx) = emulator::context(80) else { return };
    let mut random = Random::new(6);
    for dtype in TYPES {
        check(&cx, &mut random, dtype, [65, dtype.block_len().max(32)], 17);
        check(&cx, &mut random, dtype, [3, 512], 66);
    }
    check(&cx, &mut random, DType::F16, [64, 41], 64);
    check(&cx, &mut random, DType::Q4_0, [130, 96], 129);
}
