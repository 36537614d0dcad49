//! Embedding rows: decoded by the codec, times a factor.

use kvant_backend::Backend;
use kvant_codec::DType;

use crate::DeviceUnderTest;
use crate::judge::{Expected, roundings};
use crate::weights::Weights;

/// Below, at and above panels of 16 rows.
const VOCAB_SIZES: [usize; 5] = [1, 15, 16, 17, 35];

/// Compares `embed` with the codec.
pub fn run<B: Backend>(subject: &DeviceUnderTest<B>) {
    for dtype in DType::weights() {
        let n_in = if dtype.block_len() == 1 { 33 } else { 3 * dtype.block_len() };
        let weights = Weights::gaussian(dtype, VOCAB_SIZES[VOCAB_SIZES.len() - 1], n_in, 13);
        for n_vocab in VOCAB_SIZES {
            rows_are_what_the_codec_decodes(subject, &weights, n_vocab);
        }
    }
    unknown_tokens_and_short_outputs_are_refused(subject);
}

fn rows_are_what_the_codec_decodes<B: Backend>(
    subject: &DeviceUnderTest<B>,
    weights: &Weights,
    n_vocab: usize,
) {
    let table = subject.tied(weights.source(n_vocab));
    let last = n_vocab as u32 - 1;
    for (tokens, scale) in
        [(&[][..], 1.0), (&[last], 1.0), (&[last, 0, last, last / 2], 1.0), (&[0, last], 640_f32.sqrt())]
    {
        let scaled = |want: Expected| Expected {
            value: want.value * f64::from(scale),
            // A product with 1 is exact.
            tolerance: if scale == 1.0 { want.tolerance } else { scaled_tolerance(want, f64::from(scale)) },
        };
        let want = tokens.iter().flat_map(|&token| weights.row(token as usize)).map(scaled);
        let want: Vec<Expected> = want.collect();
        let mut out = subject.poisoned(want.len());
        let what = || {
            subject.case(
                "embed",
                format_args!("{} {n_vocab}x{} {tokens:?} times {scale}", weights.dtype, weights.n_in),
            )
        };
        subject
            .device()
            .embed(&table, tokens, scale, &mut out)
            .unwrap_or_else(|error| panic!("{}: {error}", what()));
        subject.expect(&out, &want, &what);
    }
}

/// Returns the tolerance of a value of `want`, times `scale`: one more rounding.
fn scaled_tolerance(want: Expected, scale: f64) -> f64 {
    scale * (want.tolerance + roundings(1) * (want.value.abs() + want.tolerance))
}

fn unknown_tokens_and_short_outputs_are_refused<B: Backend>(subject: &DeviceUnderTest<B>) {
    let table = subject.tied(Weights::gaussian(DType::F32, 4, 8, 1).source(4));
    let mut out = subject.upload(&[0.0; 16]);
    let mut embed = |tokens: &[u32]| subject.device().embed(&table, tokens, 1.0, &mut out);
    subject.expect_refusal("embed", "token 4 of 4", embed(&[0, 4]));
    subject.expect_refusal("embed", "the largest token", embed(&[u32::MAX]));
    subject.expect_refusal("embed", "three rows into two", embed(&[0, 1, 2]));
}
