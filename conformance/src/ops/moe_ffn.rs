//! MoE feed-forward layer: adds the weighted outputs of the selected experts to each row.

use kvant_backend::{
    Activation, Backend, ExpertGroups, ExpertWeights, Norm, Router, RouterScores, Routing, WeightSource,
};
use kvant_codec::DType;

use super::gated_ffn::gated;
use crate::judge::{Expected, ROUNDING, roundings};
use crate::skipped::product;
use crate::weights::{Activations, Weights, gaussian};
use crate::{DeviceUnderTest, Skipped};

const EPS: f32 = 1e-5;

/// Numbers of experts, and of selected experts per row.
const CHOICES: [(usize, usize); 5] = [(1, 1), (4, 4), (5, 2), (9, 8), (33, 3)];
/// Scores to which a selection bias may be added.
const SCORES: [RouterScores; 3] = [RouterScores::Sigmoid, RouterScores::Softmax, RouterScores::SqrtSoftplus];
/// Below, at and above tiles and the minimum of tensor cores.
const ROWS: [usize; 6] = [1, 2, 9, 16, 17, 40];

/// Distribution of the router's logits.
#[derive(Debug, Clone, Copy)]
enum Law {
    /// Random.
    Any,
    /// All rows select the last experts; the others are unused.
    Last,
    /// All experts are equal: the first ones are selected.
    Alike,
    /// Some are near each other, as SparseMixer sees it.
    Near,
}

/// One layer and its rows.
#[derive(Debug, Clone, Copy)]
struct Case {
    types: [DType; 3],
    n: usize,
    n_ff: usize,
    n_experts: usize,
    n_used: usize,
    rows: usize,
    law: Law,
    scores: RouterScores,
    has_selection_bias: bool,
    expert_groups: Option<ExpertGroups>,
    normalizes: bool,
    has_norm: bool,
    activation: Activation,
    /// Whether the up projection gates itself.
    is_ungated: bool,
    has_biases: bool,
    has_scales: bool,
    /// Whether the experts of a row are chosen before.
    are_chosen: bool,
    /// Whether the sum goes to a separate buffer.
    has_separate_output: bool,
}

const USUAL: Case = Case {
    types: [DType::F32; 3],
    n: 40,
    n_ff: 33,
    n_experts: 5,
    n_used: 2,
    rows: 1,
    law: Law::Any,
    scores: RouterScores::Softmax,
    has_selection_bias: false,
    expert_groups: None,
    normalizes: true,
    has_norm: true,
    activation: Activation::Silu,
    is_ungated: false,
    has_biases: false,
    has_scales: false,
    are_chosen: false,
    has_separate_output: false,
};

/// Two experts, with weights normalized to one.
const PLAIN: Routing =
    Routing { n_used: 2, scores: RouterScores::Softmax, normalizes: true, scale: 1.0, expert_groups: None };

