//! Reference implementations: every op in plain loops and f64, from its equation.

use kvant_backend::host_ops::Pointwise;
use kvant_backend::{
    Activation, Candidate, ConvForm, Gate, Pairing, ShortConv, StateHeads, StateInputs, StateRule, Xielu,
};
use kvant_codec::Rotation;

use crate::judge::{Expected, roundings};

/// Computes `x / sqrt(mean(x²) + eps) * weight` (arXiv 1910.07467).
pub fn rms_norm(x: &[f64], weight: &[f32], eps: f32) -> Vec<f64> {
    let mean = x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64;
    let factor = 1.0 / (mean + f64::from(eps)).sqrt();
    x.iter().zip(weight).map(|(v, &w)| v * factor * f64::from(w)).collect()
}

/// Computes `(x - m) / sqrt(mean((x - m)²) + eps) * weight`, m the mean of x (arXiv 1607.06450).
pub fn layer_norm(x: &[f64], weight: &[f32], eps: f32) -> Vec<f64> {
    let mean = x.iter().sum::<f64>() / x.len() as f64;
    rms_norm(&x.iter().map(|v| v - mean).collect::<Vec<_>>(), weight, eps)
}

/// Computes `sum a[i] b[i]`.
pub fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Computes `sqrt(sum x[i]²)`.
pub fn norm(x: &[f32]) -> f64 {
    x.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>().sqrt()
}

/// Computes `exp(s[i] - max s) / sum exp(s[j] - max s)`, in place.
pub fn softmax(scores: &mut [f64]) {
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    scores.iter_mut().for_each(|s| *s = (*s - max).exp());
    let sum: f64 = scores.iter().sum();
    scores.iter_mut().for_each(|s| *s /= sum);
}

/// Computes ReLU, SiLU, `g / (1 + exp(-g))` (clamped: of `min(g, L)` and with a rate; limited: at
/// most L), GELU in its tanh form, `g / 2 (1 + tanh(√(2/π) (g + 0.044715 g³)))`, or that over g, or
/// SiTU, `L tanh(g / L) / (1 + exp(-g))`.
pub fn activate(activation: Activation, g: f64) -> f64 {
    match activation {
        Activation::Silu => g / (1.0 + (-g).exp()),
        Activation::Relu => g.max(0.0),
        Activation::NormalCdf => 1.0 / (1.0 + (-gelu_exponent(g)).exp()),
        Activation::Limited { limit } => (g / (1.0 + (-g).exp())).min(f64::from(limit)),
        Activation::Clamped { limit } => {
            let g = g.min(f64::from(limit));
            g / (1.0 + (-g).exp())
        }
        Activation::Situ { limit, .. } => soft_cap(g, limit) / (1.0 + (-g).exp()),
        Activation::Bounded => {
            let [rate, limit] = Activation::BOUNDED.map(f64::from);
            let g = g.min(limit);
            g / (1.0 + (-rate * g).exp())
        }
        Activation::Gelu => {
            g / 2.0 * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (g + 0.044_715 * g.powi(3))).tanh())
        }
    }
}

/// Computes GELU in both forms, SiLU, ReLU or tanh.
pub fn apply(f: Pointwise, x: f64) -> f64 {
    match f {
        // `activate` cancels where this is small.
        Pointwise::GeluTanh => x / (1.0 + (-gelu_exponent(x)).exp()),
        Pointwise::Gelu => x / 2.0 * (1.0 + erf(x / 2f64.sqrt())),
        Pointwise::Silu => activate(Activation::Silu, x),
        Pointwise::Relu => activate(Activation::Relu, x),
        Pointwise::Tanh => x.tanh(),
    }
}

/// Computes the error function within 2e-8: its series, which loses digits for large x, or its
/// limit.
fn erf(x: f64) -> f64 {
    if x.abs() > 4.0 {
        return 1f64.copysign(x);
    }
    let (mut term, mut sum) = (x, x);
    for n in 1..100 {
        term *= -x * x / f64::from(n);
        sum += term / f64::from(2 * n + 1);
    }
    sum * 2.0 / std::f64::consts::PI.sqrt()
}

/// Computes `cap tanh(x / cap)`.
pub fn soft_cap(x: f64, cap: f32) -> f64 {
    f64::from(cap) * (x / f64::from(cap)).tanh()
}

/// Computes xIELU (arXiv 2411.13010): `p x² + b x` for positive x, else
/// `n (expm1(min(x, eps)) - x) + b x`.
pub fn xielu(x: f64, numbers: Xielu) -> f64 {
    let [positive, negative, slope, eps] =
        [numbers.positive, numbers.negative, numbers.slope, numbers.eps].map(f64::from);
    let curved = if x > 0.0 { positive * x * x } else { negative * (x.min(eps).exp_m1() - x) };
    curved + slope * x
}

