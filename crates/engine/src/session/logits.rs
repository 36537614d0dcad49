//! Sessions as a source of logits.

use std::sync::Arc;

use kvant_backend::TopK;
use kvant_generate::LogitSource;
use kvant_generate::sampler::Sampler;

use super::Session;
use crate::error::Error;
use crate::runtime::Logits;

/// Logits of a step on loan to a session.
pub(super) struct LogitsLoan {
    pub logits: Arc<dyn Logits>,
    /// The row that follows the session's last token.
    pub row: usize,
    /// How many of its most probable tokens the session has selected.
    pub n_selected: usize,
}

impl LogitsLoan {
    pub fn new(logits: Arc<dyn Logits>, row: usize) -> Self {
        Self { logits, row, n_selected: 0 }
    }

    /// Returns the loan of another row of the same logits.
    pub fn at(self, row: usize) -> Self {
        Self::new(self.logits, row)
    }
}

impl Session {
    /// Selects `k` candidates of the row that follows the last token, unless the batch has done so.
    pub(super) fn select_candidates(&mut self, k: usize) -> Result<(), Error> {
        let LogitsLoan { logits, row, n_selected } = self.logits_loan.as_mut().ok_or(Error::NoLogits)?;
        if *n_selected < k {
            *n_selected = 0;
            logits.top_k(&mut [TopK { row: *row, k, out: &mut self.candidates }])?;
            *n_selected = k;
        }
        Ok(())
    }
}

impl LogitSource for Session {
    type Error = Error;

    fn logits(&mut self) -> Result<&[f32], Error> {
        self.logits()
    }

    fn sample(&mut self, sampler: &mut Sampler) -> Result<u32, Error> {
        self.sample(sampler)
    }

    fn sample_with(
        &mut self,
        sampler: &mut Sampler,
        change: &mut dyn FnMut(&mut [f32]),
    ) -> Result<u32, Error> {
        self.sample_with(sampler, change)
    }
}
