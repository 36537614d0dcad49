//! Every type, few and many rows, against plain sums in f64 of the decoded weights.

use super::*;
use crate::emulator;
use crate::norm::NormParts;
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

/// What inputs are like.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Law {
    Gaussian,
    /// Whole numbers up to 127, which is among any 32, once rotated for the types that rotate: bytes hold them.
    Bytes,
}

impl Law {
    fn draw(self, random: &mut Random, dtype: DType, len: usize) -> Vec<f32> {
        if self == Self::Gaussian {
            return gaussian(random, len);
        }
        let mut values: Vec<f32> =
            (0..len).map(|_| (random.bits() >> 40) as u8 as i8).map(f32::from).collect();
        for group in values.chunks_mut(32) {
            group.iter_mut().for_each(|v| *v = v.max(-127.0));
            group[0] = 127.0;
            if is_rotated(dtype) {
                Rotation::tq().inverse(group);
            }
        }
        values
    }
}

/// What a product may be off by, and what it is.
#[derive(Clone, Copy)]
struct Exact {
    sum: f64,
    tol: f64,
}

/// The product of a row of weights with a row of inputs in f64, and what the kernel for so many rows may differ by.
fn exact(dtype: DType, law: Law, rows: usize, w: &[f32], x: &[f64]) -> Exact {
    let (mut w, mut x) = (w.iter().map(|&w| f64::from(w)).collect::<Vec<_>>(), x.to_vec());
    let sum = w.iter().zip(&x).map(|(w, x)| w * x).sum();
    if is_rotated(dtype) {
        // They are rounded where they are rotated.
        for group in w.chunks_mut(32).chain(x.chunks_mut(32)) {
            let mut turned: Vec<f32> = group.iter().map(|&v| v as f32).collect();
            Rotation::tq().forward(&mut turned);
            group.iter_mut().zip(turned).for_each(|(v, t)| *v = f64::from(t));
        }
    }
    let mut tol = 0.0;
    for (w, x) in w.chunks(32).zip(x.chunks(32)) {
        let largest = x.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
        // Inputs are off by half a step; weights by roundings that are relative to the range of their block (4 sigma at
        // most), levels of a codebook by half of 1/32512 of that.
        let rounds = has_gate(dtype, rows) && law == Law::Gaussian;
        let of_inputs = if rounds { largest / 254.0 } else { 0.0 };
        let of_levels = if is_rotated(dtype) { 0.5 / 32_512.0 } else { 0.0 };
        let of_halves = if rows < MANY_ROWS { 0.0 } else { 2.0 * 2.0f64.powi(-11) };
        // In f32: a lane adds 32 products per 1,024; 5 shuffles, bias and former value follow. Decoding may round twice
        // more than the codec (fused or not), tq's butterflies five times.
        let roundings = (w.len().max(x.len()) + 32 + 5 + 2 + 8) as f64 * f64::from(f32::EPSILON);
        for (w, x) in w.iter().zip(x) {
            tol += w.abs() * of_inputs + 0.4 * x.abs() * (of_levels + of_halves + roundings);
        }
    }
    Exact { sum, tol }
}

/// A matrix on the device and what it holds.
struct Weights {
    dtype: DType,
    shape: [usize; 2],
    values: Vec<f32>,
    block: crate::memory::Block,
}

impl Weights {
    fn new(cx: &Context, random: &mut Random, dtype: DType, shape: [usize; 2]) -> Self {
        let (codes, values) = weights(random, dtype, shape);
        Self { dtype, shape, values, block: upload(cx, dtype, shape[1], &codes).unwrap() }
    }

    fn row(&self, out: usize) -> &[f32] {
        &self.values[out * self.shape[1]..][..self.shape[1]]
    }

    /// The product into `y`.
    fn product(&self, y: DevicePtr) -> Product {
        let (w, dtype, n_out) = (self.block.ptr(), self.dtype, self.shape[0]);
        Product { w, dtype, n_out, up: None, bias: None, y, accumulate: false }
    }
}

fn as_f64(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&v| f64::from(v)).collect()
}