/// Compares `moe_ffn` with its equation for any number of experts and rows, and any selection.
pub fn run<B: Backend>(subject: &DeviceUnderTest<B>) -> Skipped {
    let mut skipped = subject.skipped();
    let laws = [Law::Any, Law::Last, Law::Alike];
    let kinds = [[DType::F32; 3], [DType::Q8_0; 3]];
    for ((n_experts, n_used), (rows, (law, types))) in
        skipped.combine(&CHOICES, &product(&ROWS, &product(&laws, &kinds)))
    {
        let [n, n_ff] = if types[0].block_len() == 1 { [USUAL.n, USUAL.n_ff] } else { [64, 96] };
        let normalizes = rows % 2 == 1;
        let case = Case { types, n, n_ff, n_experts, n_used, rows, law, normalizes, ..USUAL };
        equals_its_equation(subject, case, &mut skipped);
    }
    let selection_bias = [(1, true), (2, false), (17, true)];
    for ((n_experts, n_used), ((rows, has_selection_bias), scores)) in
        skipped.combine(&CHOICES, &product(&selection_bias, &SCORES))
    {
        let of = Case { n_experts, n_used, rows, scores, ..USUAL };
        equals_its_equation(subject, Case { has_selection_bias, normalizes: rows > 1, ..of }, &mut skipped);
    }
    let laws = [Law::Any, Law::Near, Law::Alike];
    for ((n_experts, n_used), (rows, law)) in skipped.combine(&CHOICES, &product(&[1, 17], &laws)) {
        let scores = RouterScores::SparseMixer;
        let case = Case { n_experts, n_used, rows, law, scores, normalizes: false, ..USUAL };
        equals_its_equation(subject, case, &mut skipped);
    }
    let expert_groups =
        [(6, 2, 3, 1), (8, 3, 4, 2), (8, 4, 8, 4), (12, 5, 2, 1), (64, 6, 8, 3), (64, 6, 32, 31)];
    let cases = [
        (1, RouterScores::Softmax, false),
        (3, RouterScores::Sigmoid, false),
        (18, RouterScores::Sigmoid, true),
        (19, RouterScores::Softmax, true),
    ];
    for ((n_experts, n_used, n, groups_used), (rows, scores, has_selection_bias)) in
        skipped.combine(&expert_groups, &cases)
    {
        let expert_groups = Some(ExpertGroups { n, n_used: groups_used });
        equals_its_equation(
            subject,
            Case { n_experts, n_used, rows, scores, has_selection_bias, expert_groups, ..USUAL },
            &mut skipped,
        );
    }
    let cases = [(1, false, true), (3, true, false), (18, true, true)];
    for (types, (rows, has_scales, has_separate_output)) in skipped.combine(&kinds, &cases) {
        let [n, n_ff] = if types[0].block_len() == 1 { [USUAL.n, USUAL.n_ff] } else { [64, 96] };
        let case = Case { types, n, n_ff, rows, has_scales, has_separate_output, ..USUAL };
        equals_its_equation(subject, case, &mut skipped);
    }
    for ((n_experts, n_used), (rows, scores)) in skipped.combine(&CHOICES, &product(&[1, 3, 18], &SCORES)) {
        let case = Case { n_experts, n_used, rows, scores, are_chosen: true, ..USUAL };
        equals_its_equation(subject, case, &mut skipped);
    }
    for rows in [1, 3, 20] {
        a_bad_number_reaches_its_row_and_no_other(subject, rows, &mut skipped);
    }
    wrong_shapes_are_refused(subject);
    skipped
}

/// Compares `moe_ffn` with the equation of one activation.
pub(super) fn of_activation<B: Backend>(
    subject: &DeviceUnderTest<B>,
    activation: Activation,
    skipped: &mut Skipped,
) {
    for (types, rows) in [([DType::F32; 3], 1), ([DType::Q8_0; 3], 3), ([DType::Q4K; 3], 17)] {
        let case = Case { types, n: 256, n_ff: 256, n_experts: 3, rows, activation, ..USUAL };
        equals_its_equation(subject, case, skipped);
    }
}

/// Expects that a device refuses an activation.
pub(super) fn refuses<B: Backend>(subject: &DeviceUnderTest<B>, activation: Activation) {
    let (layer, logits) = (Layer::new(subject, USUAL), subject.upload(&[0.0; USUAL.n_experts]));
    let (router, weights) = (layer.router(PLAIN, &logits), layer.borrow(activation));
    let mut x = subject.upload(&[0.0; USUAL.n]);
    let result = subject.device().moe_ffn(&mut x, 1, None, router, weights, None);
    subject.expect_refusal("moe_ffn", "an activation that the device lacks", result);
}

/// Compares `moe_ffn` with its equation for weights of every type.
pub fn types<B: Backend>(subject: &DeviceUnderTest<B>) -> Skipped {
    use DType::{BF16, F16, F32, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0, TQ3_1S, TQ4_1S};
    let mut skipped = subject.skipped();
    // Equal types of gate and up, which a device may fuse; unequal ones.
    let types = [
        [Q4_0, Q4_0, Q4_1],
        [Q4K, Q4K, Q6K],
        [Q5_0, Q5_1, Q5K],
        [F16, F16, BF16],
        [BF16, Q8_0, F32],
        [TQ3_1S, TQ3_1S, TQ4_1S],
        [Q8_0, TQ4_1S, F16],
        [DType::Q2K, DType::Q3K, DType::Q2K],
        [Q6K, Q6K, DType::Q3K],
        [DType::MXFP4; 3],
    ];
    let cases = [
        (1, Activation::Silu, true, false),
        (5, Activation::Gelu, false, false),
        (17, Activation::Bounded, true, true),
        (1, Activation::Relu, true, false),
        (33, Activation::Relu, false, false),
        (5, Activation::NormalCdf, true, false),
        (3, Activation::Limited { limit: 3.0 }, true, true),
        (17, Activation::Limited { limit: 7.0 }, false, false),
        (3, Activation::Clamped { limit: 2.0 }, true, false),
    ];
    for (types, (rows, activation, has_norm, has_biases)) in skipped.combine(&types, &cases) {
        let of = Case { types, n: 256, n_ff: 256, n_experts: 3, ..USUAL };
        let is_ungated = matches!(activation, Activation::Relu | Activation::NormalCdf);
        let case = Case { rows, activation, is_ungated, has_norm, has_biases, ..of };
        equals_its_equation(subject, case, &mut skipped);
    }
    skipped
}

