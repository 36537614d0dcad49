//! Attention beyond the conformance suites: threads, and sums over thousands of tokens.

use kvant_codec::{DType, Levels};
use kvant_conformance::kv::{Batch, Scaled, Shape, Tokens};
use kvant_conformance::weights::gaussian;
use kvant_conformance::{Arithmetic, Attention, DeviceUnderTest};
use kvant_cpu::{CpuDevice, Isa};

use crate::matrix_sets;

fn subject(isa: Isa, n_threads: usize) -> DeviceUnderTest<CpuDevice> {
    DeviceUnderTest::new("cpu", CpuDevice::new(isa, n_threads).unwrap(), Arithmetic::Float, Attention::Exact)
}

/// Returns the attention of the last `rows` tokens, fed in one step.
fn attended(subject: &DeviceUnderTest<CpuDevice>, tokens: &Tokens, rows: usize, q: &[f32]) -> Vec<f32> {
    let mut batch = Batch::fed(subject, tokens, tokens.len() - rows, 100).unwrap();
    batch.append(&[rows]).unwrap();
    batch.attend(q, &|| "attend".to_owned()).unwrap()
}

#[test]
fn bits_do_not_depend_on_the_number_of_threads() {
    for isa in Isa::available() {
        for (k, v) in [(DType::Turbo3, DType::Turbo3), (DType::F16, DType::Q4_0), (DType::BF16, DType::F32)] {
            for (n, rows, window) in
                [(700, 150, None), (90, 90, None), (1100, 40, Some(600)), (2100, 1, None)]
            {
                let shape = Shape { k_head_dim: 96, window, ..Shape::new(k, v) };
                let tokens = Tokens::gaussian(shape, n, 3);
                let q = gaussian(4, rows * shape.n_heads() * shape.k_head_dim, 1.0);
                let run = |n_threads| attended(&subject(isa, n_threads), &tokens, rows, &q);
                let alone = run(1);
                assert!(alone.iter().all(|x| x.is_finite()), "{isa:?} {shape:?}");
                for n_threads in [2, 3] {
                    let same = run(n_threads).iter().zip(&alone).all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(same, "{isa:?} {shape:?}, {rows} rows of {n}, {n_threads} threads");
                }
            }
        }
    }
}

/// One token outweighs each other one 60,000 times, but all of those together only ten times.
/// Weights are rounded relative to the largest of their block of 128, so only those in the block of
/// the large one are rounded away: at most half a unit each, 127 / 2 / MAX_SPLIT of the output, or,
/// where they are dithered, together a unit of 1 / 255 (AVX2 1 / 127).
#[test]
fn thousands_of_tiny_weights_beside_a_large_one_keep_their_mass() {
    const TOKENS: usize = 6144;
    for v in DType::KV {
        for large in [0, 3000, TOKENS - 1] {
            let shape = Shape::new(DType::F32, v);
            let (k_dim, v_dim) = (shape.k_head_dim, shape.v_head_dim);
            let mut keys = vec![0.0; TOKENS * k_dim];
            keys[large * k_dim] = 11.0;
            let value = |i: usize| if i / v_dim == large { 0.0 } else { 1.0 + (i % v_dim % 3) as f32 };
            let tokens = Tokens::new(shape, keys, (0..TOKENS * v_dim).map(value).collect());
            let mut q = vec![0.0; shape.n_heads() * k_dim];
            q.iter_mut().step_by(k_dim).for_each(|x| *x = (k_dim as f32).sqrt());
            let run = |isa| attended(&subject(isa, 2), &tokens, 1, &q);
            let want = run(Isa::Scalar);
            assert!(want.iter().sum::<f32>() > 0.08 * 2.0 * want.len() as f32, "tiny weights have mass");
            for isa in Isa::available().into_iter().skip(1) {
                let code = v.code();
                // The emulated matrix unit works beside AVX2.
                let lost = match (isa.name(), v) {
                    ("avx2" | "soft", DType::Turbo2 | DType::Turbo3 | DType::Turbo2T) => 1.0 / 127.0,
                    ("avx2" | "soft", _) => 128.0 / 2.0 / 32767.0,
                    _ if code.is_some_and(|code| !matches!(code.levels, Levels::Steps { .. })) => 1.0 / 255.0,
                    _ => 128.0 / 2.0 / 32639.0,
                };
                // A tenth of the weight is on values, 2.2 in the mean, that all have the same
                // error: five standard deviations of the loss of a codebook in bytes.
                let is_book = code.is_some_and(|code| matches!(code.levels, Levels::Book(_)));
                let codebook = if is_book { 0.1 * 5.0 * 2.2 * 3.1e-5f32.sqrt() } else { 0.0 };
                for (got, want) in run(isa).iter().zip(&want) {
                    let bound = lost * 3.0 + codebook + 1e-5;
                    assert!(
                        (got - want).abs() <= bound,
                        "{isa:?} {v} at {large}: {got} {want}, bound {bound}"
                    );
                }
            }
        }
    }
}

