//! Profiles of decode: attention with stages of the cache read left out one by one, and each kernel
//! on devices that time them.

use kvant_backend::KernelTime;

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

    /// Decodes `n` tokens behind the cache, which then holds what it held before, and returns the
    /// time of each kernel, the longest first: that of the device, without what lies between
    /// launches. Empty on devices without such times.
    ///
    /// # Errors
    /// A context too small for `n + 1` tokens, or a device error.
    pub fn profile_kernels(&mut self, n: usize) -> Result<Vec<KernelTime>, Error> {
        if !self.sequence().loaded().time_kernels(true)? {
            return Ok(Vec::new());
        }
        let depth = self.tokens().len();
        let times = self.timed_decode(n);
        self.sequence().loaded().time_kernels(false)?;
        self.rewind(depth)?;
        times
    }

    fn timed_decode(&mut self, n: usize) -> Result<Vec<KernelTime>, Error> {
        // Compiles the kernels; what it took is forgotten.
        self.feed(&[0], &mut |_| true)?;
        self.sequence().loaded().time_kernels(true)?;
        (0..n).try_for_each(|_| self.feed(&[0], &mut |_| true).map(drop))?;
        self.sequence().loaded().kernel_times()
    }
}
