//! Appending Gaussian tokens to a cache: every device stores what the codec stores, bit for bit.

use kvant_backend::TOKENS_PER_BLOCK;
use kvant_codec::random::Random;
use kvant_codec::{Side, TILE};
use kvant_conformance::kv::{Record, Shape};
use kvant_conformance::weights::gaussian;

use super::{Answers, Exam};
use crate::case::{Append, Read};
use crate::device::DeviceArithmetic;
use crate::wire::{to_bytes, to_values};

/// Most tokens of a request of one step after another.
const MAX_TOKENS: usize = 1 << 14;

/// Appending to a cache.
pub(super) struct AppendExam {
    case: Append,
    /// Keys and values of the tokens before, `[start, kv_heads, dim]` each.
    before: [Vec<f32>; 2],
    state: Vec<u8>,
}

impl AppendExam {
    pub(super) fn new(case: Append, seed: u64) -> Self {
        let len = case.start * case.kv_heads * case.dim;
        let before = [seed, !seed].map(|seed| gaussian(seed, len, 1.0));
        let state = to_bytes(&before.concat());
        Self { case, before, state }
    }

    /// Compares decoded tokens `[2 kv_heads][n, dim]`, those of the steps, with the codec's.
    fn check_rows(&self, inputs: &[f32], got: &[f32]) -> Result<(), String> {
        let Append { kv_heads, dim, start, .. } = self.case;
        let n = inputs.len() / (2 * kv_heads * dim);
        // A block does not depend on those before it.
        let first = start / TOKENS_PER_BLOCK * TOKENS_PER_BLOCK;
        let stored_dim = got.len() / (2 * kv_heads * n);
        for (tensor, got) in got.chunks_exact(n * stored_dim).enumerate() {
            let (side, head) = ([Side::K, Side::V][tensor / kv_heads], tensor % kv_heads);
            let before = &self.before[tensor / kv_heads][first * kv_heads * dim..];
            let rows: Vec<f32> = [before, &self.side_of(inputs, tensor / kv_heads)].concat();
            let rows = rows.chunks_exact(dim).skip(head).step_by(kv_heads).map(<[f32]>::to_vec);
            let record = Record::new(shape(&self.case).spec(side), rows);
            for (token, got) in (start..).zip(got.chunks_exact(stored_dim)) {
                let want = record.stored_since(first, token, start + n);
                if got != want {
                    let at = got.iter().zip(want).position(|(got, want)| got != want);
                    let what = at.map_or_else(
                        || format!("{stored_dim} values, want {}", want.len()),
                        |at| format!("[{at}] is {}, want {}", got[at], want[at]),
                    );
                    return Err(format!("token {token} of {side:?}, head {head}: {what}"));
                }
            }
        }
        Ok(())
    }

    /// Returns keys or values of the steps in a row, `[n, kv_heads, dim]`.
    fn side_of(&self, inputs: &[f32], side: usize) -> Vec<f32> {
        let half = self.case.rows * self.case.kv_heads * self.case.dim;
        inputs.chunks_exact(half).skip(side).step_by(2).flatten().copied().collect()
    }
}

/// Returns the shape of a cache without a sink: blocks begin at the first token.
pub(crate) fn shape(case: &Append) -> Shape {
    let &Append { dtype, kv_heads, dim, .. } = case;
    Shape { n_kv_heads: kv_heads, k_head_dim: dim, v_head_dim: dim, ..Shape::new(dtype, dtype) }
}

impl Exam for AppendExam {
    fn state(&self) -> &[u8] {
        &self.state
    }

    fn inputs(&self, n: usize, random: &mut Random) -> Vec<f32> {
        let len = 2 * n * self.case.rows * self.case.kv_heads * self.case.dim;
        (0..len).map(|_| random.gaussian() as f32).collect()
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
        let Answers { got, base } = answers;
        match (self.case.read, base) {
            (Read::Rows, _) => {
                let expected = self.n_stored(inputs);
                let got = to_values(got).filter(|got| got.len() == expected);
                self.check_rows(inputs, &got.ok_or_else(|| format!("expected {expected} stored values"))?)
            }
            // Every device stores the same bytes.
            (Read::Bytes, Some(base)) if got != base => {
                let at = got.iter().zip(base).position(|(got, base)| got != base).unwrap_or(got.len());
                Err(format!("byte {at} of the cache is not the one that base stores"))
            }
            (Read::Bytes, _) => Ok(()),
        }
    }
}

impl AppendExam {
    /// Returns the number of stored values of the steps.
    fn n_stored(&self, inputs: &[f32]) -> usize {
        let Append { dim, .. } = self.case;
        let stored_dim = shape(&self.case).spec(Side::K).stored_dim();
        inputs.len() / dim * stored_dim
    }
}

const _: () = assert!(TOKENS_PER_BLOCK.is_multiple_of(TILE));
