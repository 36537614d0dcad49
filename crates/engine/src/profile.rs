//! Profile of decode attention: its time with stages of the cache read left out one by one.

use crate::error::Error;
use crate::runtime::StageTime;
use crate::session::Session;

impl Session {
    /// Times the attention of one token over the whole cache, layer after layer, for each stage:
    /// constant codes and scales; scales; all bytes; low bits; everything. The cache must hold at
    /// least one token, and stays unchanged.
    ///
    /// # Errors
    /// On a device or kernel set without stages.
    pub fn profile_attention(&self, repetitions: usize) -> Result<Vec<StageTime>, Error> {
        assert!(!self.tokens().is_empty(), "nothing to attend to");
        self.recommit()?;
        self.sequence().loaded().profile_attention(self.sequence().id(), repetitions)
    }
}