/// Holds one product, with and without bias and accumulation, to plain sums in f64.
fn check(cx: &Context, random: &mut Random, law: Law, dtype: DType, shape: [usize; 2], rows: usize) {
    let [n_out, n_in] = shape;
    let w = Weights::new(cx, random, dtype, shape);
    let (x, bias) = (law.draw(random, dtype, rows * n_in), gaussian(random, n_out));
    let before = gaussian(random, rows * n_out);
    let (on_x, on_bias) = (emulator::upload(cx, &x), emulator::upload(cx, &bias));
    for with_more in [false, true] {
        let y = match with_more {
            true => emulator::upload(cx, &before),
            false => emulator::poisoned(cx, rows * n_out),
        };
        let mut p = w.product(y.ptr());
        (p.bias, p.accumulate) = (with_more.then_some(on_bias.ptr()), with_more);
        product(cx, &mut Operand::new(on_x.ptr(), [rows, n_in], None), &p).unwrap();
        for (i, got) in emulator::download(cx, &y).into_iter().enumerate() {
            let (r, o) = (i / n_out, i % n_out);
            let Exact { sum, tol } = exact(dtype, law, rows, w.row(o), &as_f64(&x[r * n_in..][..n_in]));
            let more = if with_more { f64::from(bias[o]) + f64::from(before[i]) } else { 0.0 };
            let tol = tol + 4.0 * f64::from(f32::EPSILON) * (sum.abs() + 4.0 * more.abs());
            let err = (f64::from(got) - sum - more).abs();
            assert!(
                err <= tol,
                "{dtype}, {law:?}, {shape:?}, {rows} rows, value {i}: {got} for {}",
                sum + more
            );
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
        check(&cx, &mut random, Law::Bytes, dtype, [17, block.max(2)], 1);
        check(&cx, &mut random, Law::Bytes, dtype, [2, 512], 2);
        check(&cx, &mut random, Law::Gaussian, dtype, [3, block * 1280usize.div_ceil(block)], 3);
        check(&cx, &mut random, Law::Gaussian, dtype, [1, 256], 9);
    }
    check(&cx, &mut random, Law::Gaussian, DType::F16, [2, 1057], 16);
    check(&cx, &mut random, Law::Gaussian, DType::Q4_0, [33, 2080], 2);
    check(&cx, &mut random, Law::Gaussian, DType::Q6K, [15, 2304], 8);
}

#[test]
fn many_rows_equal_plain_sums_but_for_the_rounding_to_f16() {
    let Some(cx) = emulator::context(80) else { return };
    let mut random = Random::new(6);
    for dtype in TYPES {
        check(&cx, &mut random, Law::Gaussian, dtype, [65, dtype.block_len().max(32)], 17);
        check(&cx, &mut random, Law::Gaussian, dtype, [3, 512], 66);
    }
    check(&cx, &mut random, Law::Gaussian, DType::F16, [64, 41], 64);
    check(&cx, &mut random, Law::Gaussian, DType::Q4_0, [130, 96], 129);
}

/// Rows with values of hundreds of thousands beside ones of every day, tiny rows, and a row of zeros.
#[test]
fn inputs_of_any_size_keep_their_precision_on_tensor_cores() {
    let Some(cx) = emulator::context(80) else { return };
    let mut random = Random::new(9);
    let (rows, n_in, n_out) = (20, 256, 3);
    let w = Weights::new(&cx, &mut random, DType::Q8_0, [n_out, n_in]);
    let mut x = gaussian(&mut random, rows * n_in);
    for (r, row) in x.chunks_mut(n_in).enumerate() {
        let size = [1.0, 1e-6, 3e6, 0.0, 1e30, 1e-30][r % 6];
        row.iter_mut().for_each(|v| *v *= size);
        // An outlier.
        row[7] *= 1e3;
    }
    let on_x = emulator::upload(&cx, &x);
    let y = emulator::poisoned(&cx, rows * n_out);
    product(&cx, &mut Operand::new(on_x.ptr(), [rows, n_in], None), &w.product(y.ptr())).unwrap();
    for (i, got) in emulator::download(&cx, &y).into_iter().enumerate() {
        let x = as_f64(&x[i / n_out * n_in..][..n_in]);
        let Exact { sum, tol } = exact(DType::Q8_0, Law::Gaussian, rows, w.row(i % n_out), &x);
        // Beside an outlier of 2^12 times their size halves round by less than 2^-24 of it.
        let largest = x.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
        let tol = tol + n_in as f64 * 0.4 * largest * 2f64.powi(-24);
        let err = (f64::from(got) - sum).abs();
        assert!(err <= tol, "row {}, feature {}: {got} for {sum}", i / n_out, i % n_out);
    }
}

/// `x` normalised, `[rows, n_in]`, in f64.
fn normalised(x: &[f32], weight: &[f32], eps: f32) -> Vec<f64> {
    let row = |x: &[f32]| {
        let mean = x.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / x.len() as f64;
        let factor = 1.0 / (mean + f64::from(eps)).sqrt();
        x.iter().zip(weight).map(|(&x, &w)| f64::from(x) * f64::from(w) * factor).collect::<Vec<_>>()
    };
    x.chunks(weight.len()).flat_map(row).collect()
}

#[test]
fn a_norm_and_a_gate_are_folded_into_the_product() {
    let Some(cx) = emulator::context(80) else { return };
    let mut random = Random::new(7);
    for dtype in TYPES.into_iter().filter(|&dtype| is_coded(dtype)) {
        for (n_out, rows) in [(9, 1), (1, 3), (7, 10)] {
            let n_in = if rows == 3 { 1280 } else { 256 };
            let [gate, up] = [0; 2].map(|_| Weights::new(&cx, &mut random, dtype, [n_out, n_in]));
            let (x, weight) = (gaussian(&mut random, rows * n_in), gaussian(&mut random, n_in));
            let (on_x, on_weight) = (emulator::upload(&cx, &x), emulator::upload(&cx, &weight));
            let y = emulator::poisoned(&cx, rows * n_out);
            let norm = Some(NormParts { weight: on_weight.ptr(), eps: 1e-5 });
            let p = Product { up: Some((up.block.ptr(), Activation::Silu)), ..gate.product(y.ptr()) };
            product(&cx, &mut Operand::new(on_x.ptr(), [rows, n_in], norm), &p).unwrap();
            let x = normalised(&x, &weight, 1e-5);
            for (i, got) in emulator::download(&cx, &y).into_iter().enumerate() {
                let x = &x[i / n_out * n_in..][..n_in];
                let [g, u] = [&gate, &up].map(|w| exact(dtype, Law::Gaussian, rows, w.row(i % n_out), x));
                let silu = g.sum / (1.0 + (-g.sum).exp());
                // The slope of silu is below 1.1; expf, a sum, a quotient and two products.
                let of_silu = 1.1 * g.tol + 8.0 * f64::from(f32::EPSILON) * silu.abs();
                let tol = of_silu * (u.sum.abs() + u.tol) + silu.abs() * u.tol;
                let err = (f64::from(got) - silu * u.sum).abs();
                assert!(
                    err <= tol,
                    "{dtype}, {n_out} x {n_in}, {rows} rows, {i}: {got} for {}",
                    silu * u.sum
                );
            }
        }
    }
}

#[test]
fn a_bad_number_among_the_inputs_is_seen_in_its_row_alone() {
    let Some(cx) = emulator::context(80) else { return };
    let mut random = Random::new(8);
    for dtype in [DType::Q4_0, DType::Q8_0, DType::Q6K, DType::TQ4_1S] {
        let w = Weights::new(&cx, &mut random, dtype, [2, 256]);
        let mut x = gaussian(&mut random, 4 * 256);
        (x[100], x[256 + 200]) = (f32::NAN, f32::NEG_INFINITY);
        x[512..768].fill(1e-40);
        let on_x = emulator::upload(&cx, &x);
        let run = |first_row: usize, rows| {
            let y = emulator::poisoned(&cx, 2 * rows);
            let x = on_x.ptr() + (first_row * 256 * size_of::<f32>()) as u64;
            product(&cx, &mut Operand::new(x, [rows, 256], None), &w.product(y.ptr())).unwrap();
            emulator::download(&cx, &y)
        };
        let at_once = run(0, 4);
        let one_by_one: Vec<f32> = (0..4).flat_map(|row| run(row, 1)).collect();
        for y in [at_once, one_by_one] {
            assert!(y[..4].iter().all(|y| !y.is_finite()), "{dtype}: {y:?}");
            assert!(y[4..6].iter().all(|y| y.abs() <= 1e-36), "{dtype}: {y:?}");
            assert!(y[6..].iter().all(|y| y.is_finite()), "{dtype}: {y:?}");
        }
    }
}

#[test]
fn levels_of_two_bytes_are_within_half_a_unit() {
    for (dtype, book) in [(DType::TQ3_1S, Codebook::TQ3), (DType::TQ4_1S, Codebook::GAUSS4)] {
        let levels = Levels::of(dtype);
        for (i, &level) in book.levels().iter().enumerate() {
            let byte = |table: [u32; 4]| f32::from((table[i / 4] >> (i % 4 * 8)) as u8 as i8);
            let got = (256.0 * byte(levels.high) + byte(levels.low)) * levels.unit;
            assert!((got - level).abs() <= 0.501 * levels.unit, "{dtype} {i}: {got} for {level}");
        }
    }
}