/// A layer on a device and its decoded weights: gate, up and down of each expert.
struct Layer<B: Backend> {
    on_device: [B::Experts; 3],
    weights: Vec<[Weights; 3]>,
    /// Biases of each GEMM, for all experts.
    biases: Option<[(B::Buffer, Vec<f32>); 3]>,
    selection_bias: Option<(B::Buffer, Vec<f32>)>,
    scales: Option<(B::Buffer, Vec<f32>)>,
    is_ungated: bool,
}

impl<B: Backend> Layer<B> {
    fn new(
        subject: &DeviceUnderTest<B>,
        Case { types, n, n_ff, n_experts, is_ungated, has_biases, has_selection_bias, has_scales, .. }: Case,
    ) -> Self {
        let shapes = [[n_ff, n], [n_ff, n], [n, n_ff]];
        let one = |e: usize| {
            std::array::from_fn(|i| {
                let [n_out, n_in] = shapes[i];
                Weights::gaussian(types[i], n_out, n_in, (100 + 3 * e + i) as u64)
            })
        };
        let weights: Vec<[Weights; 3]> = (0..n_experts).map(one).collect();
        let on_device = std::array::from_fn(|i| {
            let [n_out, n_in] = shapes[i];
            let rows = weights.iter().flat_map(|one| one[i].source(n_out).bytes.to_vec()).collect::<Vec<_>>();
            let source = WeightSource { dtype: types[i], n_out: n_experts * n_out, n_in, bytes: rows.into() };
            subject.device().upload_experts(source, n_experts).expect("weights of a type that devices have")
        });
        let biases = has_biases.then(|| {
            std::array::from_fn(|i| {
                let values = gaussian(30 + i as u64, n_experts * shapes[i][0], 2.0);
                (subject.upload(&values), values)
            })
        });
        // With the spread of scores.
        let selection_bias = has_selection_bias.then(|| gaussian(40, n_experts, 0.3));
        let selection_bias = selection_bias.map(|values| (subject.upload(&values), values));
        let scales = has_scales.then(|| gaussian(41, n_experts, 1.0));
        let scales = scales.map(|values| (subject.upload(&values), values));
        Self { on_device, weights, biases, selection_bias, scales, is_ungated }
    }

    fn borrow(&self, activation: Activation) -> ExpertWeights<'_, B> {
        let [gate, up, down] = &self.on_device;
        let gate = if self.is_ungated { up } else { gate };
        let biases = self.biases.as_ref().map(|biases| biases.each_ref().map(|(on_device, _)| on_device));
        ExpertWeights { activation, gate, up, down, biases }
    }

    fn router<'a>(&'a self, routing: Routing, logits: &'a B::Buffer) -> Router<'a, B> {
        let on_device = |of: &'a Option<(B::Buffer, Vec<f32>)>| of.as_ref().map(|(on_device, _)| on_device);
        let [selection_bias, scales] = [&self.selection_bias, &self.scales].map(on_device);
        Router { routing, logits, selection_bias, scales, chosen: None }
    }

    /// Returns the output of expert `e` for a row, one of `rows`.
    fn expert(&self, e: usize, x: &Activations, case: Case, subject: &DeviceUnderTest<B>) -> Vec<Expected> {
        let [gate, up, down] = &self.weights[e];
        let gate = if self.is_ungated { up } else { gate };
        let product = |i: usize, weights: &Weights, n_out, x: &Activations| -> Vec<Expected> {
            let biased = |row| {
                let y = weights.product(row, x, case.rows, subject.arithmetic());
                let Some(biases) = &self.biases else { return y };
                let value = y.value + f64::from(biases[i].1[e * n_out + row]);
                Expected { value, tolerance: y.tolerance + roundings(1) * (value.abs() + y.tolerance) }
            };
            (0..n_out).map(biased).collect()
        };
        let pairs = product(0, gate, case.n_ff, x).into_iter().zip(product(1, up, case.n_ff, x));
        let hidden: Vec<_> = pairs.map(|(g, u)| gated(case.activation, g, u)).collect();
        product(2, down, case.n, &Activations::from_expected(&hidden))
    }
}

