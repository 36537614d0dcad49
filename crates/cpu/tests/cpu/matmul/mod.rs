//! Compares every product with sums in f64 over weights that the codec decodes.

mod batch_invariance;
mod experts;
mod inputs;
mod unit;

use kvant_backend::{Activation, Backend, Input, Matrix, Norm, Output, WeightSource};
use kvant_codec::fields::{FieldSpec, Fields};
use kvant_codec::random::Random;
use kvant_codec::{ByteBook, DType, Rotation, decode, encode, tq3t};
use kvant_cpu::{CpuBuffer, CpuDevice, CpuMatrix, Isa};

const WEIGHTS: [DType; 29] = [
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
    DType::IQ4NL,
    DType::IQ4XS,
    DType::MXFP4,
    DType::NVFP4,
    DType::Q4G128,
    DType::FP8G128,
    DType::NVFP4G256,
    DType::NF4G64,
    DType::FP4G64,
    DType::IQ1,
    DType::IQ2,
    DType::IQ3,
    DType::IQ3X,
    DType::TQ3_1S,
    DType::TQ4_1S,
    DType::TQ3T,
];

fn gaussian(seed: u64, len: usize, sigma: f64) -> Vec<f32> {
    let mut values = vec![0.0; len];
    Random::new(seed).fill_gaussian(&mut values, sigma);
    values
}

/// Returns a random matrix on `device`, the values it decodes to, and its bytes.
fn encoded(
    device: &CpuDevice,
    dtype: DType,
    n_out: usize,
    n_in: usize,
    seed: u64,
) -> (CpuMatrix, Vec<f32>, Vec<u8>) {
    let mut values = gaussian(seed, n_out * n_in, 0.02);
    let mut bytes = vec![0; n_out * dtype.row_bytes(n_in).unwrap()];
    encode(dtype, &values, &mut bytes).unwrap();
    decode(dtype, &bytes, &mut values).unwrap();
    let source = WeightSource { dtype, n_out, n_in, bytes: bytes.clone().into() };
    (device.upload_matrix(source).unwrap(), values, bytes)
}

fn buffer(values: &[f32]) -> CpuBuffer {
    let mut buffer = CpuBuffer::zeroed(values.len()).unwrap();
    buffer.as_mut_slice().copy_from_slice(values);
    buffer
}

/// A sum and the maximum error of its evaluation.
#[derive(Clone, Copy)]
struct Want {
    pub value: f64,
    pub bound: f64,
}

#[track_caller]
fn assert_within(got: f32, want: Want, what: &dyn Fn() -> String) {
    let err = (f64::from(got) - want.value).abs();
    assert!(err <= want.bound, "{}: {got}, want {} within {}", what(), want.value, want.bound);
}

/// Returns one device for each kernel set of this CPU.
fn devices() -> Vec<CpuDevice> {
    Isa::available().into_iter().map(|isa| CpuDevice::new(isa, 2).unwrap()).collect()
}

/// Returns the products of `x` with `w`, `[rows, n_out]`.
fn project(device: &CpuDevice, w: &CpuMatrix, x: &[f32]) -> CpuBuffer {
    let rows = x.len() / w.n_in();
    let mut y = buffer(&vec![f32::NAN; rows * w.n_out()]);
    let input = Input { x: &buffer(x), norm: None, first_row: 0, rows };
    device.project(input, &mut [Output { w, bias: None, y: &mut y, accumulate: false }]).unwrap();
    y
}

/// Returns row lengths that end within, at and beyond units and chunks.
fn widths(dtype: DType) -> &'static [usize] {
    match dtype.block_len() {
        1 => &[1, 2, 7, 16, 129, 300],
        32 => &[32, 64, 96, 512, 1056],
        64 => &[64, 192, 512, 1216],
        128 => &[128, 256, 1152],
        _ => &[256, 512, 1280],
    }
}

/// `(n_out, rows)`: below, at and above panels, pairs of panels, tiles and row blocks.
const SHAPES: [(usize, usize); 12] = [
    (1, 1),
    (17, 1),
    (48, 2),
    (33, 3),
    (16, 5),
    (15, 7),
    (31, 8),
    (1, 9),
    (40, 12),
    (33, 33),
    (16, 96),
    (70, 100),
];

