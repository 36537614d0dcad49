//! Machine-dependent numbers.
//!
//! Every value gives the same results (sums have the same order); only the time differs. The
//! defaults are sound everywhere; `Tuning::find` measures others.

/// The tunable numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tuning {
    /// Prefetch distance of weights in decode, in bytes; 0 leaves prefetching to the hardware. A
    /// core has some 4 KB in flight at full speed (latency times bandwidth, 100 ns times 40 GB/s).
    pub prefetch: usize,
    /// Items per thread that the weights of a decode step are divided into: more items balance
    /// threads of different speed.
    pub items_per_thread: usize,
    /// Maximum rows of prefill that share unpacked weights.
    pub row_block: usize,
}

impl Default for Tuning {
    fn default() -> Self {
        Self { prefetch: 8192, items_per_thread: 8, row_block: 512 }
    }
}
