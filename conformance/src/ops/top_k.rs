//! The most probable tokens: those of a sorted list, bit for bit.

use kvant_backend::{Backend, Candidate};

use crate::skipped::product;
use crate::weights::gaussian;
use crate::{DeviceUnderTest, Skipped, reference};

/// Values that replace some logits.
const SPECIAL_VALUES: [f32; 7] = [0.0, -0.0, f32::NEG_INFINITY, f32::INFINITY, f32::NAN, f32::MIN, 1.5];

/// Transformation of the logits.
type Law = fn(&[f32]) -> Vec<f32>;

/// Compares `top_k` with sorting.
pub fn run<B: Backend>(subject: &DeviceUnderTest<B>) -> Skipped {
    let mut skipped = subject.skipped();
    let sizes = [0, 1, 15, 16, 17, 255, 256, 257, 1025, 4096, 4097, 13_000];
    let laws: [Law; 4] = [
        <[f32]>::to_vec,
        tied,
        |plain| with_odd(&tied(plain), &SPECIAL_VALUES[..3]),
        |plain| with_odd(plain, &SPECIAL_VALUES),
    ];
    for (n, (law, offset)) in skipped.combine(&sizes, &product(&laws, &[0, 5])) {
        the_most_probable_come_first(subject, &law(&gaussian(7, n, 3.0)), offset);
    }
    logits_that_are_not_there_are_refused(subject);
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

fn the_most_probable_come_first<B: Backend>(subject: &DeviceUnderTest<B>, logits: &[f32], offset: usize) {
    let n = logits.len();
    let bits = |list: &[Candidate]| list.iter().map(|c| (c.id, c.logit.to_bits())).collect::<Vec<_>>();
    // The row before would win if it were read.
    let buffer = subject.guarded(&[&vec![1e30; offset], logits].concat());
    for k in [0, 1, 2, 40, 1024, n, n + 1, usize::MAX] {
        let mut got = vec![Candidate { id: 9, logit: f32::NAN }; 3];
        let what = || subject.case("top_k", format_args!("{k} of {n} at {offset}"));
        let result = subject.device().top_k(&buffer, offset, n, k, &mut got);
        result.unwrap_or_else(|error| panic!("{}: {error}", what()));
        assert_eq!(bits(&got), bits(&reference::top_k(logits, k)), "{}", what());
    }
}

fn logits_that_are_not_there_are_refused<B: Backend>(subject: &DeviceUnderTest<B>) {
    let buffer = subject.upload(&[0.0; 8]);
    let top_k = |offset, n| subject.device().top_k(&buffer, offset, n, 1, &mut Vec::new());
    subject.expect_refusal("top_k", "9 of 8", top_k(0, 9));
    subject.expect_refusal("top_k", "2 at 7 of 8", top_k(7, 2));
    subject.expect_refusal("top_k", "an offset that overflows", top_k(usize::MAX, 2));
}
