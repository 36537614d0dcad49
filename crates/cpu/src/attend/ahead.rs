//! Bytes that are asked for before they are read.

use std::ptr;

use super::kernels::BLOCK_TILES;
use super::view::Block;
use crate::lanes::prefetch_line;

/// Bytes of a line of the cache.
const LINE: usize = 64;

/// Where lines begin, and how many there are.
type Lines = (*const u8, usize);

/// Runs of a block of keys and one of values, and their centres.
const MOST_LINES: usize = 2 * (BLOCK_TILES + 1);

/// What a thread reads next, asked for while it works on something else, a few lines with each step of the work. A core waits for few
/// lines at a time: many asked for at once hold up the work behind them, and leave the memory idle later.
#[derive(Debug)]
pub(super) struct Ahead {
    /// What is left of the run that is being asked for.
    run: Lines,
    /// What is asked for after it, last first.
    later: [Lines; MOST_LINES],
    n_later: usize,
    lines_per_step: usize,
}

impl Ahead {
    /// All bytes of some blocks, within so many steps.
    pub(super) fn of<'a>(blocks: impl DoubleEndedIterator<Item = &'a Block<'a>>, n_steps: usize) -> Self {
        let mut later = [(ptr::null(), 0); MOST_LINES];
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

    /// Asks for what a step may.
    #[inline(always)]
    pub(super) fn step(&mut self) {
        self.ask(self.lines_per_step);
    }

    /// Asks for what several steps may, where loops do not ask themselves.
    pub(super) fn steps(&mut self, n: usize) {
        self.ask(n * self.lines_per_step);
    }

    /// Asks for all that is left.
    pub(super) fn finish(&mut self) {
        self.ask(usize::MAX);
    }

    #[inline(always)]
    fn ask(&mut self, mut lines: usize) {
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
