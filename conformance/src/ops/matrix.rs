//! Upload of weights: no bit of a file is lost, and shapes that do not match the bytes are
//! rejected.

use kvant_backend::{Backend, WeightSource};
use kvant_codec::DType;
use kvant_codec::random::Random;

use crate::DeviceUnderTest;
use crate::judge::Expected;
use crate::weights::Weights;

/// Checks that `table` and `tied` preserve their input, and that they and `matrix` accept only the
/// exact size.
pub fn run<B: Backend>(subject: &DeviceUnderTest<B>) {
    for dtype in DType::weights() {
        for n_blocks in [1, 2, 3, 5] {
            any_bits_are_kept(subject, dtype, n_blocks * dtype.block_len());
        }
        wrong_shapes_are_refused(subject, dtype);
    }
    for dtype in DType::ALL.into_iter().filter(|dtype| !dtype.is_weight()) {
        let bytes = vec![0; dtype.block_bytes()].into();
        let source = WeightSource { dtype, n_out: 1, n_in: dtype.block_len(), bytes };
        subject.expect_refusal(
            "matrix",
            &format!("{dtype}, a type of the cache"),
            subject.device().upload_matrix(source),
        );
    }
}

/// Uploads random bytes, NaN and infinite scales among them: each row reads back as decoded by the
/// codec, non-finite values as non-finite.
fn any_bits_are_kept<B: Backend>(subject: &DeviceUnderTest<B>, dtype: DType, n_in: usize) {
    let n_out = 17;
    let mut random = Random::new(n_in as u64);
    let n_bytes = n_out * dtype.row_bytes(n_in).expect("whole blocks");
    let weights = Weights::from_bytes(dtype, n_in, (0..n_bytes).map(|_| random.bits() as u8).collect());
    let tokens: Vec<u32> = (0..n_out as u32).collect();
    let want: Vec<Expected> = (0..n_out).flat_map(|row| weights.row(row)).collect();
    let device = subject.device();
    for (op, matrix) in
        [("tied", device.upload_tied(weights.source(n_out))), ("table", device.table(weights.source(n_out)))]
    {
        let what = || subject.case(op, format_args!("{dtype} {n_out}x{n_in} of random bits"));
        let matrix = matrix.unwrap_or_else(|error| panic!("{}: {error}", what()));
        let mut out = subject.poisoned(want.len());
        device.embed(&matrix, &tokens, 1.0, &mut out).unwrap_or_else(|error| panic!("{}: {error}", what()));
        for (i, (got, want)) in subject.download(&out, want.len()).into_iter().zip(&want).enumerate() {
            let is_expected = if want.value.is_finite() { want.admits(got) } else { !got.is_finite() };
            assert!(is_expected, "{}: [{i}] is {got}, want {want:?}", what());
        }
    }
}

fn wrong_shapes_are_refused<B: Backend>(subject: &DeviceUnderTest<B>, dtype: DType) {
    let (len, size) = (dtype.block_len(), dtype.block_bytes());
    let cases = [
        ("a byte too few", 2, len, 2 * size - 1),
        ("a byte too many", 2, len, 2 * size + 1),
        ("no columns", 2, 0, 0),
        ("more rows than memory", usize::MAX, len, size),
        ("rows that end within a block", 1, len + 1, 2 * size),
    ];
    // The last case needs blocks of more than one value.
    for (case, n_out, n_in, n_bytes) in cases.into_iter().take(if len > 1 { 5 } else { 4 }) {
        let source = || WeightSource { dtype, n_out, n_in, bytes: vec![0; n_bytes].into() };
        subject.expect_refusal(
            "matrix",
            &format!("{dtype}, {case}"),
            subject.device().upload_matrix(source()),
        );
        subject.expect_refusal("table", &format!("{dtype}, {case}"), subject.device().table(source()));
        subject.expect_refusal("tied", &format!("{dtype}, {case}"), subject.device().upload_tied(source()));
    }
}