/// Returns whether `isa` multiplies weights of this type with activations in 8 bits: the reference
/// uses f32.
fn is_in_8_bits(isa: Isa, dtype: DType) -> bool {
    uses_panels(isa) && FieldSpec::of(dtype).is_some()
}

/// Returns whether `isa` reads weights from panels, and not in file order.
fn uses_panels(isa: Isa) -> bool {
    isa != Isa::Scalar
}

/// Returns whether weights of this type are rotated, and require rotated activations.
fn is_rotated(dtype: DType) -> bool {
    FieldSpec::is_rotated(dtype)
}

/// Returns the activations of coded kernels: steps of each block of 32, 127 of which are its
/// largest magnitude, and the values rounded to whole steps.
fn quantized(x: &[f32], rotates: bool) -> (Vec<f32>, Vec<f32>) {
    let mut values = x.to_vec();
    let (blocks, []) = values.as_chunks_mut::<32>() else { panic!("{} values, not whole blocks", x.len()) };
    let steps = blocks.iter_mut().map(|block| {
        if rotates {
            Rotation::tq().forward(block);
        }
        let max = block.iter().fold(0f32, |max, v| max.max(v.abs()));
        let (inverse, step) = if max == 0.0 { (0.0, 0.0) } else { (127.0 / max, max / 127.0) };
        block.iter_mut().for_each(|v| *v = (*v * inverse).round_ties_even() * step);
        step
    });
    (steps.collect(), values)
}

/// Returns the weights of a row as the kernels of the device multiply them: those of the rotated
/// formats in panels are rotated, and their levels are rounded to bytes.
fn effective_weights(isa: Isa, dtype: DType, row: &[u8], weights: &[f32]) -> Vec<f32> {
    let spec = FieldSpec::of(dtype).filter(|_| uses_panels(isa) && is_rotated(dtype));
    let Some(spec) = spec else { return weights.to_vec() };
    let Some(book) = spec.book else { return trellis_weights(row) };
    let bytes = ByteBook::of(&book);
    let unit = bytes.step * 128f32.sqrt();
    let blocks = row.chunks_exact(dtype.block_bytes()).flat_map(|block| {
        let fields = Fields::read(dtype, block);
        let d = [fields.scale.to_f32(), fields.min.to_f32()];
        let value = move |j: usize| {
            (f32::from(bytes.bytes[usize::from(fields.codes[j])]) - 128.0) * unit * d[j / spec.sub_len]
        };
        (0..spec.len).map(value)
    });
    blocks.collect()
}

/// Returns the weights of tq3t as the kernels multiply them: `level · d / 16`.
fn trellis_weights(row: &[u8]) -> Vec<f32> {
    let blocks = row.chunks_exact(tq3t::BYTES).flat_map(|block| {
        let fields = Fields::read(DType::TQ3T, block);
        let unit = fields.scale.to_f32() * tq3t::UNIT;
        let runs: Vec<_> = fields.codes[..tq3t::LEN].as_chunks().0.iter().flat_map(tq3t::levels).collect();
        runs.into_iter().map(move |level| f32::from(level) * unit)
    });
    blocks.collect()
}

/// Returns the sum of the magnitudes that a coded kernel adds for each weight: of its code and,
/// separately, of its minimum.
fn magnitudes(dtype: DType, row: &[u8], weights: &[f32]) -> Vec<f32> {
    let Some(spec) = FieldSpec::of(dtype) else { return weights.iter().map(|w| w.abs()).collect() };
    let blocks = row.chunks_exact(dtype.block_bytes()).zip(weights.chunks_exact(spec.len));
    let magnitudes = blocks.flat_map(|(block, weights)| {
        let fields = Fields::read(dtype, block);
        let min = move |j: usize| match spec.len {
            _ if !spec.has_min => 0.0,
            32 => fields.min.to_f32(),
            _ => -fields.min.to_f32() * f32::from(fields.sub_mins[j / spec.sub_len]),
        };
        weights.iter().enumerate().map(move |(j, w)| (w - min(j)).abs() + min(j).abs())
    });
    magnitudes.collect()
}

