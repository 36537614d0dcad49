//! What a suite leaves out: for want of a kernel, of a promise or of time.

use kvant_backend::{BackendError, Result};

use crate::Coverage;

/// The cases of a suite that a device refused with [`BackendError::Unsupported`], those it never promised and those that it was
/// not asked for, and why. Empty when it has all that the suite asks for.
#[derive(Debug)]
pub struct Lacks {
    coverage: Coverage,
    cases: usize,
    reasons: Vec<String>,
    left_out: usize,
    asked: usize,
    /// Times that cases were chosen: each begins elsewhere, so that what meets differs.
    turn: usize,
}

impl Lacks {
    /// Of a device that is asked for these combinations.
    pub fn new(coverage: Coverage) -> Self {
        Self { coverage, cases: 0, reasons: Vec::new(), left_out: 0, asked: 0, turn: 0 }
    }

    /// The pairs of a value of `a` with one of `b` that the device is asked for.
    pub fn combine<A: Clone, B: Clone>(&mut self, a: &[A], b: &[B]) -> Vec<(A, B)> {
        let every = product(a, b);
        if self.coverage == Coverage::Every || every.is_empty() {
            return every;
        }
        let pair = |i: usize| (a[i % a.len()].clone(), b[(i + self.turn) % b.len()].clone());
        let chosen: Vec<_> = (0..a.len().max(b.len())).map(pair).collect();
        self.turn += 1;
        self.asked += chosen.len();
        self.left_out += every.len() - chosen.len();
        chosen
    }

    /// What a case gave; `None` where the device has no kernel for it.
    ///
    /// # Panics
    /// With any other error; `what` names device, op and case.
    #[track_caller]
    pub fn take<T>(&mut self, result: Result<T>, what: &dyn Fn() -> String) -> Option<T> {
        match result {
            Ok(result) => Some(result),
            Err(error) if self.excuses(&error) => None,
            Err(error) => panic!("{}: {error}", what()),
        }
    }

    /// Whether a case may be left out because of `error`; remembers those that may.
    pub fn excuses(&mut self, error: &BackendError) -> bool {
        let BackendError::Unsupported { .. } = error else { return false };
        self.leave_out(error.to_string());
        true
    }

    /// Leaves a case out because of `reason`.
    pub fn leave_out(&mut self, reason: String) {
        self.cases += 1;
        if !self.reasons.contains(&reason) {
            self.reasons.push(reason);
        }
    }

    /// Whether the device refused or never promised something that it was asked for.
    pub fn has_refused(&self) -> bool {
        self.cases > 0
    }

    /// Why a suite did not run whole, in one line; `None` when it did.
    pub fn reason(&self) -> Option<String> {
        let lacking = (self.cases > 0).then(|| format!("{} cases: {}", self.cases, self.reasons.join("; ")));
        let left_out = (self.left_out > 0).then(|| {
            let all = self.left_out + self.asked;
            format!("{} of {all} combinations of edge sizes, each of which is in another", self.left_out)
        });
        let both: Vec<_> = lacking.into_iter().chain(left_out).collect();
        (!both.is_empty()).then(|| both.join("; "))
    }
}

impl From<()> for Lacks {
    /// Of a suite that no device may lack a part of.
    fn from((): ()) -> Self {
        Self::new(Coverage::Every)
    }
}

/// Every pair of a value of `a` with one of `b`.
pub fn product<A: Clone, B: Clone>(a: &[A], b: &[B]) -> Vec<(A, B)> {
    a.iter().flat_map(|a| b.iter().map(|b| (a.clone(), b.clone()))).collect()
}