/// Rotates the pairs of `head` by `angles` `[n_rot / 2][cos, sin]`; the rest is unchanged
/// (RoFormer, arXiv 2104.09864).
pub fn rotate_pairs(head: &mut [f64], pairing: Pairing, angles: &[[f32; 2]]) {
    for (i, &[cos, sin]) in angles.iter().enumerate() {
        let (first, second) = pair(pairing, angles.len(), i);
        let (a, b, cos, sin) = (head[first], head[second], f64::from(cos), f64::from(sin));
        (head[first], head[second]) = (a * cos - b * sin, a * sin + b * cos);
    }
}

/// Returns the indices of pair `i` of `n`.
pub fn pair(pairing: Pairing, n: usize, i: usize) -> (usize, usize) {
    match pairing {
        Pairing::Interleaved => (2 * i, 2 * i + 1),
        Pairing::Halves => (i, i + n),
    }
}

/// Returns the `k` most probable candidates, by sorting all.
pub fn top_k(logits: &[f32], k: usize) -> Vec<Candidate> {
    let mut all: Vec<_> = (0..).zip(logits).map(|(id, &logit)| Candidate { id, logit }).collect();
    all.sort_by(Candidate::rank);
    all.truncate(k);
    all
}

/// Applies the rotation of the TQ weights to each block of 32, as a matrix: `y[i] = sum_j H[i, j]
/// s[j] x[j] / sqrt(32)` with `H[i, j] = (-1)^popcount(i & j)`.
pub fn rotate(x: &[f64]) -> Vec<f64> {
    let rotation = Rotation::tq();
    let n = rotation.len();
    let sign = |is_negative: bool| if is_negative { -1.0 } else { 1.0 };
    let rotated = |block: &[f64], i: usize| -> f64 {
        let terms = block
            .iter()
            .enumerate()
            .map(|(j, x)| sign((i & j).count_ones() % 2 == 1) * sign(rotation.before() >> j & 1 == 1) * x);
        sign(rotation.after() >> i & 1 == 1) * terms.sum::<f64>() / (n as f64).sqrt()
    };
    x.chunks_exact(n).flat_map(|block| (0..n).map(move |i| rotated(block, i))).collect()
}

/// Computes the factor of a gate: `1 / (1 + exp(-g))`, g times that, GELU, g, or `ln(1 + exp(g))`.
pub fn gate(gate: Gate, g: f64) -> f64 {
    match gate {
        Gate::Sigmoid => 1.0 / (1.0 + (-g).exp()),
        Gate::Silu => g / (1.0 + (-g).exp()),
        // This form is exact for small values.
        Gate::Gelu => g / (1.0 + (-gelu_exponent(g)).exp()),
        Gate::Plain => g,
        Gate::Softplus => g.max(0.0) + (-g.abs()).exp().ln_1p(),
    }
}

/// Computes the z of GELU's `g / (1 + exp(-z))`.
pub fn gelu_exponent(g: f64) -> f64 {
    (8.0 / std::f64::consts::PI).sqrt() * (g + 0.044_715 * g.powi(3))
}

/// Computes the sum of a short convolution for channel `c` of row `row` of `x`, the first rows of a
/// sequence, and the sum of the magnitudes.
pub fn short_conv(conv: ShortConv, x: &[f32], kernel: &[f32], row: usize, c: usize) -> (f64, f64) {
    let ShortConv { channels, taps, form } = conv;
    let entered = |row: usize| {
        let x = &x[row * conv.n_in()..][..conv.n_in()];
        match form {
            ConvForm::Gated => f64::from(x[c]) * f64::from(x[2 * channels + c]),
            ConvForm::Silu => f64::from(x[c]),
        }
    };
    let term = |age: usize| f64::from(kernel[(taps - 1 - age) * channels + c]) * entered(row - age);
    let bias = f64::from(kernel[taps * channels + c]);
    let terms = (0..taps.min(row + 1)).map(term);
    terms.fold((bias, bias.abs()), |(sum, magnitude), term| (sum + term, magnitude + term.abs()))
}