/// Returns the selected experts of a row, and their weights.
fn chosen(logits: &[f32], selection_bias: Option<&[f32]>, routing: Routing) -> Vec<(usize, Expected)> {
    let score = |e: usize| score(routing.scores, logits[e]);
    let is_sigmoid = matches!(routing.scores, RouterScores::Sigmoid | RouterScores::SqrtSoftplus);
    let exponential = |e: usize| f64::from(logits[e]).exp();
    let all: f64 = (0..logits.len()).map(exponential).sum();
    let selection_score = |e: usize| match (routing.scores, selection_bias) {
        // A sigmoid preserves the order of logits, if used alone.
        (_, None) if is_sigmoid && routing.expert_groups.is_some() => score(e),
        (_, None) => f64::from(logits[e]),
        (_, Some(by)) if is_sigmoid => score(e) + f64::from(by[e]),
        (_, Some(by)) => exponential(e) / all + f64::from(by[e]),
    };
    let mut candidates: Vec<usize> = (0..logits.len()).collect();
    if let Some(ExpertGroups { n, n_used }) = routing.expert_groups {
        let size = logits.len() / n;
        let n_best = if is_sigmoid { 2 } else { 1 };
        let of_group = |group: usize| {
            let best = best((group * size..(group + 1) * size).collect(), n_best.min(size), &selection_score);
            best.into_iter().map(selection_score).sum()
        };
        let expert_groups = best((0..n).collect(), n_used, &of_group);
        candidates.retain(|e| expert_groups.contains(&(e / size)));
    }
    weighted(logits, &best(candidates, routing.n_used, &selection_score), routing)
}

/// Returns the score of a logit, of functions that need no other logit.
fn score(scores: RouterScores, logit: f32) -> f64 {
    match scores {
        RouterScores::SqrtSoftplus => f64::from(logit).exp().ln_1p().sqrt(),
        _ => 1.0 / (1.0 + (-f64::from(logit)).exp()),
    }
}

/// Returns the weights of the experts `best` of a row.
fn weighted(logits: &[f32], best: &[usize], routing: Routing) -> Vec<(usize, Expected)> {
    let score = |e: usize| score(routing.scores, logits[e]);
    match routing.scores {
        RouterScores::Softmax => shares(logits, best, routing),
        RouterScores::Sigmoid | RouterScores::SqrtSoftplus => {
            let total = if routing.normalizes { best.iter().map(|&e| score(e)).sum() } else { 1.0 };
            // Roundings of an approximate exponential, the sum and the quotient of a score, twice;
            // of their sum, the quotient and the factor.
            let relative = 2.0 * roundings(8) + roundings(routing.n_used + 2);
            let weigh = |&e: &usize| {
                let value = f64::from(routing.scale) * score(e) / total;
                (e, Expected { value, tolerance: relative * value })
            };
            best.iter().map(weigh).collect()
        }
        RouterScores::SparseMixer => {
            let weigh = |(j, &e): (usize, &usize)| {
                let top = f64::from(logits[e]);
                let left = (0..logits.len()).filter(|other| !best[..j].contains(other));
                let near = left.map(|e| f64::from(logits[e])).filter(|&logit| is_near(logit, top));
                let value = f64::from(routing.scale) / near.map(|logit| (logit - top).exp()).sum::<f64>();
                // Of an approximate exponential, the sum, a quotient of three and the factor.
                (e, Expected { value, tolerance: roundings(logits.len() + 14) * value })
            };
            best.iter().enumerate().map(weigh).collect()
        }
    }
}

