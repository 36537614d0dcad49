//! Skipped cases of a suite: unsupported, not promised, or not requested.

use kvant_backend::{BackendError, Result};

use crate::Coverage;

/// The cases of a suite that a device rejected with [`BackendError::Unsupported`], those that it
/// does not promise and those that were not requested, with the reasons. Empty for a complete run.
#[derive(Debug)]
pub struct Skipped {
    coverage: Coverage,
    cases: usize,
    reasons: Vec<String>,
    omitted: usize,
    requested: usize,
    /// Number of selections: each begins at another offset, so that the pairs vary.
    n_selections: usize,
}

impl Skipped {
    /// Creates an empty list for a device with this coverage.
    pub fn new(coverage: Coverage) -> Self {
        Self { coverage, cases: 0, reasons: Vec::new(), omitted: 0, requested: 0, n_selections: 0 }
    }

    /// Returns the requested pairs of a value of `a` with one of `b`.
    pub fn combine<A: Clone, B: Clone>(&mut self, a: &[A], b: &[B]) -> Vec<(A, B)> {
        let every = product(a, b);
        if self.coverage == Coverage::Every || every.is_empty() {
            return every;
        }
        let pair = |i: usize| (a[i % a.len()].clone(), b[(i + self.n_selections) % b.len()].clone());
        let chosen: Vec<_> = (0..a.len().max(b.len())).map(pair).collect();
        self.n_selections += 1;
        self.requested += chosen.len();
        self.omitted += every.len() - chosen.len();
        chosen
    }

    /// Returns the result of a case; `None` if the device has no kernel for it.
    ///
    /// # Panics
    ///
    /// With any other error; `what` names device, op and case.
    #[track_caller]
    pub fn take<T>(&mut self, result: Result<T>, what: &dyn Fn() -> String) -> Option<T> {
        match result {
            Ok(result) => Some(result),
            Err(error) if self.permits_skip(&error) => None,
            Err(error) => panic!("{}: {error}", what()),
        }
    }

    /// Returns whether `error` permits skipping a case, and counts it.
    pub fn permits_skip(&mut self, error: &BackendError) -> bool {
        let BackendError::Unsupported { .. } = error else { return false };
        self.leave_out(error.to_string());
        true
    }

    /// Skips a case because of `reason`.
    pub fn leave_out(&mut self, reason: String) {
        self.cases += 1;
        if !self.reasons.contains(&reason) {
            self.reasons.push(reason);
        }
    }

    /// Returns whether the device rejected or does not promise a requested case.
    pub fn has_refused(&self) -> bool {
        self.cases > 0
    }

    /// Returns why a suite is incomplete, in one line; `None` if it is complete.
    pub fn reason(&self) -> Option<String> {
        let lacking = (self.cases > 0).then(|| format!("{} cases: {}", self.cases, self.reasons.join("; ")));
        let omitted = (self.omitted > 0).then(|| {
            let all = self.omitted + self.requested;
            format!("{} of {all} combinations of edge sizes, each of which is in another", self.omitted)
        });
        let both: Vec<_> = lacking.into_iter().chain(omitted).collect();
        (!both.is_empty()).then(|| both.join("; "))
    }
}

impl From<()> for Skipped {
    /// For suites without optional cases.
    fn from((): ()) -> Self {
        Self::new(Coverage::Every)
    }
}

/// Returns every pair of a value of `a` with one of `b`.
pub fn product<A: Clone, B: Clone>(a: &[A], b: &[B]) -> Vec<(A, B)> {
    a.iter().flat_map(|a| b.iter().map(|b| (a.clone(), b.clone()))).collect()
}
