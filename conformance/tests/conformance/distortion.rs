//! Distortion of the attention output with quantized caches, compared with theory: for each kind of
//! layer, on random keys, values and queries.
//!
//! A vector loses the share L of its square, as [`kvant_codec::distortion`] measures it (see
//! docs/formats.md for the theory), in an independent direction. So a score is off by a variance of
//! `σ² = scale² L |q|² |k|² / dims`, less where it is capped; a weight w by the factor `exp(δ)` of
//! such a normal δ, whose spread is `exp(σ²) - 1`; and an output, of independent tokens, by
//!
//! ```text
//! E |Δ out|² = Σ w² ((exp(σ²) - 1) |v - out|² + L |v|²)
//! ```
//!
//! over the quantized tokens of a query. The weight of an attention sink belongs to no token, and
//! has no error.

use kvant_codec::DType;
use kvant_codec::distortion::{self, FileBytes};
use kvant_codec::random::Random;
use kvant_conformance::kv::{Batch, Shape, Tokens};
use kvant_conformance::{Arithmetic, Attention, DeviceUnderTest};
use kvant_cpu::{CpuDevice, Isa};
use libtest_mimic::Trial;

/// Maximum relative difference of the measured distortion from theory.
const TOLERANCE: f64 = 0.05;
/// Tokens, of which the last are rows of the step.
const TOKENS: usize = 200;
const ROWS: usize = 4;
/// Number of random samples. Queries of one sample share the tokens, so that its value errors are
/// hardly more than one random vector.
const DRAWS: u64 = 24;

/// Returns a trial per kind of layer.
pub fn trials() -> Vec<Trial> {
    let of = |dim| Shape { k_head_dim: dim, v_head_dim: dim, group: 8, ..Shape::new(DType::F16, DType::F16) };
    let kinds = [
        ("heads_of_64", of(64)),
        ("heads_of_256", of(256)),
        ("heads_of_512", of(512)),
        ("a_window", Shape { window: Some(150), ..of(128) }),
        ("bounded_scores", Shape { soft_cap: Some(1.5), ..of(128) }),
        ("sinks", Shape { sinks: Some([2.0, 0.25]), ..of(128) }),
        ("one_latent_stream", Shape { group: 8, ..Shape::shared_kv(DType::F16, 576, 512) }),
    ];
    let trial = |(name, shape): (&str, Shape)| {
        Trial::test(format!("distortion::{name}"), move || {
            loses_what_theory_gives(shape);
            Ok(())
        })
    };
    kinds.into_iter().map(trial).collect()
}

fn loses_what_theory_gives(shape: Shape) {
    for isa in [Some(Isa::Scalar), Isa::available().last().copied()].into_iter().flatten() {
        let device = CpuDevice::new(isa, 1).unwrap();
        let subject = DeviceUnderTest::new("cpu", device, Arithmetic::Float, Attention::Exact);
        let draws: Vec<Drawn> = (0..DRAWS).map(|seed| Drawn::new(&shape, seed)).collect();
        let exact: Vec<_> = draws.iter().map(|drawn| drawn.outputs(&subject, shape)).collect();
        for dtype in [DType::Turbo4, DType::Turbo3, DType::Q8_0] {
            // The error of queries in bytes is as large as that of these codes.
            if dtype == DType::Q8_0 && isa != Isa::Scalar {
                continue;
            }
            let coded = Shape { k: dtype, v: dtype, ..shape };
            let loss = |dim| distortion::measure(dtype, dim, FileBytes::Gaussian, 500, 1).unwrap().mse;
            let losses = [loss(shape.k_head_dim), loss(shape.v_head_dim)];
            let (mut got, mut want) = (0.0, 0.0);
            for (drawn, exact) in draws.iter().zip(&exact) {
                let outs = drawn.outputs(&subject, coded);
                got += outs.iter().zip(exact).map(|(coded, exact)| square(coded - exact)).sum::<f64>();
                want += drawn.theory(coded, losses);
            }
            let relative_error = got / want - 1.0;
            assert!(
                relative_error.abs() <= TOLERANCE,
                "{isa:?} {dtype}: lost {got:e}, theory has {want:e}: {relative_error:+.3}"
            );
        }
    }
}

fn square(x: f32) -> f64 {
    f64::from(x) * f64::from(x)
}

/// Keys `[TOKENS, k_head_dim]`, values `[TOKENS, v_head_dim]` and queries `[ROWS, n_heads,
/// k_head_dim]`.
struct Drawn {
    k: Vec<f32>,
    v: Vec<f32>,
    q: Vec<f32>,
}