/// Returns whether SparseMixer mixes an expert with a better one, which must be clear.
fn is_near(logit: f64, top: f64) -> bool {
    let distance = (top - logit) / logit.abs().max(top);
    let limit = f64::from(RouterScores::NEARNESS);
    // A quotient of a difference.
    let is_clear = (distance - limit).abs() > 8.0 * ROUNDING * limit;
    assert!(is_clear, "no clear distance between {logit} and {top}");
    distance <= limit
}

/// Returns the `k` largest of some numbers, of equal ones the lower index. The next one must be
/// equal, or smaller by more than its roundings, so that the selection is the same in f32.
fn best(mut of: Vec<usize>, k: usize, selection_score: &dyn Fn(usize) -> f64) -> Vec<usize> {
    of.sort_by(|&a, &b| selection_score(b).total_cmp(&selection_score(a)).then(a.cmp(&b)));
    if let (Some(&last), Some(&next)) = (of.get(k - 1), of.get(k)) {
        let lead = selection_score(last) - selection_score(next);
        assert!(lead == 0.0 || lead > 32.0 * ROUNDING, "no clear choice between {last} and {next}");
    }
    of.truncate(k);
    of
}

/// Returns the experts' softmax weights.
fn shares(logits: &[f32], best: &[usize], routing: Routing) -> Vec<(usize, Expected)> {
    let max_logit = best.iter().map(|&e| f64::from(logits[e])).fold(f64::NEG_INFINITY, f64::max);
    let exponential = |e: usize| (f64::from(logits[e]) - max_logit).exp();
    let total: f64 = match routing.normalizes {
        true => best.iter().map(|&e| exponential(e)).sum(),
        false => (0..logits.len()).map(exponential).sum(),
    };
    // A rounding of `l - max_logit` changes its exponential by as much times that, above and below
    // the line; in addition six of an approximate exponential twice, the sum, a quotient of three
    // and the factor.
    let furthest = logits.iter().map(|&logit| (max_logit - f64::from(logit)).abs()).fold(0.0, f64::max);
    let relative = roundings(logits.len() + 16) + 2.0 * furthest * ROUNDING;
    let weigh = |&e: &usize| {
        let value = f64::from(routing.scale) * exponential(e) / total;
        (e, Expected { value, tolerance: relative * value.abs() })
    };
    best.iter().map(weigh).collect()
}

fn logits(case: Case) -> Vec<f32> {
    let mut logits = gaussian(21, case.rows * case.n_experts, 2.0);
    for (i, logit) in logits.iter_mut().enumerate() {
        match case.law {
            Law::Any => {}
            Law::Last => *logit += 20.0 * (i % case.n_experts) as f32 / case.n_experts as f32,
            Law::Alike => *logit = 0.75,
            Law::Near => *logit = 2.0 + 0.01 * *logit,
        }
    }
    logits
}

