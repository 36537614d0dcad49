//! Software prefetch of the KV cache.

use std::ptr;

use super::shape::BLOCK_TILES;
use super::view::Block;
use crate::simd::vec16::prefetch_line;

/// Bytes of a cache line.
const LINE: usize = 64;

/// Address of the first line, and the number of lines.
type Lines = (*const u8, usize);

/// Maximum number of runs: those of a block of keys and a block of values, and their centres.
const MAX_LINES: usize = 2 * (BLOCK_TILES + 1);

/// The bytes that a thread reads next, prefetched while it works on the current block, a few lines
/// with each step of the loops. A core sustains few outstanding lines: many prefetches at once
/// stall the work behind them, and leave the memory idle later.
#[derive(Debug)]
pub(super) struct Prefetcher {
    /// Remainder of the run that is being prefetched.
    run: Lines,
    /// The runs after it, last first.
    later: [Lines; MAX_LINES],
    n_later: usize,
    lines_per_step: usize,
}

impl Prefetcher {
    /// Returns a prefetcher for all bytes of some blocks, spread over `n_steps` steps.
    pub(super) fn of<'a>(blocks: impl DoubleEndedIterator<Item = &'a Block<'a>>, n_steps: usize) -> Self {
        let mut later = [(ptr::null(), 0); MAX_LINES];
        let (mut n_later, mut n_lines) = (0, 0);
        for block in blocks.rev() {
            let centre = block.centre().map(|centre| centre.bytes);
            for bytes in centre.into_iter().chain(block.runs().map(|run| run.bytes)) {
                later[n_later] = (bytes.as_ptr(), bytes.len().div_ceil(LINE));
                n_lines += later[n_later].1;
                n_later += 1;
            }
        }
        Self { run: (ptr::null(), 0), later, n_later, lines_per_step: n_lines.div_ceil(n_steps.max(1)) }
    }

    /// Prefetches the lines of one step.
    #[inline(always)]
    pub(super) fn step(&mut self) {
        self.prefetch_lines(self.lines_per_step);
    }

    /// Prefetches the lines of several steps, for loops that do not prefetch themselves.
    pub(super) fn steps(&mut self, n: usize) {
        self.prefetch_lines(n * self.lines_per_step);
    }

    /// Prefetches all remaining lines.
    pub(super) fn finish(&mut self) {
        self.prefetch_lines(usize::MAX);
    }

    #[inline(always)]
    fn prefetch_lines(&mut self, mut lines: usize) {
        while lines > 0 {
            let (at, left) = self.run;
            let n = lines.min(left);
            (0..n).for_each(|i| prefetch_line(at.wrapping_add(i * LINE)));
            self.run = (at.wrapping_add(n * LINE), left - n);
            lines -= n;
            if n == left {
                let Some(n_later) = self.n_later.checked_sub(1) else { return };
                (self.run, self.n_later) = (self.later[n_later], n_later);
            }
        }
    }
}
