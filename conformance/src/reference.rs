//! Every op in plain loops and f64, from its equation.

use kvant_backend::{Activation, Candidate, Pairing};
use kvant_codec::Rotation;

/// `x / sqrt(mean(x²) + eps) * weight` (arXiv 1910.07467).
pub fn rms_norm(x: &[f64], weight: &[f32], eps: f32) -> Vec<f64> {
    let mean = x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64;
    let factor = 1.0 / (mean + f64::from(eps)).sqrt();
    x.iter().zip(weight).map(|(v, &w)| v * factor * f64::from(w)).collect()
}

/// `(x - m) / sqrt(mean((x - m)²) + eps) * weight`, m the mean of x (arXiv 1607.06450).
pub fn layer_norm(x: &[f64], weight: &[f32], eps: f32) -> Vec<f64> {
    let mean = x.iter().sum::<f64>() / x.len() as f64;
    rms_norm(&x.iter().map(|v| v - mean).collect::<Vec<_>>(), weight, eps)
}

/// `sum a[i] b[i]`.
pub fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// `sqrt(sum x[i]²)`.
pub fn norm(x: &[f32]) -> f64 {
    x.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>().sqrt()
}

/// `exp(s[i] - max s) / sum exp(s[j] - max s)`, in place.
pub fn softmax(scores: &mut [f64]) {
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    scores.iter_mut().for_each(|s| *s = (*s - max).exp());
    let sum: f64 = scores.iter().sum();
    scores.iter_mut().for_each(|s| *s /= sum);
}

/// SiLU, `g / (1 + exp(-g))` (of `min(g, L)` and with a rate where it is bounded), or GELU in its tanh form, `g / 2 (1 + tanh(√(2/π) (g + 0.044715 g³)))`.
pub fn activate(activation: Activation, g: f64) -> f64 {
    match activation {
        Activation::Silu => g / (1.0 + (-g).exp()),
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

/// `cap tanh(x / cap)`.
pub fn soft_cap(x: f64, cap: f32) -> f64 {
    f64::from(cap) * (x / f64::from(cap)).tanh()
}

/// Turns the pairs of `head` by `angles` `[n_rot / 2][cos, sin]`; the rest passes (RoFormer, arXiv 2104.09864).
pub fn turn(head: &mut [f64], pairing: Pairing, angles: &[[f32; 2]]) {
    for (i, &[cos, sin]) in angles.iter().enumerate() {
        let (first, second) = pair(pairing, angles.len(), i);
        let (a, b, cos, sin) = (head[first], head[second], f64::from(cos), f64::from(sin));
        (head[first], head[second]) = (a * cos - b * sin, a * sin + b * cos);
    }
}

/// Where the values of pair `i` of `n` stand.
pub fn pair(pairing: Pairing, n: usize, i: usize) -> (usize, usize) {
    match pairing {
        Pairing::Interleaved => (2 * i, 2 * i + 1),
        Pairing::Halves => (i, i + n),
    }
}

/// The `k` likeliest of all candidates, by sorting them.
pub fn top_k(logits: &[f32], k: usize) -> Vec<Candidate> {
    let mut all: Vec<_> = (0..).zip(logits).map(|(id, &logit)| Candidate { id, logit }).collect();
    all.sort_by(Candidate::rank);
    all.truncate(k);
    all
}

/// The rotation of the TQ weights on each block of 32, as the matrix it is: `y[i] = sum_j H[i, j] s[j] x[j] / sqrt(32)` with
/// `H[i, j] = (-1)^popcount(i & j)`.
pub fn rotate(x: &[f64]) -> Vec<f64> {
    let rotation = Rotation::tq();
    let n = rotation.len();
    let sign = |is_negative: bool| if is_negative { -1.0 } else { 1.0 };
    let turned = |block: &[f64], i: usize| -> f64 {
        let terms = block
            .iter()
            .enumerate()
            .map(|(j, x)| sign((i & j).count_ones() % 2 == 1) * sign(rotation.before() >> j & 1 == 1) * x);
        sign(rotation.after() >> i & 1 == 1) * terms.sum::<f64>() / (n as f64).sqrt()
    };
    x.chunks_exact(n).flat_map(|block| (0..n).map(move |i| turned(block, i))).collect()
}
