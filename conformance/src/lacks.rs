//! What a device says that it has no kernel for.

use kvant_backend::{BackendError, Result};

/// The cases of a suite that a device refused with [`BackendError::Unsupported`], and why. Empty when it has all that the
/// suite asks for.
#[derive(Debug, Default)]
pub struct Lacks {
    cases: usize,
    reasons: Vec<String>,
}

impl Lacks {
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
        self.cases += 1;
        let reason = error.to_string();
        if !self.reasons.contains(&reason) {
            self.reasons.push(reason);
        }
        true
    }

    /// Why a suite did not run whole, in one line; `None` when it did.
    pub fn reason(&self) -> Option<String> {
        (self.cases > 0).then(|| format!("{} cases: {}", self.cases, self.reasons.join("; ")))
    }
}

impl From<()> for Lacks {
    /// Of a suite that no device may lack a part of.
    fn from((): ()) -> Self {
        Self::default()
    }
}
