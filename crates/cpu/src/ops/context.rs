//! Where an op runs.

use crate::host::pool::Pool;
use crate::simd::isa::Isa;

/// The kernel set, the threads and the scratch memory of an op.
pub(crate) struct KernelContext<'a, S> {
    pub isa: Isa,
    pub pool: &'a Pool,
    pub scratch: &'a mut S,
}

impl<S> KernelContext<'_, S> {
    /// Returns the context for a part of the op.
    pub fn reborrow(&mut self) -> KernelContext<'_, S> {
        KernelContext { isa: self.isa, pool: self.pool, scratch: self.scratch }
    }
}
