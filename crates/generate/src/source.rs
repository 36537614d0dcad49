//! Source of logits: a session of a model, or a test.

use crate::sampler::Sampler;

/// Logits that follow the last token of a context.
pub trait LogitSource {
    /// Reason why there are none.
    type Error;

    /// Returns the logits, `[n_vocab]`.
    ///
    /// # Errors
    /// The context has no logits, or they cannot be read.
    fn logits(&mut self) -> Result<&[f32], Self::Error>;

    /// Samples from unchanged logits. A device returns only the candidates that the sampler needs,
    /// to which temperature, top-p and min-p are applied here: that takes microseconds for some 40
    /// of them. A batch may have selected them for all of its sequences
    /// ([`Sequence::n_candidates`](crate::Sequence::n_candidates)).
    ///
    /// # Errors
    /// As [`LogitSource::logits`]; an error of the sampler.
    fn sample(&mut self, sampler: &mut Sampler) -> Result<u32, Self::Error>;

    /// Samples from logits `[n_vocab]` that `change` has edited; negative infinity excludes a
    /// token.
    ///
    /// # Errors
    /// As [`LogitSource::sample`].
    fn sample_with(
        &mut self,
        sampler: &mut Sampler,
        change: &mut dyn FnMut(&mut [f32]),
    ) -> Result<u32, Self::Error>;
}
