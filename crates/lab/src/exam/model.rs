//! Steps of a whole model: its logits are compared with those of base.
//!
//! There is no bound on a whole model's logits: roundings of one layer decide those of the next. So
//! the divergence of the distributions is bounded by several times what another right arithmetic
//! makes of it ([`MAX_KLD`]), and the [gate](crate::gate) judges what the model says.

use kvant_codec::random::Random;
use kvant_eval::SAMPLE;
use kvant_quantize::synthetic::Shape;

use super::{Answers, Exam};
use crate::case::Model;
use crate::device::DeviceArithmetic;
use crate::wire::{to_bytes, to_values};

/// Largest divergence of the candidate's next-token distribution from base's in nats, the mean over
/// a request: eight times what scalar, AVX2 and AVX-512 kernels of one tree differ by on the
/// bundled model (0.0002 to 0.0006 nats over 256 tokens, turbo3 and q8_0, decode and steps of 32).
pub const MAX_KLD: f64 = 0.005;
/// Most tokens of a request, and of a session beyond its depth.
pub(crate) const MAX_TOKENS: usize = 512;

/// Steps of a model.
pub(super) struct ModelExam {
    case: Model,
    n_vocab: usize,
    /// Tokens of a text, of which steps take a part at random; random ones if empty.
    text: Vec<u32>,
    state: Vec<u8>,
}

impl ModelExam {
    pub(super) fn new(case: Model, seed: u64) -> Result<Self, String> {
        let (n_vocab, text) = match case.name.split_once(':') {
            Some((shape, _)) => {
                (Shape::named(shape).map_err(|error| error.to_string())?.n_vocab(), Vec::new())
            }
            None => {
                let model = bundled()?;
                let tokenizer = model.tokenizer().map_err(|error| error.to_string())?;
                let text = tokenizer.encode_exact(SAMPLE).map_err(|error| error.to_string())?;
                (model.n_vocab(), text)
            }
        };
        let mut exam = Self { case, n_vocab, text, state: Vec::new() };
        exam.state = to_bytes(&exam.tokens(exam.case.depth, &mut Random::new(seed)));
        Ok(exam)
    }

    /// Returns `n` tokens as f32, which holds each exactly.
    fn tokens(&self, n: usize, random: &mut Random) -> Vec<f32> {
        let below = |bound: usize, random: &mut Random| (random.bits() % bound.max(1) as u64) as usize;
        if self.text.is_empty() {
            return (0..n).map(|_| below(self.n_vocab, random) as f32).collect();
        }
        let first = below(self.text.len() - n.min(self.text.len()), random);
        self.text.iter().cycle().skip(first).take(n).map(|&token| token as f32).collect()
    }
}

/// Opens the bundled model of the judge, which is that of every tree.
///
/// # Errors
///
/// Those of the engine.
pub(crate) fn bundled() -> Result<kvant::Model, String> {
    kvant::Model::bundled(Default::default()).map_err(|error| error.to_string())
}

impl Exam for ModelExam {
    fn state(&self) -> &[u8] {
        &self.state
    }

    fn inputs(&self, n: usize, random: &mut Random) -> Vec<f32> {
        self.tokens(n * self.case.rows, random)
    }

    fn max_steps(&self) -> usize {
        (MAX_TOKENS / self.case.rows).max(1)
    }

    fn check(
        &self,
        _: &DeviceArithmetic,
        inputs: &[f32],
        answers: Answers<'_>,
        _: &mut Random,
    ) -> Result<(), String> {
        let wanted = inputs.len() / self.case.rows * self.n_vocab;
        let logits = |bytes: &[u8]| to_values(bytes).filter(|logits| logits.len() == wanted);
        let missing = || format!("expected {wanted} logits");
        let got = logits(answers.got).ok_or_else(missing)?;
        if let Some(at) = got.iter().position(|logit| !logit.is_finite()) {
            return Err(format!("step {}: the logit is {}", at / self.n_vocab, got[at]));
        }
        let Some(base) = answers.base else { return Ok(()) };
        let base = logits(base).ok_or_else(missing)?;
        let steps = got.chunks_exact(self.n_vocab).zip(base.chunks_exact(self.n_vocab));
        let mean =
            steps.map(|(got, base)| divergence(base, got)).sum::<f64>() / (wanted / self.n_vocab) as f64;
        match mean <= MAX_KLD {
            true => Ok(()),
            false => Err(format!("{mean:.5} nats from base, at most {MAX_KLD}")),
        }
    }
}

/// Returns the divergence of the distribution of logits `q` from that of `p` in nats.
pub fn divergence(p: &[f32], q: &[f32]) -> f64 {
    let log_sum = |logits: &[f32]| {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|&logit| f64::from(logit - max).exp()).sum();
        f64::from(max) + sum.ln()
    };
    let (of_p, of_q) = (log_sum(p), log_sum(q));
    let term = |(&p, &q): (&f32, &f32)| {
        let (p, q) = (f64::from(p) - of_p, f64::from(q) - of_q);
        p.exp() * (p - q)
    };
    p.iter().zip(q).map(term).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divergences_are_those_of_the_definition() {
        // p = (1/2, 1/2), q = (1/4, 3/4): ln(2)/2 + ln(2/3)/2.
        let q = [0.0, 3f32.ln()];
        let want = (2f64.ln() + (2.0 / 3.0f64).ln()) / 2.0;
        assert!((divergence(&[7.0, 7.0], &q) - want).abs() < 1e-6);
        assert_eq!(divergence(&[1.0, 2.0], &[1.0, 2.0]), 0.0);
        assert!(divergence(&[1.0, f32::NAN], &[1.0, 2.0]).is_nan());
    }
}