/// Asserts that attention of the last `rows` tokens has the same bits in such a set and in its
/// vectors.
fn has_the_bits_of_its_vectors(shape: Shape, n: usize, rows: usize) {
    let tokens = Tokens::gaussian(shape, n, 5);
    let q = gaussian(6, rows * shape.n_heads() * shape.k_head_dim, 1.0);
    for sets in matrix_sets() {
        let [got, want] = sets.map(|isa| attended(&subject(isa, 1), &tokens, rows, &q));
        let same = got.iter().zip(&want).all(|(a, b)| a.to_bits() == b.to_bits());
        assert!(same, "{:?} {shape:?}, {rows} rows of {n}", sets[0]);
        assert!(got.iter().all(|x| x.is_finite()), "{:?} {shape:?}", sets[0]);
    }
}

#[test]
fn matrix_paths_give_the_bits_of_vectors() {
    let coded = || DType::KV.into_iter().filter(|dtype| dtype.code().is_some());
    for (i, (k, v)) in coded().flat_map(|k| coded().map(move |v| (k, v))).enumerate() {
        // Blocks of 32, 64 and 128 dims, of one size and of several.
        let dim = [64, 128, 256, 96, 32][i % 5];
        let shape = Shape { k_head_dim: dim, v_head_dim: dim, group: 3, ..Shape::new(k, v) };
        for (n, rows) in [(150, 1), (150, 5), (161, 11), (300, 16), (300, 17), (170, 33), (700, 40)] {
            has_the_bits_of_its_vectors(shape, n, rows);
        }
    }
}

#[test]
fn matrix_paths_match_vectors_for_all_visible_ranges() {
    let (turbo, plain) = (Shape::new(DType::Turbo3, DType::Turbo3), Shape::new(DType::Q8_0, DType::Q4_0));
    for shape in [turbo, plain] {
        let shape = Shape { group: 4, n_kv_heads: 2, ..shape };
        let shapes = [
            Shape { window: Some(50), ..shape },
            Shape { window: Some(600), sink_tiles: 3, ..shape },
            Shape { soft_cap: Some(1.5), sinks: Some([1.0, 0.5]), ..shape },
            Shape { has_tail: false, centres: false, ..shape },
            Shape { scaled: Scaled::All, sink_tiles: 1, extra_tail_tiles: 7, ..shape },
        ];
        for (shape, (n, rows)) in
            shapes.into_iter().flat_map(|shape| [(130, 9), (529, 20), (1100, 40)].map(|step| (shape, step)))
        {
            has_the_bits_of_its_vectors(shape, n, rows);
        }
    }
    // One shared-KV tensor for keys and values.
    for dtype in [DType::Turbo3, DType::Turbo2T, DType::Q8_0, DType::Q4_0] {
        for (k_dim, v_dim, group) in [(576, 512, 16), (96, 80, 5)] {
            let shape = Shape { group, ..Shape::shared_kv(dtype, k_dim, v_dim) };
            has_the_bits_of_its_vectors(shape, 170, 9);
        }
    }
}
