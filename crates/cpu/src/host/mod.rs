//! The threads and the memory of the host: a thread pool, slices that its threads share, buffers,
//! and pages of the KV cache.

pub(crate) mod buffer;
pub(crate) mod disjoint;
pub(crate) mod page;
pub(crate) mod pool;
