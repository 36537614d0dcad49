//! GEMMs of parts of rows, each with its own matrix, and copies of columns.

use kvant_backend::{Backend, Columns, WeightSource};
use kvant_codec::DType;

use crate::judge::Expected;
use crate::skipped::product;
use crate::weights::{Activations, Weights, gaussian};
use crate::{DeviceUnderTest, Skipped};

/// Below, at and above tiles and the minimum of tensor cores.
const ROWS: [usize; 7] = [0, 1, 2, 9, 16, 17, 40];

/// Compares `project_each` with its equation, for any number of parts and rows.
pub fn run<B: Backend>(subject: &DeviceUnderTest<B>) -> Skipped {
    let mut skipped = subject.skipped();
    let shapes = [
        (DType::F32, [1, 33, 40]),
        (DType::F16, [3, 64, 24]),
        (DType::BF16, [5, 7, 48]),
        (DType::Q8_0, [4, 96, 64]),
        (DType::Q4K, [2, 48, 256]),
        (DType::TQ4_1S, [2, 20, 128]),
    ];
    for ((dtype, shape), rows) in skipped.combine(&shapes, &ROWS) {
        equals_its_equation(subject, dtype, shape, rows);
    }
    a_bad_number_reaches_its_part_and_no_other(subject);
    let source = WeightSource { dtype: DType::F32, n_out: 6, n_in: 5, bytes: vec![0; 4 * 30].into() };
    let w = subject.device().upload_experts(source, 2);
    let w = w.unwrap_or_else(|error| panic!("{}: {error}", subject.case("experts", "two of three rows")));
    let (x, mut y) = (subject.upload(&[0.0; 20]), subject.upload(&[0.0; 17]));
    let device = subject.device();
    subject.expect_refusal("project_each", "three rows of two", device.project_per_expert(&x, 3, &w, &mut y));
    let mut short = subject.upload(&[0.0; 11]);
    subject.expect_refusal(
        "project_each",
        "results of 12 in 11",
        device.project_per_expert(&x, 2, &w, &mut short),
    );
    skipped
}

/// Returns the matrices of each part, on the device and decoded by the codec.
fn matrices<B: Backend>(
    subject: &DeviceUnderTest<B>,
    dtype: DType,
    [n, n_out, n_in]: [usize; 3],
) -> (B::Experts, Vec<Weights>) {
    let weights: Vec<_> = (0..n).map(|i| Weights::gaussian(dtype, n_out, n_in, 50 + i as u64)).collect();
    let bytes = weights.iter().flat_map(|one| one.source(n_out).bytes.to_vec()).collect::<Vec<_>>();
    let source = WeightSource { dtype, n_out: n * n_out, n_in, bytes: bytes.into() };
    (subject.device().upload_experts(source, n).expect("weights of a type that devices have"), weights)
}

fn equals_its_equation<B: Backend>(
    subject: &DeviceUnderTest<B>,
    dtype: DType,
    shape: [usize; 3],
    rows: usize,
) {
    let what = || subject.case("project_each", format_args!("{dtype} {shape:?}, {rows} rows"));
    let [n, n_out, n_in] = shape;
    let (on_device, weights) = matrices(subject, dtype, shape);
    let x = gaussian(51, rows * n * n_in, 3.0);
    let mut y = subject.poisoned(rows * n * n_out);
    let result = subject.device().project_per_expert(&subject.upload(&x), rows, &on_device, &mut y);
    result.unwrap_or_else(|error| panic!("{}: {error}", what()));
    let want = x.chunks_exact(n_in).enumerate().flat_map(|(i, part)| {
        let (w, part) = (&weights[i % n], Activations::new(part));
        (0..n_out).map(|row| w.product(row, &part, rows, subject.arithmetic())).collect::<Vec<Expected>>()
    });
    subject.expect(&y, &want.collect::<Vec<_>>(), &what);
}

fn a_bad_number_reaches_its_part_and_no_other<B: Backend>(subject: &DeviceUnderTest<B>) {
    for (dtype, shape, rows) in [(DType::F32, [3, 5, 8], 2), (DType::Q8_0, [3, 5, 64], 20)] {
        let what = || subject.case("project_each", format_args!("NaN among {rows} rows of {dtype}"));
        let [n, n_out, n_in] = shape;
        let (on_device, _) = matrices(subject, dtype, shape);
        let mut x = gaussian(52, rows * n * n_in, 1.0);
        let bad = n + 1;
        x[bad * n_in + 3] = f32::NAN;
        let mut y = subject.poisoned(rows * n * n_out);
        let result = subject.device().project_per_expert(&subject.upload(&x), rows, &on_device, &mut y);
        result.unwrap_or_else(|error| panic!("{}: {error}", what()));
        for (i, y) in subject.results(&y, rows * n * n_out, &what).chunks_exact(n_out).enumerate() {
            assert!(y.iter().all(|y| y.is_finite() == (i != bad)), "{}: part {i} is {y:?}", what());
        }
    }
}

/// Checks that `copy_columns` copies every value to its position, and leaves all others unchanged.
pub fn columns<B: Backend>(subject: &DeviceUnderTest<B>) {
    for ((rows, n), (first, after)) in
        product(&[(0, 5), (1, 1), (3, 0), (7, 64), (40, 33)], &[(0, 0), (0, 9), (12, 0), (3, 5)])
    {
        let what = || subject.case("copy_columns", format_args!("{rows} rows of {n} from {first}, {after}"));
        let width = first + n + after;
        let (src, mut want) = (gaussian(53, rows * n, 1.0), gaussian(54, rows * width, 1.0));
        let mut dst = subject.guarded(&want);
        let to = Columns { width, first };
        let result = subject.device().copy_columns(&subject.upload(&src), [rows, n], &mut dst, to);
        result.unwrap_or_else(|error| panic!("{}: {error}", what()));
        for row in 0..rows {
            want[row * width + first..][..n].copy_from_slice(&src[row * n..][..n]);
        }
        assert_eq!(subject.results(&dst, want.len(), &what), want, "{}", what());
    }
    let (src, mut dst) = (subject.upload(&[0.0; 12]), subject.upload(&[0.0; 15]));
    for (case, shape, to) in [
        ("columns 3 to 6 of five", [3, 4], Columns { width: 5, first: 2 }),
        ("four rows of three", [4, 4], Columns { width: 5, first: 0 }),
        ("four rows of 15 values", [4, 3], Columns { width: 5, first: 0 }),
        ("columns beyond all numbers", [1, 4], Columns { width: 5, first: usize::MAX }),
    ] {
        subject.expect_refusal(
            "copy_columns",
            case,
            subject.device().copy_columns(&src, shape, &mut dst, to),
        );
    }
}
