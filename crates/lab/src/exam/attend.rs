//! Attention over a cache of Gaussian tokens.

use kvant_codec::random::Random;
use kvant_conformance::kv::{Answer, Shape, Tokens};

use super::{Answers, Exam, Picks};
use crate::case::Attend;
use crate::device::DeviceArithmetic;
use crate::wire::to_bytes;

/// One query in eight looks for one token, which gets nearly all its weight: a kernel that skips
/// the token's tile is then wrong by a whole value, where it would otherwise be wrong by a share
/// that no bound sees. Few enough that skipping tiles of little weight, which is right, gains
/// little.
const NEEDLES: u64 = 8;
/// Score of that token. The scores of `n` others are about 1 in size, so that its weight is
/// `e^14 / (e^14 + n sqrt(e))`: above nine tenths up to 2^16 tokens.
const NEEDLE_SCORE: f32 = 14.0;
/// Answers of either kind that the reference judges in a timed request: milliseconds each.
const N_EACH: usize = 2;

/// Attention over a cache.
pub(super) struct AttendExam {
    case: Attend,
    tokens: Tokens,
    state: Vec<u8>,
}

impl AttendExam {
    pub(super) fn new(case: Attend, seed: u64) -> Self {
        let tokens = Tokens::gaussian(shape(&case), case.depth, seed >> 1);
        let state = to_bytes(&[&tokens.k[..], &tokens.v].concat());
        Self { case, tokens, state }
    }

    /// Returns a query that looks for a token of its head at random, at most the oldest of the
    /// step.
    fn needle(&self, head: usize, random: &mut Random) -> Vec<f32> {
        let Attend { kv_heads, group, dim, depth, rows, .. } = self.case;
        let token = (random.bits() % (depth - rows + 1) as u64) as usize;
        let key = &self.tokens.k[(token * kv_heads + head / group) * dim..][..dim];
        let square: f32 = key.iter().map(|k| k * k).sum();
        let factor = NEEDLE_SCORE * (dim as f32).sqrt() / square;
        key.iter().map(|k| k * factor).collect()
    }
}

/// Returns the shape of a cache.
pub(crate) fn shape(case: &Attend) -> Shape {
    let &Attend { k, v, kv_heads, group, dim, .. } = case;
    Shape { n_kv_heads: kv_heads, group, k_head_dim: dim, v_head_dim: dim, ..Shape::new(k, v) }
}

impl Exam for AttendExam {
    fn state(&self) -> &[u8] {
        &self.state
    }

    fn inputs(&self, n: usize, random: &mut Random) -> Vec<f32> {
        let Attend { kv_heads, group, dim, rows, .. } = self.case;
        let n_heads = kv_heads * group;
        let mut inputs = Vec::with_capacity(n * rows * n_heads * dim);
        for query in 0..n * rows * n_heads {
            match random.bits() >> 32 & (NEEDLES - 1) {
                0 => inputs.extend(self.needle(query % n_heads, random)),
                _ => inputs.extend((0..dim).map(|_| random.gaussian() as f32)),
            }
        }
        inputs
    }

    fn check(
        &self,
        arithmetic: &DeviceArithmetic,
        inputs: &[f32],
        answers: Answers<'_>,
        random: &mut Random,
    ) -> Result<(), String> {
        let Attend { kv_heads, group, dim, depth, rows, .. } = self.case;
        let n_heads = kv_heads * group;
        let picks = Picks { width: dim, n: inputs.len() / dim, n_each: N_EACH };
        let (got, picked) = picks.take(answers, random)?;
        for index in picked {
            let (row, head) = (index / n_heads % rows, index % n_heads);
            let (position, q) = (depth - rows + row, &inputs[index * dim..][..dim]);
            let answer = Answer::new(&self.tokens, 0..=position, position, head, q, arithmetic.attention);
            if let Some(fault) = answer.fault(&got[index * dim..][..dim]) {
                // The values of a whole head say less than the distance.
                let fault = fault.split(": ").next().unwrap_or_default();
                return Err(format!("position {position}, head {head}: {fault}"));
            }
        }
        Ok(())
    }
}
