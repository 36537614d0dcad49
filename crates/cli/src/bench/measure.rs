//! Runs one benchmark test: fills the cache to its depth, warms up, times the repetitions.

use std::time::Instant;

use kvant::{Measure, Session};

use crate::failure::Failure;

/// One test: prefill of `n_prompt` tokens or decode of `n_gen`, with `n_depth` tokens in the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Test {
    pub n_prompt: usize,
    pub n_gen: usize,
    pub n_depth: usize,
}

impl Test {
    /// Returns the number of cached tokens at the end, saturated at `usize::MAX`.
    pub fn tokens(&self) -> usize {
        self.n_prompt.saturating_add(self.n_gen).saturating_add(self.n_depth)
    }

    /// Returns llama-bench's name: `pp512`, `tg128 @ d4096`.
    pub fn name(&self) -> String {
        let work = match self.n_gen {
            0 => format!("pp{}", self.n_prompt),
            n => format!("tg{n}"),
        };
        if self.n_depth == 0 { work } else { format!("{work} @ d{}", self.n_depth) }
    }
}

/// Configures how tests run.
#[derive(Debug, Clone, Copy)]
pub struct Bench {
    pub repetitions: usize,
    /// Fills the depth by prefill instead of with random keys and values.
    pub real_fill: bool,
}

/// Result of a test.
#[derive(Debug, Clone)]
pub struct Sample {
    /// Tokens per second of each repetition.
    pub tps: Vec<f64>,
    /// KV cache types of the session.
    pub type_k: &'static str,
    pub type_v: &'static str,
    /// Bytes of the cache in the middle of the test.
    pub kv_bytes: usize,
}

impl Bench {
    /// Runs `test` in a session whose context is large enough for it.
    pub fn run(&self, session: &mut Session, test: Test) -> Result<Sample, Failure> {
        self.fill(session, test.n_depth)?;
        let n_vocab = session.model().n_vocab();
        let token = |i: usize| ((i * 7919 + 17) % n_vocab) as u32;
        let prompt: Vec<u32> = (0..test.n_prompt).map(token).collect();
        // Warm-up: CPU caches, clocks, and pages of the operating system.
        match test.n_gen {
            0 => session.feed(&prompt[..prompt.len().min(32)], &mut |_| true)?,
            _ => session.feed(&[token(0)], &mut |_| true)?,
        }
        let mut tps = Vec::new();
        for _ in 0..self.repetitions {
            session.rewind(test.n_depth)?;
            let started = Instant::now();
            match test.n_gen {
                0 => session.feed(&prompt, &mut |_| true)?,
                n => (0..n).try_for_each(|i| session.feed(&[token(i)], &mut |_| true))?,
            }
            tps.push((test.n_prompt + test.n_gen) as f64 / started.elapsed().as_secs_f64());
        }
        let kv = session.kv();
        Ok(Sample { tps, type_k: kv.type_k, type_v: kv.type_v, kv_bytes: kv.bytes })
    }

    fn fill(&self, session: &mut Session, depth: usize) -> Result<(), Failure> {
        if depth < session.tokens().len() {
            session.rewind(depth)?;
        }
        let missing = depth - session.tokens().len();
        match missing {
            0 => {}
            _ if self.real_fill => session.feed(&vec![1; missing], &mut |_| true)?,
            _ => session.fill_random(missing, depth as u64)?,
        }
        Ok(())
    }
}