/// Computes [`Backend::linear_attention`](kvant_backend::Backend::linear_attention) for each of the
/// first rows of a sequence, `[rows, n_v_heads * v_dim]`.
///
/// With the delta rule, a row maps a state S to `decay (I - write k kᵀ) S + write k vᵀ` with k of
/// length one and both gates from 0 to 1, which increases no distance between two states: the
/// roundings of each row (those of two products of `k_dim` terms, of k, of the gates, and of keep
/// by as many as its exponent counts) add up, times the largest state and value so far. A state
/// space maps S to `decay S + t k vᵀ`, which increases no distance either, and adds a write of its
/// own size.
pub fn linear_attention(heads: &StateHeads, inputs: StateInputs<&[f32]>) -> Vec<Expected> {
    let &StateHeads { n_k_heads, n_v_heads, k_dim, v_dim, .. } = heads;
    let n_qkv = heads.n_qkv();
    let (n_rows, n_steps) = (inputs.qkv.len() / n_qkv, inputs.rule.n_steps(heads));
    let steps_of = |head: usize| head * n_steps / n_v_heads..(head + 1) * n_steps / n_v_heads;
    let mut expected = vec![Expected { value: 0.0, tolerance: 0.0 }; n_rows * n_v_heads * v_dim];
    for head in 0..n_v_heads {
        let mut state = vec![vec![0.0; k_dim]; v_dim];
        let (mut error, mut largest) = (0.0, vec![0.0; v_dim]);
        for row in 0..n_rows {
            let x: Vec<f64> = inputs.qkv[row * n_qkv..][..n_qkv].iter().map(|&x| f64::from(x)).collect();
            let unit_vector = |side: usize| {
                let x = &x[(side * n_k_heads + heads.key_head(head)) * k_dim..][..k_dim];
                let length = match inputs.rule {
                    StateRule::GatedDeltaNet { eps, .. } | StateRule::KimiDelta { eps, .. } => {
                        (norm_of(x).powi(2) + f64::from(eps)).sqrt()
                    }
                    StateRule::Mamba2 { .. } => 1.0,
                };
                x.iter().map(|x| x / length).collect::<Vec<f64>>()
            };
            let (q, k) = (unit_vector(0), unit_vector(1));
            let of_head = |values: &[f32]| f64::from(values[row * n_v_heads + head]);
            let raw = steps_of(head)
                .map(|at| f64::from(inputs.step[row * n_steps + at]) + f64::from(inputs.bias[at]));
            let steps: Vec<f64> = raw.clone().map(|step| step.exp().ln_1p()).collect();
            let rate = f64::from(inputs.decay[head]);
            let exponents: Vec<f64> = match inputs.rule {
                StateRule::KimiDelta { bound: Some(bound), .. } => {
                    // The slope of the logistic function is at most a quarter.
                    let of_argument = raw.clone().map(|step| (rate * step).abs()).fold(0.0, f64::max);
                    error += roundings(3) * f64::from(bound.abs()) * of_argument / 4.0;
                    raw.map(|step| f64::from(bound) / (1.0 + (-rate * step).exp())).collect()
                }
                _ => steps.iter().map(|step| rate * step).collect(),
            };
            // One for all dims, or one for each.
            let decays: Vec<f64> = exponents.iter().cycle().take(k_dim).map(|x| x.exp()).collect();
            let largest_exponent = exponents.iter().map(|x| x.abs()).fold(0.0, f64::max);
            error += roundings(3 * k_dim + 40) + roundings(12) * largest_exponent;
            for (column, state) in state.iter_mut().enumerate() {
                let value = x[2 * n_k_heads * k_dim + head * v_dim + column];
                state.iter_mut().zip(&decays).for_each(|(s, decay)| *s *= decay);
                let (change, scale, past) = match inputs.rule {
                    StateRule::GatedDeltaNet { write, .. } | StateRule::KimiDelta { write, .. } => {
                        let predicted: f64 = state.iter().zip(&k).map(|(s, k)| s * k).sum();
                        let change = (value - predicted) * gate(Gate::Sigmoid, of_head(write));
                        (change, 1.0 / (k_dim as f64).sqrt(), 0.0)
                    }
                    StateRule::Mamba2 { skip } => (steps[0] * value, 1.0, f64::from(skip[head]) * value),
                };
                state.iter_mut().zip(&k).for_each(|(s, k)| *s += k * change);
                let reach = norm_of(state) + value.abs() + change.abs() * norm_of(&k);
                largest[column] = reach.max(largest[column]);
                let sum: f64 = state.iter().zip(&q).map(|(s, q)| s * q).sum();
                let error = scale * (error + roundings(2 * k_dim)) * largest[column] * norm_of(&q);
                expected[(row * n_v_heads + head) * v_dim + column] =
                    Expected { value: scale * sum + past, tolerance: error + roundings(3) * past.abs() };
            }
        }
    }
    expected
}

/// Computes the 2-norm.
fn norm_of(x: &[f64]) -> f64 {
    x.iter().map(|x| x * x).sum::<f64>().sqrt()
}
