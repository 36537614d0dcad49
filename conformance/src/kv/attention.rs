//! Reference attention in f64 over the tokens that a query attends to, and the error bounds of
//! devices.
//!
//! All distances are between whole outputs of a head, in the 2-norm, which rotations preserve.
//!
//! # Exact readers
//!
//! A rotation adds in seven butterflies at most and scales once, each a rounding of the whole
//! vector: with those of the codec, the device and the conversions, [`ROTATIONS`] roundings of the
//! query and the keys, and as many of values and output. So a score is off by at most `e =
//! roundings · scale |q| max|k|`, a weight by a factor within `exp(±2e)` (its own error, and that
//! of the sum), and the output by `(exp(2e) - 1 + roundings) max|v|`.
//!
//! # Integer readers
//!
//! Rounding to multiples of a unit has a variance of `unit² / 12`, independent for each number:
//!
//! - the values of a query on coded keys have a unit of `max|q| / MAX`, so that a score is off by a
//!   variance of `scale² unit² / 12 |k|²`;
//! - the codebook of keys loses `l |k|² / dims` in each dimension ([`kvant_codec::ByteBook`]):
//!   `scale² l |k|² |q|² / dims`;
//! - a score that is off by `d` changes the output by `w d (v - out)`, where w is the token's
//!   weight;
//! - the weights of coded values have a unit of `max(w) / MAX`, as if all scales were alike, which
//!   those of Gaussians are: `unit² / 12 |v|²`, or, dithered, `unit² / 4 |v|²` at most; and their
//!   codebook loses `w² l |v|²`;
//! - to this f32 adds: sums of up to 256 terms with independent roundings, so √256 of them, and
//!   [`EXP2`].
//!
//! A soft cap contracts scores, so that these bounds hold with it too; its tanh is off by at most
//! [`SUM_ROUNDINGS`] roundings of the cap.
//!
//! An attention sink reduces all weights by one factor: they are smaller, and so is the effect of
//! their errors. The sink itself is off by a rounding or two, as a score is; an error of a weight
//! also changes the sum that normalizes it, so that the output counts as the distance from the
//! sink's value, which is zero.
//!
//! An output may be five standard deviations away.
//!
//! # Readers in f16
//!
//! Rounding to f16 has a variance of at most `(2^-11)² / 3` of the square. A product of a query
//! with a key takes three such roundings (query, key, the scale of its block), so a score is off by
//! a variance of `2^-22 scale² sum q[d]² k[d]²`; weights, values and their scales are three again,
//! `2^-22 w² |v|²`. Codebooks in bytes and f32 are those of integer readers.
//!
//! A query in 16-bit fixed point with a unit of `max|q| / 32639` has less: its variance is `unit² /
//! 12` in each dimension, `(max / 32 rms)²` of a rounding to f16 over all of them, and the largest
//! of n dimensions is at most `√n rms`. So have weights in fixed point relative to the largest
//! product with a scale among 128 tokens, `128 / 12 / 65535²` of its square, a hundredth of
//! `2^-22`.

use kvant_codec::DType;
use kvant_codec::tile::prepare_query;

use super::Tokens;
use crate::Attention;
use crate::judge::roundings;
use crate::reference::{norm, soft_cap, softmax};

/// Roundings of two rotations of 128 values, at both ends.
const ROTATIONS: usize = 20;
/// Roundings of a sum of 256 terms, and of `2^x` in f32 (2.5e-7 relative).
const SUM_ROUNDINGS: usize = 16 + EXP2;
/// Roundings of `2^x`.
const EXP2: usize = 5;
/// Variance of three roundings to f16, for a square of 1.
const THREE_HALVES: f64 = 1.0 / (1u64 << 22) as f64;
/// Maximum distance of an output in standard deviations.
const DEVIATIONS: f64 = 5.0;

/// Expected output for one query of one head.
pub struct Answer {
    /// `[v_head_dim]`
    pub out: Vec<f64>,
    /// Maximum distance of a device's output.
    pub distance: f64,
}

/// Pooled keys that a query attends to.
#[derive(Clone, Copy)]
pub struct PooledTokens<'a> {
    /// All pooled keys, as tokens.
    pub keys: &'a Tokens,
    /// Those that it attends to.
    pub numbers: &'a [usize],
}

