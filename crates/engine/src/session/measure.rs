//! Measurements of a session's cache and attention.

use kvant_backend::limits::check_size;
use kvant_codec::Side;
use kvant_codec::random::Random;
use kvant_model::LogitsFor;

use super::Session;
use crate::error::Error;

/// What measurements of speed and quality need of a [`Session`], and generation does not.
pub trait Measure {
    /// Feeds `tokens` in one step and passes the queries of each layer to `tell`, as `(KV layer
    /// that they attend to, queries after RoPE [tokens, n_heads * k_head_dim])`.
    /// [`Measure::kv_rows`] then returns the keys and values.
    ///
    /// # Errors
    /// As [`Session::feed`]; more tokens than [`Session::max_tokens`].
    fn feed_observed(
        &mut self,
        tokens: &[u32],
        on_queries: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<(), Error>;

    /// Appends `n` tokens with random keys and values: fills a context to any depth in little time,
    /// to measure speed at it. The logits that follow are meaningless.
    ///
    /// # Errors
    /// A context too small for them, or a device error.
    fn fill_random(&mut self, n: usize, seed: u64) -> Result<(), Error>;

    /// Returns the decoded keys or values of one KV head, `[tokens, head_dim]`, for measurements.
    ///
    /// # Errors
    /// When the device cannot be read.
    ///
    /// # Panics
    /// When the model has no such layer or head.
    fn kv_rows(&self, layer: usize, head: usize, side: Side) -> Result<Vec<f32>, Error>;
}

impl Measure for Session {
    fn feed_observed(
        &mut self,
        tokens: &[u32],
        on_queries: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<(), Error> {
        self.check_capacity(tokens)?;
        self.recommit()?;
        check_size("tokens", tokens.len(), 1..=self.max_tokens())?;
        self.step(tokens, LogitsFor::None, Some(on_queries))?;
        self.commit_step(tokens);
        Ok(())
    }

    fn fill_random(&mut self, n: usize, seed: u64) -> Result<(), Error> {
        let mut random = Random::new(seed);
        self.recommit()?;
        (self.logits_loan, self.has_real_kv) = (None, false);
        let mut left = n;
        while left > 0 {
            let rows = self.sequence.max_step_rows().min(left);
            let result = self.sequence.loaded().append_random(self.sequence.id(), rows, &mut random);
            self.tokens.resize(self.sequence.len(), 0);
            result?;
            left -= rows;
        }
        Ok(())
    }

    fn kv_rows(&self, layer: usize, head: usize, side: Side) -> Result<Vec<f32>, Error> {
        self.recommit()?;
        self.sequence.loaded().kv_rows(self.sequence.id(), layer, head, side)
    }
}