fn equals_its_equation<B: Backend>(subject: &DeviceUnderTest<B>, case: Case, skipped: &mut Skipped) {
    let what = || subject.case("expert_ffn", format_args!("{case:?}"));
    let Case { n, rows, n_used, scores, normalizes, expert_groups, .. } = case;
    let layer = Layer::new(subject, case);
    let routing = Routing { n_used, scores, normalizes, scale: 1.5, expert_groups };
    let (x, gain, logits) = (gaussian(11, rows * n, 3.0), gaussian(12, n, 3.0), logits(case));
    let weight = subject.upload(&gain);
    let norm = case.has_norm.then_some(Norm { weight: &weight, eps: EPS });
    let mut y = subject.guarded(&x);
    let on_device = subject.upload(&logits);
    let numbers = |row: usize| (0..n_used).map(move |i| (3 * row + i) % case.n_experts);
    let all: Vec<f32> = (0..rows).flat_map(numbers).map(|e| e as f32).collect();
    let given = case.are_chosen.then(|| subject.upload(&all));
    let router = Router { chosen: given.as_ref(), ..layer.router(routing, &on_device) };
    let weights = layer.borrow(case.activation);
    let mut separate = case.has_separate_output.then(|| subject.poisoned(rows * n));
    let result = subject.device().moe_ffn(&mut y, rows, norm, router, weights, separate.as_mut());
    if skipped.take(result, &what).is_none() {
        return;
    }
    if separate.is_some() {
        assert_eq!(subject.results(&y, rows * n, &what), x, "{}: the stream is left as it is", what());
    }

    let activations = |x: &[f32]| match case.has_norm {
        true => Activations::normalized(x, &gain, EPS),
        false => Activations::new(x),
    };
    let of_rows = x.chunks_exact(n).zip(logits.chunks_exact(case.n_experts)).enumerate();
    let want = of_rows.flat_map(|(i, (x, logits))| {
        let row = activations(x);
        let begin = |&x: &f32| if case.has_separate_output { 0.0 } else { x };
        let mut sums: Vec<Expected> = x.iter().map(begin).map(Expected::exactly).collect();
        let mut magnitudes: Vec<f64> = sums.iter().map(|sum| sum.value.abs()).collect();
        let selection_bias = layer.selection_bias.as_ref().map(|(_, values)| &values[..]);
        let experts = match case.are_chosen {
            true => weighted(logits, &numbers(i).collect::<Vec<_>>(), routing),
            false => chosen(logits, selection_bias, routing),
        };
        for (e, mut weight) in experts {
            if let Some((_, scales)) = &layer.scales {
                weight.value *= f64::from(scales[e]);
                weight.tolerance =
                    weight.tolerance * f64::from(scales[e]).abs() + roundings(1) * weight.value.abs();
            }
            let expert_out = layer.expert(e, &row, case, subject);
            for ((sum, magnitude), y) in sums.iter_mut().zip(&mut magnitudes).zip(expert_out) {
                let error =
                    weight.value.abs() * y.tolerance + weight.tolerance * (y.value.abs() + y.tolerance);
                sum.value += weight.value * y.value;
                sum.tolerance += error;
                *magnitude += (weight.value * y.value).abs() + error;
            }
        }
        // A product and a sum for each.
        let rounded = move |(sum, magnitude): (Expected, f64)| Expected {
            tolerance: sum.tolerance + roundings(2 * n_used) * magnitude,
            ..sum
        };
        sums.into_iter().zip(magnitudes).map(rounded).collect::<Vec<_>>()
    });
    subject.expect(separate.as_ref().unwrap_or(&y), &want.collect::<Vec<_>>(), &what);
}

/// Checks that NaN or infinity in a logit, selected or not, or in the row reaches that row only.
fn a_bad_number_reaches_its_row_and_no_other<B: Backend>(
    subject: &DeviceUnderTest<B>,
    rows: usize,
    skipped: &mut Skipped,
) {
    let shapes = [([DType::F32; 3], USUAL.n, USUAL.n_ff), ([DType::Q4_0; 3], 64, 64)];
    for ((types, n, n_ff), has_selection_bias) in product(&shapes, &[false, true]) {
        let case = Case { types, n, n_ff, rows, has_selection_bias, ..USUAL };
        let layer = Layer::new(subject, case);
        use RouterScores::{Sigmoid, Softmax};
        for (bad, in_logits, scores, normalizes) in [
            (f32::NAN, true, Softmax, true),
            (f32::NAN, true, Softmax, false),
            (f32::INFINITY, true, Softmax, true),
            (f32::NAN, true, Sigmoid, true),
            (f32::INFINITY, true, Sigmoid, false),
            (f32::NAN, false, Softmax, true),
            (f32::INFINITY, false, Softmax, false),
        ] {
            let (mut x, mut logits) = (gaussian(11, rows * n, 1.0), logits(case));
            let row = rows / 2;
            match in_logits {
                true => logits[row * case.n_experts + 3] = bad,
                false => x[row * n + 17] = bad,
            }
            let what = || {
                subject.case(
                    "expert_ffn",
                    format_args!(
                        "{bad} in row {row}, in logits {in_logits}, {scores:?} {normalizes}, {case:?}"
                    ),
                )
            };
            let mut y = subject.guarded(&x);
            let routing = Routing { scores, normalizes, ..PLAIN };
            let (weights, logits) = (layer.borrow(Activation::Silu), subject.upload(&logits));
            let router = layer.router(routing, &logits);
            let result = subject.device().moe_ffn(&mut y, rows, None, router, weights, None);
            if skipped.take(result, &what).is_none() {
                return;
            }
            for (r, y) in subject.results(&y, rows * n, &what).chunks_exact(n).enumerate() {
                assert!(y.iter().all(|y| y.is_finite() == (r != row)), "{}: row {r} is {y:?}", what());
            }
        }
    }
}

