//! The most probable tokens of rows of logits: those of a sorted list, bit for bit.

use kvant_backend::{Backend, Candidate, TopK};

use crate::skipped::product;
use crate::weights::gaussian;
use crate::{DeviceUnderTest, Skipped, reference};

/// Values that replace some logits.
const SPECIAL_VALUES: [f32; 7] = [0.0, -0.0, f32::NEG_INFINITY, f32::INFINITY, f32::NAN, f32::MIN, 1.5];

/// Transformation of the logits.
type Law = fn(&[f32]) -> Vec<f32>;

const LAWS: [Law; 6] = [
    <[f32]>::to_vec,
    tied,
    |plain| with_odd(&tied(plain), &SPECIAL_VALUES[..3]),
    |plain| with_odd(plain, &SPECIAL_VALUES),
    |plain| vec![-0.0; plain.len()],
    in_columns,
];

/// Compares `top_k` with sorting.
pub fn run<B: Backend>(subject: &DeviceUnderTest<B>) -> Skipped {
    let mut skipped = subject.skipped();
    let sizes = [0, 1, 15, 16, 17, 255, 256, 257, 1025, 4096, 4097, 8192, 8193, 16_385];
    let ks = [0, 1, 2, 40, 200, 1024, 1025, usize::MAX];
    for (n, (law, k)) in skipped.combine(&sizes, &product(&LAWS, &ks)) {
        let logits = law(&gaussian(7, n, 3.0));
        // The rows beside it would win if they were read.
        let beside = vec![1e30; n];
        check(subject, n, &[&beside, &logits, &beside], &[Request { row: 1, k }]);
        check(subject, n, &[&logits], &[n, n + 1].map(|k| Request { row: 0, k }));
    }
    for (n_rows, n) in skipped.combine(&[2, 5, 300], &[9, 17, 4097]) {
        many_rows_have_candidates_of_their_own(subject, n_rows, n);
    }
    rows_that_are_not_there_are_refused(subject);
    skipped
}

/// Quantizes logits, so that many are equal.
fn tied(logits: &[f32]) -> Vec<f32> {
    logits.iter().map(|logit| logit.round()).collect()
}

/// Replaces every fifth value.
fn with_odd(logits: &[f32], odd: &[f32]) -> Vec<f32> {
    let mut logits = logits.to_vec();
    let replaced = logits.iter_mut().skip(2).step_by(5);
    replaced.zip(odd.iter().cycle()).for_each(|(logit, odd)| *logit = *odd);
    logits
}

/// Raises 100 of 512 columns, so that the most probable tokens are at equal distances: those of one
/// thread, where threads take turns.
fn in_columns(logits: &[f32]) -> Vec<f32> {
    let raised = |(i, logit): (usize, &f32)| logit + if i % 512 < 100 { 50.0 } else { 0.0 };
    logits.iter().enumerate().map(raised).collect()
}

/// A row and its number of candidates.
#[derive(Clone, Copy)]
struct Request {
    row: usize,
    k: usize,
}

/// Asks for candidates of `rows` `[_, n]` in one call.
fn check<B: Backend>(subject: &DeviceUnderTest<B>, n: usize, rows: &[&[f32]], requests: &[Request]) {
    let bits = |list: &[Candidate]| list.iter().map(|c| (c.id, c.logit.to_bits())).collect::<Vec<_>>();
    let buffer = subject.guarded(&rows.concat());
    let mut got = vec![vec![Candidate { id: 9, logit: f32::NAN }; 3]; requests.len()];
    let mut asked: Vec<_> =
        requests.iter().zip(&mut got).map(|(&Request { row, k }, out)| TopK { row, k, out }).collect();
    let result = subject.device().top_k(&buffer, n, &mut asked);
    let what = |case: &dyn std::fmt::Display| subject.case("top_k", case);
    result.unwrap_or_else(|error| panic!("{}: {error}", what(&format_args!("{} rows of {n}", rows.len()))));
    for (i, (&Request { row, k }, got)) in requests.iter().zip(&got).enumerate() {
        let of = format!("{k} of row {row} of {n} logits, number {i} of {}", requests.len());
        assert_eq!(bits(got), bits(&reference::top_k(rows[row], k)), "{}", what(&of));
    }
}

/// Rows of all laws with different k, from the last to the first and the second again, in one call.
fn many_rows_have_candidates_of_their_own<B: Backend>(subject: &DeviceUnderTest<B>, n_rows: usize, n: usize) {
    let laws = LAWS.iter().cycle();
    let rows: Vec<_> = (0..n_rows).zip(laws).map(|(row, law)| law(&gaussian(row as u64, n, 3.0))).collect();
    let rows: Vec<&[f32]> = rows.iter().map(Vec::as_slice).collect();
    let ks = [1, 40, 0, 2, usize::MAX, 7, 1].iter().cycle();
    let requests: Vec<_> = (0..n_rows).rev().chain([1]).zip(ks).map(|(row, &k)| Request { row, k }).collect();
    check(subject, n, &rows, &requests);
    check(subject, n, &rows, &[]);
}

fn rows_that_are_not_there_are_refused<B: Backend>(subject: &DeviceUnderTest<B>) {
    let buffer = subject.upload(&[0.0; 8]);
    let top_k = |rows: &[usize], n| {
        let mut found = vec![Vec::new(); rows.len()];
        let rows = rows.iter().zip(&mut found).map(|(&row, out)| TopK { row, k: 1, out });
        subject.device().top_k(&buffer, n, &mut rows.collect::<Vec<_>>())
    };
    subject.expect_refusal("top_k", "9 of 8", top_k(&[0], 9));
    subject.expect_refusal("top_k", "row 2 of 2", top_k(&[0, 2, 1], 4));
    subject.expect_refusal("top_k", "a row that overflows", top_k(&[usize::MAX], 2));
}
