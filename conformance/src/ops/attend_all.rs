//! Bidirectional attention within windows.

use kvant_backend::{Backend, BidirectionalParams, Heads};

use crate::judge::{Expected, roundings};
use crate::weights::gaussian;
use crate::{Attention, DeviceUnderTest, Skipped};

/// Values of a head: of small encoders, SigLIP, Qwen2-VL, ViT and EmbeddingGemma, and between.
const DIMS: [usize; 10] = [1, 16, 20, 33, 64, 72, 80, 128, 192, 256];
/// Heads of queries, and of keys and values.
const HEADS: [[usize; 2]; 3] = [[1, 1], [3, 3], [4, 2]];
/// Rows of the windows: none, below, at and above tiles of 16 and 64 rows.
const WINDOWS: [&[usize]; 7] = [&[], &[1], &[5, 17], &[64], &[65, 1, 63], &[130], &[3, 0, 70]];
const REACHES: [Option<usize>; 5] = [None, Some(0), Some(7), Some(40), Some(usize::MAX)];

/// Shape of a case.
#[derive(Clone, Copy)]
struct Shape<'a> {
    params: BidirectionalParams,
    windows: &'a [usize],
    has_bias: bool,
}

/// Operands of a case.
struct Operands {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    bias: Option<Vec<f32>>,
}

impl Shape<'_> {
    fn new(dim: usize, [n, n_kv_heads]: [usize; 2], windows: &[usize]) -> Shape<'_> {
        let scale = 1.0 / (dim as f32).sqrt();
        let params = BidirectionalParams { heads: Heads { n, dim }, n_kv_heads, scale, reach: None };
        Shape { params, windows, has_bias: false }
    }

    fn rows(self) -> usize {
        self.windows.iter().sum()
    }

    fn longest(self) -> usize {
        self.windows.iter().copied().max().unwrap_or(0)
    }

    /// Gaussian queries, keys and values of these spreads.
    fn operands(self, [of_q, of_k, of_v]: [f64; 3]) -> Operands {
        let BidirectionalParams { heads, n_kv_heads, .. } = self.params;
        let of = |seed, n: usize, sigma| gaussian(seed, self.rows() * n * heads.dim, sigma);
        let bias = gaussian(4, heads.n * (2 * self.longest()).saturating_sub(1), 1.0);
        Operands {
            q: of(1, heads.n, of_q),
            k: of(2, n_kv_heads, of_k),
            v: of(3, n_kv_heads, of_v),
            bias: self.has_bias.then_some(bias),
        }
    }
}

/// Compares `attend_bidirectional` with its equation.
pub fn run<B: Backend>(subject: &DeviceUnderTest<B>) -> Skipped {
    let mut skipped = subject.skipped();
    for (dim, windows) in skipped.combine(&DIMS, &WINDOWS) {
        for (heads, reach) in skipped.combine(&HEADS, &[None]) {
            let shape = Shape::new(dim, heads, windows);
            let params = BidirectionalParams { reach, ..shape.params };
            equals_its_equation(subject, &mut skipped, Shape { params, ..shape }, [2.0; 3]);
        }
    }
    for (windows, reach) in skipped.combine(&WINDOWS, &REACHES) {
        for has_bias in [false, true] {
            let shape = Shape::new(20, HEADS[2], windows);
            let params = BidirectionalParams { reach, ..shape.params };
            equals_its_equation(subject, &mut skipped, Shape { params, has_bias, ..shape }, [2.0; 3]);
        }
    }
    // Beyond f16 on either side.
    for spreads in [[1e-6, 1e6, 1e7], [1e7, 1e-7, 1e-9]] {
        equals_its_equation(subject, &mut skipped, Shape::new(72, HEADS[2], &[70]), spreads);
    }
    bad_numbers_stay_in_their_window(subject, &mut skipped);
    short_buffers_are_refused(subject);
    skipped
}

/// Runs the op; `None` where the device has no kernel for it.
fn attend<B: Backend>(
    subject: &DeviceUnderTest<B>,
    skipped: &mut Skipped,
    shape: Shape<'_>,
    of: &Operands,
    what: &dyn Fn() -> String,
) -> Option<B::Buffer> {
    let qkv = [&of.q, &of.k, &of.v].map(|values| subject.upload(values));
    let bias = of.bias.as_ref().map(|bias| subject.upload(bias));
    let mut out = subject.poisoned(of.q.len());
    let device = subject.device();
    let result =
        device.attend_bidirectional(&shape.params, shape.windows, bias.as_ref(), qkv.each_ref(), &mut out);
    skipped.take(result, what)?;
    Some(out)
}

fn equals_its_equation<B: Backend>(
    subject: &DeviceUnderTest<B>,
    skipped: &mut Skipped,
    shape: Shape<'_>,
    spreads: [f64; 3],
) {
    let what = || {
        let (params, bias) = (shape.params, if shape.has_bias { " and biases" } else { "" });
        subject.case("attend_all", format_args!("{params:?}, windows of {:?} rows{bias}", shape.windows))
    };
    let of = shape.operands(spreads);
    let Some(out) = attend(subject, skipped, shape, &of, &what) else { return };
    let want = expected(shape, &of, Rounding::of(subject.attention()));
    subject.expect(&out, &want, &what);
}

/// Rounding of factors of products.
#[derive(Clone, Copy)]
struct Rounding {
    /// Relative to a value.
    relative: f64,
    /// Relative to the largest value of its head, and of a weight, to the largest weight.
    absolute: f64,
}