/// Returns the expected result of a kernel of the device, from its own arithmetic: 8-bit
/// activations for coded panels, f32 otherwise.
///
/// Products of codes are summed exactly. Then each sub-block's sum is scaled and added in f32, at
/// most two terms, one rounding each, after at most five roundings of scales and steps:
/// `n / 16 · 2 + 5` roundings, fewer than `n + 7`.
fn expected(weights: &[f32], magnitudes: &[f32], x: &[f32]) -> Want {
    let dot = |w: &[f32]| -> f64 { w.iter().zip(x).map(|(&w, &x)| f64::from(w) * f64::from(x)).sum() };
    let magnitude: f64 = magnitudes.iter().zip(x).map(|(&w, &x)| f64::from(w) * f64::from(x.abs())).sum();
    let roundings = (weights.len() + 7) as f64;
    Want { value: dot(weights), bound: roundings * f64::from(f32::EPSILON) * magnitude }
}

#[test]
fn every_kernel_set_equals_sums_in_f64_of_its_own_arithmetic() {
    for device in devices() {
        for dtype in WEIGHTS {
            let in_8_bits = is_in_8_bits(device.isa(), dtype);
            for (case, &n_in) in widths(dtype).iter().enumerate() {
                for (n_out, rows) in SHAPES {
                    let (w, weights, bytes) = encoded(&device, dtype, n_out, n_in, case as u64);
                    let x = gaussian(2, rows * n_in, 1.0);
                    let y = project(&device, &w, &x);
                    let row_bytes = bytes.len() / n_out;
                    let seen_rows = bytes.chunks_exact(row_bytes).zip(weights.chunks_exact(n_in)).map(
                        |(row, weights)| {
                            let weights = effective_weights(device.isa(), dtype, row, weights);
                            let magnitudes = magnitudes(dtype, row, &weights);
                            (weights, magnitudes)
                        },
                    );
                    let seen_rows: Vec<_> = seen_rows.collect();
                    for (r, x) in x.chunks(n_in).enumerate() {
                        let seen = if in_8_bits { quantized(x, is_rotated(dtype)).1 } else { x.to_vec() };
                        for (o, (weights, magnitudes)) in seen_rows.iter().enumerate() {
                            let want = expected(weights, magnitudes, &seen);
                            assert_within(y.as_slice()[r * n_out + o], want, &|| {
                                format!(
                                    "{} {dtype} {n_out}x{n_in}, row {r} of {rows}, out {o}",
                                    device.isa().name()
                                )
                            });
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn activations_in_8_bits_cost_at_most_half_a_step_of_each() {
    for device in devices() {
        for dtype in WEIGHTS {
            let (n_out, n_in, rows) = (20, 512, 10);
            let (w, weights, bytes) = encoded(&device, dtype, n_out, n_in, 21);
            let mut x = gaussian(22, rows * n_in, 1.0);
            x[5] = 60.0;
            let y = project(&device, &w, &x);
            let row_bytes = bytes.len() / n_out;
            for (r, x) in x.chunks(n_in).enumerate() {
                let steps = quantized(x, is_rotated(dtype)).0;
                for o in 0..n_out {
                    let (row, weights) = (&bytes[o * row_bytes..][..row_bytes], &weights[o * n_in..][..n_in]);
                    let mut want = expected(weights, &magnitudes(dtype, row, weights), x);
                    if is_in_8_bits(device.isa(), dtype) {
                        let seen = effective_weights(device.isa(), dtype, row, weights);
                        // Half a step, and the rounding of the step.
                        let half = |i: usize| f64::from(steps[i / 32]) * 0.500_1;
                        let halves = seen.iter().enumerate().map(|(i, &w)| half(i) * f64::from(w.abs()));
                        want.bound += halves.sum::<f64>();
                    }
                    if is_rotated(dtype) {
                        want.bound += rotated_bound(dtype, row, weights, x);
                    }
                    assert_within(y.as_slice()[r * n_out + o], want, &|| {
                        format!("{} {dtype}, row {r}, out {o}", device.isa().name())
                    });
                }
            }
        }
    }
}

/// Returns the loss of the levels of a rotated format as bytes, at most half a step of 1/96 of the
/// largest, and of ten butterflies of the codec and five of the kernel, an addition each, of 32
/// values.
fn rotated_bound(dtype: DType, row: &[u8], weights: &[f32], x: &[f32]) -> f64 {
    let spec = FieldSpec::of(dtype).expect("a rotated format has fields");
    let largest = spec.book.map_or(0.0, |book| book.levels().iter().fold(0f32, |max, l| max.max(l.abs())));
    let blocks = row
        .chunks_exact(dtype.block_bytes())
        .zip(weights.chunks_exact(spec.len))
        .zip(x.chunks_exact(spec.len));
    let bounds = blocks.map(|((block, weights), x)| {
        let fields = Fields::read(dtype, block);
        let d = fields.scale.to_f32().abs().max(fields.min.to_f32().abs());
        let norm = |values: &[f32]| values.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>().sqrt();
        // Cauchy–Schwarz: 32 errors of half a step against a block of x, whose length a rotation
        // preserves.
        let levels = f64::from(d * largest) / 96.0 / 2.0 * 32f64.sqrt() * norm(x);
        levels + 15.0 * 32.0 * f64::from(f32::EPSILON) * norm(weights) * norm(x)
    });
    bounds.sum()
}

/// The largest sums of codes and activations: a kernel that saturates or wraps is off by far more.
#[test]
fn extreme_codes_and_activations_do_not_saturate() {
    for device in devices() {
        for (dtype, scales) in [
            (DType::Q8_0, &[0][..]),
            (DType::Q4_0, &[0]),
            (DType::Q4_1, &[0, 2]),
            (DType::Q5_0, &[0]),
            (DType::Q5_1, &[0, 2]),
            (DType::Q2K, &[80, 82]),
            (DType::Q3K, &[108]),
            (DType::Q4K, &[0, 2]),
            (DType::Q5K, &[0, 2]),
            (DType::Q6K, &[208]),
            (DType::IQ4NL, &[0]),
            (DType::IQ4XS, &[0]),
            (DType::MXFP4, &[]),
            (DType::NVFP4, &[]),
            (DType::Q4G128, &[0]),
            (DType::NVFP4G256, &[]),
            (DType::IQ1, &[108]),
            (DType::IQ2, &[108]),
            (DType::IQ3, &[0]),
            (DType::IQ3X, &[0]),
            (DType::TQ3_1S, &[0, 2]),
            (DType::TQ4_1S, &[0, 2]),
            (DType::TQ3T, &[0]),
        ] {
            for (fill, sign) in
                [(0x00, 1.0), (0x7f, 1.0), (0x80, 1.0), (0x80, -1.0), (0xff, 1.0), (0xff, -1.0)]
            {
                let (n_out, n_in) = (16, 512);
                let mut bytes = vec![fill; n_out * dtype.row_bytes(n_in).unwrap()];
                for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
                    // 2^-7, exactly.
                    scales.iter().for_each(|&at| block[at..at + 2].copy_from_slice(&0x2000u16.to_le_bytes()));
                    match dtype {
                        DType::MXFP4 => block[0] = 127 - 7,
                        // The smallest normal E4M3 is 2^-6.
                        DType::NVFP4 => block[..4].fill(1 << 3),
                        DType::NVFP4G256 => {
                            block[..4].copy_from_slice(&0.5f32.to_le_bytes());
                            block[4..20].fill(1 << 3);
                        }
                        // A zero of 16 is the largest.
                        DType::Q4G128 => block[2] = fill.min(16),
                        _ => {}
                    }
                }
                let mut weights = vec![0.0; n_out * n_in];
                decode(dtype, &bytes, &mut weights).unwrap();
                let source = WeightSource { dtype, n_out, n_in, bytes: bytes.clone().into() };
                let w = device.upload_matrix(source).unwrap();
                for rows in [1, 9] {
                    let mut x = vec![sign * 127.0; rows * n_in];
                    if is_rotated(dtype) {
                        Rotation::tq().inverse(&mut x);
                    }
                    let seen = if is_in_8_bits(device.isa(), dtype) {
                        quantized(&x[..n_in], is_rotated(dtype)).1
                    } else {
                        x[..n_in].to_vec()
                    };
                    let row = &bytes[..dtype.row_bytes(n_in).unwrap()];
                    let weights = effective_weights(device.isa(), dtype, row, &weights[..n_in]);
                    let want = expected(&weights, &magnitudes(dtype, row, &weights), &seen);
                    for &y in project(&device, &w, &x).as_slice() {
                        assert_within(y, want, &|| {
                            format!(
                                "{} {dtype} codes {fill:#x}, activations {}",
                                device.isa().name(),
                                sign * 127.0
                            )
                        });
                    }
                }
            }
        }
    }
}

#[test]
fn products_propagate_non_finite_values() {
    for device in devices() {
        for dtype in [DType::Q4_0, DType::Q6K, DType::NVFP4, DType::TQ3_1S, DType::TQ3T, DType::F16] {
            let (w, _, _) = encoded(&device, dtype, 3, 256, 32);
            for bad in [f32::NAN, f32::INFINITY] {
                let mut x = gaussian(33, 256, 1.0);
                x[77] = bad;
                assert!(project(&device, &w, &x).as_slice().iter().all(|y| !y.is_finite()), "{dtype} {bad}");
            }
        }
    }
}

#[test]
fn bias_norm_first_row_and_accumulation_are_applied_in_order() {
    for (device, rows) in devices().iter().flat_map(|device| [(device, 2), (device, 11)]) {
        let (n_in, n_out) = (64, 20);
        let (w, ..) = encoded(device, DType::F32, n_out, n_in, 3);
        let (v, ..) = encoded(device, DType::Q4_0, 7, n_in, 4);
        let (t, ..) = encoded(device, DType::TQ4_1S, 9, n_in, 4);
        let x = buffer(&gaussian(5, (rows + 1) * n_in, 1.0));
        let (gain, bias) = (buffer(&gaussian(6, n_in, 1.0)), buffer(&gaussian(7, n_out, 1.0)));
        let norm = Norm { weight: &gain, eps: 1e-5 };
        let old = gaussian(8, rows * n_out, 1.0);
        let mut ys =
            [buffer(&old), buffer(&old), buffer(&vec![f32::NAN; rows * 7]), buffer(&vec![0.0; rows * 9])];
        let mut plain = buffer(&old);
        let [a, b, c, d] = &mut ys;
        let mut outputs = [
            Output { w: &w, bias: Some(&bias), y: a, accumulate: true },
            Output { w: &w, bias: Some(&bias), y: b, accumulate: false },
            Output { w: &v, bias: None, y: c, accumulate: false },
            Output { w: &t, bias: None, y: d, accumulate: true },
            Output { w: &w, bias: None, y: &mut plain, accumulate: true },
        ];
        device.project(Input { x: &x, norm: Some(norm), first_row: 1, rows }, &mut outputs).unwrap();

        // Accumulating into zeros gives the norm itself.
        let mut normed = buffer(&vec![0.0; rows * n_in]);
        device.add_normed(&mut normed, &buffer(&x.as_slice()[n_in..]), rows, norm).unwrap();
        let normed = normed.as_slice();
        let products = project(device, &w, normed);
        for (i, product) in products.as_slice().iter().enumerate() {
            let with_bias = product + bias.as_slice()[i % n_out];
            assert_eq!(ys[0].as_slice()[i], old[i] + with_bias);
            assert_eq!(ys[1].as_slice()[i], with_bias);
            assert_eq!(plain.as_slice()[i], old[i] + product);
        }
        assert_eq!(ys[2].as_slice(), project(device, &v, normed).as_slice());
        assert_eq!(ys[3].as_slice(), project(device, &t, normed).as_slice());
    }
}

#[test]
fn the_gated_ffn_equals_its_unfused_parts() {
    for device in devices() {
        for (gate, up) in [
            (DType::Q8_0, DType::Q8_0),
            (DType::Q4K, DType::Q4K),
            (DType::F16, DType::F16),
            (DType::Q4K, DType::Q6K),
            (DType::Q8_0, DType::TQ4_1S),
            (DType::IQ4XS, DType::MXFP4),
            (DType::IQ2, DType::IQ3X),
            (DType::TQ3_1S, DType::TQ3_1S),
        ] {
            for (n_ff, rows) in [(40, 1), (33, 3), (17, 9), (48, 100)] {
                let n_in = 256;
                let (gate, ..) = encoded(&device, gate, n_ff, n_in, 9);
                let (up, ..) = encoded(&device, up, n_ff, n_in, 10);
                let x = gaussian(11, rows * n_in, 10.0);
                let (g, u) = (project(&device, &gate, &x), project(&device, &up, &x));
                let mut y = buffer(&vec![f32::NAN; rows * n_ff]);
                let input = Input { x: &buffer(&x), norm: None, first_row: 0, rows };
                device.gated_ffn(input, Activation::Silu, &gate, &up, &mut y).unwrap();
                for ((&g, &u), &y) in g.as_slice().iter().zip(u.as_slice()).zip(y.as_slice()) {
                    let (g, u) = (f64::from(g), f64::from(u));
                    let value = g / (1.0 + (-g).exp()) * u;
                    // exp within 3 roundings, then a sum, a quotient and a product.
                    let want = Want { value, bound: 6.0 * f64::from(f32::EPSILON) * value.abs() };
                    assert_within(y, want, &|| format!("{} {rows} rows", device.isa().name()));
                }
            }
        }
    }
}

#[test]
fn wrong_shapes_are_refused() {
    let device = CpuDevice::new(Isa::Scalar, 2).unwrap();
    let source =
        |dtype, n_out, n_in, len: usize| WeightSource { dtype, n_out, n_in, bytes: vec![0; len].into() };
    assert!(device.upload_matrix(source(DType::Q4_0, 2, 33, 36)).is_err());
    assert!(device.upload_matrix(source(DType::Q4_0, 2, 32, 35)).is_err());
    assert!(device.upload_matrix(source(DType::F32, 2, 0, 0)).is_err());
    assert!(device.upload_matrix(source(DType::Turbo3, 1, 128, 50)).is_err());

    let (w, ..) = encoded(&device, DType::F32, 4, 8, 12);
    let (other, ..) = encoded(&device, DType::F32, 4, 9, 12);
    let (x, bias) = (buffer(&[0.0; 16]), buffer(&[0.0; 5]));
    let mut y = buffer(&[0.0; 8]);
    let mut project = |w, bias, first_row, rows| {
        let input = Input { x: &x, norm: None, first_row, rows };
        device.project(input, &mut [Output { w, bias, y: &mut y, accumulate: false }])
    };
    assert!(project(&w, None, 0, 2).is_ok());
    assert!(project(&w, None, 0, 0).is_ok());
    assert!(project(&w, None, 1, 2).is_err());
    assert!(project(&w, None, 0, 3).is_err());
    assert!(project(&other, None, 0, 2).is_err());
    assert!(project(&w, Some(&bias), 0, 1).is_err());
}

#[test]
fn embedding_rows_are_what_the_codec_decodes() {
    for device in devices() {
        for dtype in WEIGHTS {
            let (table, values, _) = encoded(&device, dtype, 35, 256, 13);
            let mut out = buffer(&vec![f32::NAN; 3 * 256]);
            device.embed(&table, &[34, 0, 16], 1.0, &mut out).unwrap();
            for (out, row) in out.as_slice().chunks(256).zip([34, 0, 16]) {
                assert_eq!(out, &values[row * 256..][..256], "{dtype} row {row}");
            }
            assert!(device.embed(&table, &[35], 1.0, &mut out).is_err());
        }
    }
}