fn wrong_shapes_are_refused<B: Backend>(subject: &DeviceUnderTest<B>) {
    let device = subject.device();
    let experts = |n_out: usize, n_in: usize, n: usize| {
        let source = WeightSource { dtype: DType::F32, n_out, n_in, bytes: vec![0; 4 * n_out * n_in].into() };
        device.upload_experts(source, n)
    };
    subject.expect_refusal("experts", "seven rows for two", experts(7, 8, 2));
    subject.expect_refusal("experts", "none", experts(8, 8, 0));
    let [gate, taller, wider, more, down] =
        [(9, 8, 3), (12, 8, 3), (9, 9, 3), (12, 8, 4), (24, 3, 3)].map(|(n_out, n_in, n)| {
            experts(n_out, n_in, n).unwrap_or_else(|error| panic!("{}: {error}", subject.case("experts", n)))
        });
    let weights =
        ExpertWeights { activation: Activation::Silu, gate: &gate, up: &gate, down: &down, biases: None };
    let (mut x, logits, five) =
        (subject.upload(&[0.0; 16]), subject.upload(&[0.0; 6]), subject.upload(&[0.0; 5]));
    let mut ffn = |up, n_used, rows, has_norm: bool| {
        let norm = has_norm.then_some(Norm { weight: &five, eps: EPS });
        let routing = Routing { n_used, ..PLAIN };
        let weights = ExpertWeights { up, ..weights };
        let router = Router { routing, logits: &logits, selection_bias: None, scales: None, chosen: None };
        device.moe_ffn(&mut x, rows, norm, router, weights, None)
    };
    ffn(&gate, 2, 0, false)
        .unwrap_or_else(|error| panic!("{}: {error}", subject.case("expert_ffn", "no rows")));
    subject.expect_refusal("expert_ffn", "four features up of three", ffn(&taller, 2, 2, false));
    subject.expect_refusal("expert_ffn", "nine columns up of eight", ffn(&wider, 2, 2, false));
    subject.expect_refusal("expert_ffn", "four experts up of three", ffn(&more, 2, 2, false));
    subject.expect_refusal("expert_ffn", "none chosen", ffn(&gate, 0, 2, false));
    subject.expect_refusal("expert_ffn", "four chosen of three", ffn(&gate, 4, 2, false));
    subject.expect_refusal("expert_ffn", "a row beyond the stream", ffn(&gate, 2, 3, false));
    subject.expect_refusal("expert_ffn", "a norm of five", ffn(&gate, 2, 2, true));
    let nine = subject.upload(&[0.0; 9]);
    let plain = Router { routing: PLAIN, logits: &logits, selection_bias: None, scales: None, chosen: None };
    let mut short = subject.upload(&[0.0; 15]);
    let result = device.moe_ffn(&mut x, 2, None, plain, weights, Some(&mut short));
    subject.expect_refusal("expert_ffn", "sixteen sums for fifteen", result);
    let mut ffn = |router, weights| device.moe_ffn(&mut x, 2, None, router, weights, None);
    let biases = Some([&nine, &nine, &five]);
    let result = ffn(plain, ExpertWeights { biases, ..weights });
    subject.expect_refusal("expert_ffn", "five biases for 24 features", result);
    let by_sigmoid = Routing { scores: RouterScores::Sigmoid, ..PLAIN };
    let result = ffn(Router { routing: by_sigmoid, selection_bias: Some(&five), ..plain }, weights);
    subject.expect_refusal("expert_ffn", "selection biases of five of three experts", result);
    let result = ffn(Router { scales: Some(&five), ..plain }, weights);
    subject.expect_refusal("expert_ffn", "scales of five of three experts", result);
    for (case, n, n_used) in [
        ("two groups of three experts", 2, 1),
        ("two experts of one group of one", 3, 1),
        ("no group of three", 3, 0),
        ("four groups of three", 3, 4),
        ("no groups", 0, 0),
    ] {
        let routing = Routing { expert_groups: Some(ExpertGroups { n, n_used }), ..PLAIN };
        subject.expect_refusal("expert_ffn", case, ffn(Router { routing, ..plain }, weights));
    }
}