/// A token as the query reads it.
struct VisibleToken<'a> {
    weight: f64,
    /// As stored, for the norms in the kernels' arithmetic.
    key: Side,
    value: Side,
    /// The decoded value, `[v_head_dim]`.
    plain: &'a [f32],
    /// `sum q[d]² k[d]²`, with |k| the sum of the stored key and its centre in magnitude.
    squared_products: f64,
}

/// One side of a token.
struct Side {
    /// Norm of the stored vector.
    norm: f64,
    centre: f64,
    in_codes: bool,
}

impl VisibleToken<'_> {
    /// Returns the maximum norm of its value.
    fn reach_of_value(&self) -> f64 {
        self.value.norm + self.value.centre
    }
}

impl Answer {
    /// Computes the output for query `q` `[k_head_dim]` of query head `head` at `position`, which
    /// attends to the tokens `visible_tokens`.
    pub fn new(
        tokens: &Tokens,
        visible_tokens: impl IntoIterator<Item = usize>,
        position: usize,
        head: usize,
        q: &[f32],
        attention: Attention,
    ) -> Self {
        let none = PooledTokens { keys: tokens, numbers: &[] };
        Self::with_pooled(tokens, visible_tokens, none, position, head, q, attention)
    }

    /// As [`Answer::new`], over pooled keys beside the tokens.
    pub fn with_pooled(
        tokens: &Tokens,
        visible_tokens: impl IntoIterator<Item = usize>,
        pooled: PooledTokens<'_>,
        position: usize,
        head: usize,
        q: &[f32],
        attention: Attention,
    ) -> Self {
        let (shape, kv_head) = (&tokens.shape, head / tokens.shape.group);
        let scale = f64::from(shape.params().scale);
        let spec = shape.spec(kvant_codec::Side::K);
        let q = &tokens.queries[kv_head].apply(q);
        let mut stored = vec![0.0; spec.stored_dim()];
        prepare_query(spec.rotates, q, &mut stored);
        let (mut scores, mut visible) = (Vec::new(), Vec::new());
        let of_tokens = visible_tokens.into_iter().map(|token| (tokens, position, token));
        // A pooled key has no tail, so that any position reads the same.
        let of_pooled = pooled.numbers.iter().map(|&number| (pooled.keys, number, number));
        for (tokens, position, token) in of_tokens.chain(of_pooled) {
            let (key, key_in_codes) = tokens.keys[kv_head].read_at(position, token);
            let (value, value_in_codes) = tokens.values[kv_head].read_at(position, token);
            let products = q.iter().zip(&key.plain).map(|(&q, &k)| f64::from(q) * f64::from(k));
            let score = scale * products.sum::<f64>();
            scores.push(shape.soft_cap.map_or(score, |cap| soft_cap(score, cap)));
            visible.push(VisibleToken {
                weight: 0.0,
                key: Side { norm: norm(&key.stored), centre: norm(&key.centre), in_codes: key_in_codes },
                value: Side {
                    norm: norm(&value.stored),
                    centre: norm(&value.centre),
                    in_codes: value_in_codes,
                },
                plain: &value.plain,
                squared_products: stored
                    .iter()
                    .zip(key.stored.iter().zip(&key.centre))
                    .map(|(q, (k, c))| f64::from(q.abs() * (k.abs() + c.abs())).powi(2))
                    .sum(),
            });
        }
        scores.extend(shape.sinks().map(|sinks| f64::from(sinks[head])));
        softmax(&mut scores);
        let mut out = vec![0.0; shape.v_head_dim];
        for (visible, weight) in visible.iter_mut().zip(scores) {
            visible.weight = weight;
            out.iter_mut().zip(visible.plain).for_each(|(out, &v)| *out += weight * f64::from(v));
        }
        let distance = match attention {
            Attention::Exact => exact(&visible, scale * norm(&stored), ROTATIONS),
            // A score sums its products in lanes, an output its tokens one after the other.
            Attention::Floats => {
                let n = ROTATIONS + SUM_ROUNDINGS + stored.len() / 16 + visible.len();
                exact(&visible, scale * norm(&stored), n)
            }
            Attention::Integers { .. } | Attention::Halves => {
                DEVIATIONS * variance(tokens, &visible, &out, &stored, attention).sqrt()
            }
        };
        // Factors on the output scale its error, and take a rounding or two themselves.
        let output_map = &tokens.outs[kv_head];
        let stretched = distance * output_map.max_stretch();
        let out = output_map.apply(&out);
        let lost = roundings(2) * output_map.reach(&out);
        Self { out, distance: stretched + lost }
    }