impl Drawn {
    fn new(shape: &Shape, seed: u64) -> Self {
        let Shape { k_head_dim, v_head_dim, .. } = *shape;
        let mut random = Random::new(seed);
        let mut gaussian = |n: usize, spread: f64| {
            let mut x = vec![0.0; n];
            random.fill_gaussian(&mut x, spread);
            x
        };
        let [k, v] = [k_head_dim, v_head_dim].map(|dim| gaussian(TOKENS * dim, 1.0));
        // With a wider spread of scores, a few tokens would take all the weight.
        let q = gaussian(ROWS * shape.n_heads() * k_head_dim, 0.75);
        // The value is a prefix of the key, if both are one.
        let beginnings = || k.chunks_exact(k_head_dim).flat_map(|k| &k[..v_head_dim]).copied().collect();
        let v = if shape.shared_kv { beginnings() } else { v };
        Self { k, v, q }
    }

    fn tokens(&self, shape: Shape) -> Tokens {
        Tokens::new(shape, self.k.clone(), if shape.shared_kv { Vec::new() } else { self.v.clone() })
    }

    /// Returns the outputs of the last rows, `[ROWS, n_heads, v_head_dim]`.
    fn outputs(&self, subject: &DeviceUnderTest<CpuDevice>, shape: Shape) -> Vec<f32> {
        let tokens = self.tokens(shape);
        let mut batch = Batch::fed(subject, &tokens, TOKENS - ROWS, 64).unwrap();
        batch.append(&[ROWS]).unwrap();
        batch.attend(&self.q, &|| format!("{shape:?}")).unwrap()
    }

    /// Returns the sum of `E |Δ out|²` over all queries, for these losses of keys and values.
    fn theory(&self, shape: Shape, losses: [f64; 2]) -> f64 {
        let tokens = self.tokens(shape);
        let of_query = |(index, q): (usize, &[f32])| {
            let (position, head) = (TOKENS - ROWS + index / shape.n_heads(), index % shape.n_heads());
            of_query(&tokens, [&self.k, &self.v], losses, position, head, q)
        };
        self.q.chunks_exact(shape.k_head_dim).enumerate().map(of_query).sum()
    }
}

/// Returns `E |Δ out|²` of a query of `head` at `position`, for these losses of keys and values.
fn of_query(
    tokens: &Tokens,
    [k, v]: [&[f32]; 2],
    [of_keys, of_values]: [f64; 2],
    position: usize,
    head: usize,
    q: &[f32],
) -> f64 {
    let shape = &tokens.shape;
    let scale = f64::from(shape.params().scale);
    let oldest = shape.window.map_or(0, |window| (position + 1).saturating_sub(window));
    let [keys, values]: [Vec<&[f32]>; 2] = [(k, shape.k_head_dim), (v, shape.v_head_dim)]
        .map(|(x, dim)| x.chunks_exact(dim).take(position + 1).skip(oldest).collect());
    // Capped scores, and the remaining share of their error.
    let bent = |k: &&[f32]| {
        let score = scale * dot(q, k);
        shape.soft_cap.map(f64::from).map_or((score, 1.0), |cap| {
            let tanh = (score / cap).tanh();
            (cap * tanh, 1.0 - tanh * tanh)
        })
    };
    let scores: Vec<_> = keys.iter().map(bent).collect();
    let sink = shape.sinks().map_or(0.0, |sinks| f64::from(sinks[head]).exp());
    let total: f64 = scores.iter().map(|(score, _)| score.exp()).sum::<f64>() + sink;
    let weights: Vec<f64> = scores.iter().map(|(score, _)| score.exp() / total).collect();
    let mut out = vec![0.0; shape.v_head_dim];
    for (v, weight) in values.iter().zip(&weights) {
        out.iter_mut().zip(*v).for_each(|(out, &v)| *out += weight * f64::from(v));
    }
    let mut lost = 0.0;
    for (i, (((k, v), weight), (_, slope))) in keys.iter().zip(&values).zip(&weights).zip(&scores).enumerate()
    {
        let spread = of_keys * dot(q, q) * dot(k, k) / k.len() as f64 * (scale * slope).powi(2);
        let squared_distance: f64 = v.iter().zip(&out).map(|(&v, out)| (f64::from(v) - out).powi(2)).sum();
        let [key_is_coded, value_is_coded] =
            [&tokens.keys, &tokens.values].map(|of| of[0].read_at(position, oldest + i).1);
        if key_is_coded {
            lost += weight * weight * spread.exp_m1() * squared_distance;
        }
        if value_is_coded {
            lost += weight * weight * of_values * dot(v, v);
        }
    }
    lost
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
}
