//! Sessions as a source of logits.

use kvant_generate::LogitSource;
use kvant_generate::sampler::Sampler;

use super::Session;
use crate::error::Error;

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