    /// Returns the fault of `got` in one sentence; `None` if it is within the distance. NaN never
    /// is.
    pub fn fault(&self, got: &[f32]) -> Option<String> {
        if got.len() != self.out.len() {
            return Some(format!("{} values, want {}", got.len(), self.out.len()));
        }
        let squares = got.iter().zip(&self.out).map(|(&got, want)| (f64::from(got) - want).powi(2));
        let distance = squares.sum::<f64>().sqrt();
        let is_near = distance <= self.distance;
        (!is_near)
            .then(|| format!("{distance:e} away, allowed {:e}: {got:?}, want {:?}", self.distance, self.out))
    }
}

/// Returns the bound of exact readers with `n` roundings. A score is at most `reach` times the norm
/// of its key.
fn exact(visible: &[VisibleToken<'_>], reach: f64, n: usize) -> f64 {
    let e = roundings(n) * reach * max_over(visible, |visible| visible.key.norm + visible.key.centre);
    ((2.0 * e).exp_m1() + roundings(n)) * max_over(visible, |visible| visible.reach_of_value())
}

/// Returns the variance of the output of rounding readers, summed over its dimensions.
fn variance(
    tokens: &Tokens,
    visible: &[VisibleToken<'_>],
    out: &[f64],
    q: &[f32],
    attention: Attention,
) -> f64 {
    let shape = &tokens.shape;
    let scale = f64::from(shape.params().scale);
    let largest = q.iter().fold(0.0f64, |max, x| max.max(f64::from(x.abs())));
    let query_unit = largest / attention.query_steps(shape.k);
    let of_weights = max_over(visible, |visible| visible.weight).powi(2) * attention.weight_variance(shape.v);
    let lost_by_books = codebook_loss(shape.k) * norm(q).powi(2) / q.len() as f64;
    let halves = if attention == Attention::Halves { THREE_HALVES } else { 0.0 };
    let mut variance = 0.0;
    for VisibleToken { weight, key, value, plain, squared_products } in visible {
        let mut of_score = halves * scale.powi(2) * squared_products;
        if key.in_codes {
            of_score += (scale * key.norm).powi(2) * (query_unit.powi(2) / 12.0 + lost_by_books);
        }
        let squared_distance: f64 = plain.iter().zip(out).map(|(&v, out)| (f64::from(v) - out).powi(2)).sum();
        let mut of_weight = halves * weight.powi(2);
        if value.in_codes {
            of_weight += of_weights + weight.powi(2) * codebook_loss(shape.v);
        }
        variance += weight.powi(2) * of_score * squared_distance + value.norm.powi(2) * of_weight;
    }
    let cap = shape.soft_cap.map_or(0.0, f64::from);
    let sink = shape.sinks().map_or(0.0, |sinks| sinks.iter().fold(0.0, |max, sink| sink.abs().max(max)));
    let reach = scale * norm(q) * max_over(visible, |visible| visible.key.norm + visible.key.centre)
        + cap
        + f64::from(sink);
    variance
        + (roundings(SUM_ROUNDINGS) * (1.0 + reach) * max_over(visible, |visible| visible.reach_of_value()))
            .powi(2)
}

/// Returns the loss of a type's codebook in bytes, for a variance of 1; see
/// [`kvant_codec::ByteBook`].
fn codebook_loss(dtype: DType) -> f64 {
    match dtype {
        DType::Turbo2 => 1e-7,
        DType::Turbo3 => 4e-6,
        DType::Turbo4 => 3.1e-5,
        _ => 0.0,
    }
}

fn max_over(visible: &[VisibleToken<'_>], of: impl Fn(&VisibleToken<'_>) -> f64) -> f64 {
    visible.iter().map(of).fold(0.0, f64::max)
}