impl Rounding {
    /// Halves have 11 bits. A power of two brings the largest value to at least 2^14, where half a
    /// step of subnormals is 2^-25.
    fn of(attention: Attention) -> Self {
        match attention {
            Attention::Halves => Self { relative: 2f64.powi(-11), absolute: 2f64.powi(-39) },
            _ => Self { relative: 0.0, absolute: 0.0 },
        }
    }
}

/// Evaluates the equation, value by value.
///
/// A score is off by the rounding of its factors and of its sum; the logarithm of 2, a bias and the
/// difference from the largest score round the larger of both. If scores are off by e at most,
/// weights are off by exp(2 e) - 1 of themselves: by e, and by as much in their sum. They and the
/// values are rounded once more.
fn expected(shape: Shape<'_>, of: &Operands, rounding: Rounding) -> Vec<Expected> {
    let BidirectionalParams { heads, n_kv_heads, scale, reach } = shape.params;
    let (dim, mut first, mut all) = (heads.dim, 0, Vec::new());
    let [largest_q, largest_k, largest_v] = [&of.q, &of.k, &of.v].map(|values| largest(values));
    let of_factors = rounding.relative * (2.0 + rounding.relative) + roundings(dim + 3);
    let absolute = 2.0 * rounding.absolute * dim as f64 * largest_q * largest_k;
    for &rows in shape.windows {
        for (row, head) in (0..rows).flat_map(|row| (0..heads.n).map(move |head| (row, head))) {
            let kv_head = head / (heads.n / n_kv_heads);
            let q = &of.q[((first + row) * heads.n + head) * dim..][..dim];
            let at = |key: usize| ((first + key) * n_kv_heads + kv_head) * dim;
            let seen: Vec<usize> =
                (0..rows).filter(|key| reach.is_none_or(|reach| key.abs_diff(row) <= reach)).collect();
            let bias_of = |key: usize| match &of.bias {
                Some(bias) => {
                    let n = shape.longest();
                    f64::from(bias[head * (2 * n - 1) + n - 1 + key - row])
                }
                None => 0.0,
            };
            let mut scores = Vec::new();
            let (mut largest_score, mut off) = (0f64, 0f64);
            for &key in &seen {
                let k = &of.k[at(key)..][..dim];
                let (mut score, mut size) = (0.0, 0.0);
                for (q, k) in q.iter().zip(k) {
                    score += f64::from(*q) * f64::from(*k);
                    size += f64::from(*q).abs() * f64::from(*k).abs();
                }
                off = off.max(f64::from(scale) * (of_factors * size + absolute));
                scores.push(score * f64::from(scale) + bias_of(key));
                largest_score = largest_score.max(scores[scores.len() - 1].abs() + bias_of(key).abs());
            }
            off += roundings(6) * largest_score;
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
            let sum: f64 = weights.iter().sum();
            let relative = (2.0 * off).exp_m1() + 2.0 * rounding.relative + roundings(seen.len() + 20);
            for i in 0..dim {
                let terms = seen.iter().zip(&weights).map(|(&key, w)| w / sum * f64::from(of.v[at(key) + i]));
                let size: f64 = terms.clone().map(f64::abs).sum();
                let absolute = rounding.absolute * (seen.len() + 1) as f64 * largest_v;
                all.push(Expected { value: terms.sum(), tolerance: relative * size + absolute });
            }
        }
        first += rows;
    }
    all
}

fn largest(values: &[f32]) -> f64 {
    values.iter().fold(0.0, |largest, &x| f64::from(x).abs().max(largest))
}

fn bad_numbers_stay_in_their_window<B: Backend>(subject: &DeviceUnderTest<B>, skipped: &mut Skipped) {
    let shape = Shape::new(33, HEADS[0], &[40, 70]);
    for bad in [f32::NAN, f32::INFINITY] {
        let what = || subject.case("attend_all", format_args!("{bad} in the first window"));
        let mut of = shape.operands([1.0; 3]);
        of.v[5 * 33 + 2] = bad;
        let Some(out) = attend(subject, skipped, shape, &of, &what) else { return };
        let got = subject.results(&out, of.q.len(), &what);
        let (first, second) = got.split_at(40 * 33);
        assert!(first.chunks_exact(33).all(|row| !row[2].is_finite()), "{}", what());
        assert!(second.iter().all(|value| value.is_finite()), "{}", what());
    }
}

fn short_buffers_are_refused<B: Backend>(subject: &DeviceUnderTest<B>) {
    let shape = Shape::new(16, [1, 1], &[4, 3]);
    let (long, short) = (subject.upload(&[0.0; 7 * 16]), subject.upload(&[0.0; 7 * 16 - 1]));
    let refuse = |case: &str, bias: Option<&B::Buffer>, qkv, out: &mut B::Buffer| {
        let result = subject.device().attend_bidirectional(&shape.params, shape.windows, bias, qkv, out);
        subject.expect_refusal("attend_all", case, result);
    };
    let mut out = subject.upload(&[0.0; 7 * 16]);
    refuse("short queries", None, [&short, &long, &long], &mut out);
    refuse("short keys", None, [&long, &short, &long], &mut out);
    refuse("short values", None, [&long, &long, &short], &mut out);
    refuse("short biases", Some(&subject.upload(&[0.0; 6])), [&long; 3], &mut out);
    let mut out = subject.upload(&[0.0; 7 * 16 - 1]);
    refuse("a short result", None, [&long; 3], &mut out);
}
