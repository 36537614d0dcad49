//! Runs one benchmark test: fills the cache to its depth, warms up, times the repetitions.

use std::time::Instant;

use kvant::{BatchItem, Measure, Session};

use crate::failure::Failure;

/// One test: prefill of `n_prompt` tokens or decode of `n_gen`, with `n_depth` tokens in the cache,
/// of `n_parallel` sequences in shared steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Test {
    pub n_prompt: usize,
    pub n_gen: usize,
    pub n_depth: usize,
    pub n_parallel: usize,
}

impl Test {
    /// Returns the number of cached tokens of a sequence at the end, saturated at `usize::MAX`.
    pub fn tokens(&self) -> usize {
        self.n_prompt.saturating_add(self.n_gen).saturating_add(self.n_depth)
    }

    /// Returns llama-bench's name: `pp512`, `tg128 @ d4096`; of several sequences
    /// `tg128 @ d4096 x 8`.
    pub fn name(&self) -> String {
        let work = match self.n_gen {
            0 => format!("pp{}", self.n_prompt),
            n => format!("tg{n}"),
        };
        let work = if self.n_depth == 0 { work } else { format!("{work} @ d{}", self.n_depth) };
        if self.n_parallel == 1 { work } else { format!("{work} x {}", self.n_parallel) }
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
pub enum Outcome {
    Measured(Sample),
    /// Too little memory for all sequences.
    TooLarge {
        n_fit: usize,
    },
}

/// Measurements of a test.
#[derive(Debug, Clone)]
pub struct Sample {
    /// Tokens per second of each repetition, over all sequences.
    pub tps: Vec<f64>,
    /// Bytes of the caches at the end.
    pub kv_bytes: usize,
}

impl Bench {
    /// Runs `test` in as many sessions, whose contexts are large enough for it.
    pub fn run(&self, sessions: &mut [Session], test: Test) -> Result<Sample, Failure> {
        for (index, session) in sessions.iter_mut().enumerate() {
            self.fill(session, test.n_depth, index)?;
        }
        if sessions.len() > 1 {
            // Rewinding to it recomputes nothing.
            sessions.iter_mut().for_each(Session::set_checkpoint);
        }
        let prompt: Vec<u32> = (0..test.n_prompt).map(|i| token(&sessions[0], i)).collect();
        // Warm-up: CPU caches, clocks, and pages of the operating system.
        match test.n_gen {
            0 => sessions[0].feed(&prompt[..prompt.len().min(32)], &mut |_| true)?,
            _ => decode(sessions, 0)?,
        }
        let n_tokens = (test.n_prompt + test.n_gen) * sessions.len();
        let mut tps = Vec::new();
        for _ in 0..self.repetitions {
            sessions.iter_mut().try_for_each(|session| session.rewind(test.n_depth))?;
            let started = Instant::now();
            match test.n_gen {
                0 => sessions[0].feed(&prompt, &mut |_| true)?,
                n => (0..n).try_for_each(|i| decode(sessions, i))?,
            }
            tps.push(n_tokens as f64 / started.elapsed().as_secs_f64());
        }
        Ok(Sample { tps, kv_bytes: sessions.iter().map(|session| session.kv().bytes).sum() })
    }

    /// Fills the cache of session `index` to `depth`.
    fn fill(&self, session: &mut Session, depth: usize, index: usize) -> Result<(), Failure> {
        if depth < session.tokens().len() {
            session.rewind(depth)?;
        }
        let missing = depth - session.tokens().len();
        let seed = depth as u64 + ((index as u64) << 32);
        match missing {
            0 => {}
            _ if self.real_fill => session.feed(&vec![1; missing], &mut |_| true)?,
            _ => session.fill_random(missing, seed)?,
        }
        Ok(())
    }
}

/// Returns token `i` of a text.
fn token(session: &Session, i: usize) -> u32 {
    ((i * 7919 + 17) % session.model().n_vocab()) as u32
}

/// Decodes token `i` of all sessions in one step.
fn decode(sessions: &mut [Session], i: usize) -> Result<(), kvant::Error> {
    if let [session] = sessions {
        return session.feed(&[token(session, i)], &mut |_| true);
    }
    let tokens: Vec<_> = (0..).zip(&*sessions).map(|(index, session)| [token(session, i + index)]).collect();
    let items = sessions.iter_mut().zip(&tokens).map(|(session, token)| BatchItem::new(session, token));
    Session::step_batch(&mut items.collect::<Vec<_>>())
}
