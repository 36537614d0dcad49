//! Exams: what the judge asks of a case, and how it knows that an answer is right.
//!
//! The judge makes the state of a case (a cache's tokens, a matrix) and the inputs of every request
//! from fresh seeds. The slow references and error bounds are those of the conformance suites.

mod append;
mod attend;
mod model;
mod product;

use kvant_codec::random::Random;

use crate::case::Case;
use crate::device::DeviceArithmetic;
use crate::wire::to_values;

pub(crate) use append::shape as append_shape;
pub(crate) use attend::shape as attend_shape;
pub use model::{MAX_KLD, divergence};
pub(crate) use model::{MAX_TOKENS as MAX_MODEL_TOKENS, bundled};

/// What is asked in a case.
pub trait Exam {
    /// Returns what a worker prepares from.
    fn state(&self) -> &[u8];
    /// Returns fresh inputs of `n` steps.
    fn inputs(&self, n: usize, random: &mut Random) -> Vec<f32>;
    /// Returns the most steps of one request.
    fn max_steps(&self) -> usize {
        MAX_STEPS
    }
    /// Returns the fault of the answers of a device of this arithmetic in one line. Without the
    /// answers of base, the reference judges every answer; with them, those that differ most from
    /// base's and some at random.
    fn check(
        &self,
        arithmetic: &DeviceArithmetic,
        inputs: &[f32],
        answers: Answers<'_>,
        random: &mut Random,
    ) -> Result<(), String>;
}

/// Answers of a candidate, and those of base to the same inputs.
#[derive(Debug, Clone, Copy)]
pub struct Answers<'a> {
    /// The candidate's.
    pub got: &'a [u8],
    /// Base's.
    pub base: Option<&'a [u8]>,
}

/// Most steps of a request.
const MAX_STEPS: usize = 1 << 12;

/// Makes the exam of a case from a fresh seed.
///
/// # Errors
///
/// A model that does not exist.
pub fn exam(case: &Case, seed: u64) -> Result<Box<dyn Exam>, String> {
    Ok(match case {
        Case::Attend(case) => Box::new(attend::AttendExam::new(*case, seed)),
        Case::Product(case) => Box::new(product::ProductExam::new(*case, seed)),
        Case::Append(case) => Box::new(append::AppendExam::new(*case, seed)),
        Case::Model(case) => Box::new(model::ModelExam::new(case.clone(), seed)?),
    })
}

/// Answers that a request is checked for: as many that differ most from base's as at random.
struct Picks {
    /// Values per answer.
    width: usize,
    /// Answers in all.
    n: usize,
    /// Answers of either kind.
    n_each: usize,
}

impl Picks {
    /// Returns the answers in f32, and the numbers of those to judge.
    fn take(&self, answers: Answers<'_>, random: &mut Random) -> Result<(Vec<f32>, Vec<usize>), String> {
        let wanted = self.n * self.width;
        let values = |bytes: &[u8]| to_values(bytes).filter(|values| values.len() == wanted);
        let of = |bytes: &[u8]| {
            values(bytes).ok_or_else(|| format!("{} bytes of answers, want {}", bytes.len(), 4 * wanted))
        };
        let got = of(answers.got)?;
        let Some(base) = answers.base else { return Ok((got, (0..self.n).collect())) };
        let base = of(base)?;
        let pairs = got.chunks_exact(self.width).zip(base.chunks_exact(self.width));
        let distances: Vec<f64> = pairs.map(|(got, base)| distance(got, base)).collect();
        let mut picked: Vec<usize> = (0..self.n).filter(|&i| distances[i] > 0.0).collect();
        picked.sort_by(|&a, &b| distances[b].total_cmp(&distances[a]));
        picked.truncate(self.n_each);
        picked.extend((0..self.n_each).map(|_| (random.bits() % self.n.max(1) as u64) as usize));
        Ok((got, picked))
    }
}

/// Returns the 2-norm of a difference; infinite where there is NaN.
fn distance(a: &[f32], b: &[f32]) -> f64 {
    let squares = a.iter().zip(b).map(|(&a, &b)| if a == b { 0.0 } else { f64::from(a - b).powi(2) });
    let sum: f64 = squares.sum();
    if sum.is_nan() { f64::INFINITY } else { sum.sqrt() }
}
