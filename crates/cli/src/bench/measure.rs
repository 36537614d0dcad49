//! Running one test: fill to its depth, warm up, time the repetitions.

use std::time::Instant;

use kvant::Session;

use crate::failure::Failure;

/// What is timed: reading `n_prompt` tokens, or generating `n_gen`, with `n_depth` tokens in the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Test {
    pub n_prompt: usize,
    pub n_gen: usize,
    pub n_depth: usize,
}

impl Test {
    /// Tokens in the cache when it is done; `usize::MAX` when they are more.
    pub fn tokens(&self) -> usize {
        self.n_prompt.saturating_add(self.n_gen).saturating_add(self.n_depth)
    }

    /// llama-bench's name: `pp512`, `tg128 @ d4096`.
    pub fn name(&self) -> String {
        let work = match self.n_gen {
            0 => format!("pp{}", self.n_prompt),
            n => format!("tg{n}"),
        };
        if self.n_depth == 0 { work } else { format!("{work} @ d{}", self.n_depth) }
    }
}

/// How tests are run.
#[derive(Debug, Clone, Copy)]
pub struct Bench {
    pub repetitions: usize,
    /// Fill the depth by reading tokens, not with random keys and values.
    pub real_fill: bool,
}

/// The result of a test.
#[derive(Debug, Clone)]
pub struct Sample {
    /// Tokens per second of each repetition.
    pub tps: Vec<f64>,
    /// Types of the cache, as it was.
    pub type_k: &'static str,
    pub type_v: &'static str,
    /// Bytes of the cache in the middle of the test.
    pub kv_bytes: usize,
}

impl Bench {
    /// Runs `test` in a session whose context holds it.
    pub fn run(&self, session: &mut Session, test: Test) -> Result<Sample, Failure> {
        self.fill(session, test.n_depth)?;
        let n_vocab = session.model().n_vocab();
        let token = |i: usize| ((i * 7919 + 17) % n_vocab) as u32;
        let prompt: Vec<u32> = (0..test.n_prompt).map(token).collect();
        // Warm up: caches, clocks, and pages of the operating system.
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
