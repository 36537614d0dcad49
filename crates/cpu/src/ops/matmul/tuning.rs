//! Machine-dependent numbers.
//!
//! Every value gives the same results (sums have the same order); only the time differs. The
//! defaults are sound everywhere; `Tuning::find` measures others.

use crate::simd::isa::Isa;

/// The tunable numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tuning {
    /// Prefetch distance of weights that one row reads, in bytes; 0 leaves prefetching to the
    /// hardware, as distances within its reach do but for the first lines of a panel. A line
    /// further ahead waits for memory in one of the few places for misses of the first level of
    /// cache: 24 of them, each for 75 ns, read 20 GB/s on Zen 4, where the hardware by itself reads
    /// 31.
    pub prefetch: usize,
    /// Items per thread that the weights of a decode step are divided into: more items balance
    /// threads of different speed.
    pub items_per_thread: usize,
    /// Maximum rows of prefill that share unpacked weights.
    pub row_block: usize,
}

/// Prefetch distance within the reach of the hardware, in bytes.
const NEAR: usize = 512;
/// Prefetch distance of products that take so long for a line that the hardware does not look far
/// enough ahead, in bytes: those of several rows, or of narrow vectors. A core has some 4 KB in
/// flight at full speed (latency times bandwidth, 100 ns times 40 GB/s).
const FAR: usize = 8192;

impl Default for Tuning {
    fn default() -> Self {
        Self { prefetch: FAR, items_per_thread: 8, row_block: 512 }
    }
}

impl Tuning {
    /// Returns the defaults of a kernel set.
    pub fn of(isa: Isa) -> Self {
        let is_wide = matches!(isa, Isa::Avx512(_) | Isa::Avx512Vbmi(_) | Isa::Amx(_));
        Self { prefetch: if is_wide { NEAR } else { FAR }, ..Self::default() }
    }

    /// Returns the prefetch distance of weights that `rows` rows read together, in bytes.
    pub(super) fn prefetch_for(self, rows: usize) -> usize {
        if rows == 1 { self.prefetch } else { FAR }
    }
}
