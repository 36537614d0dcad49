//! A stopwatch that also compiles for WebAssembly.

use std::time::{Duration, Instant};

/// WebAssembly has no clock of its own; the host measures time there.
const HAS_CLOCK: bool = !cfg!(all(target_family = "wasm", target_os = "unknown"));

/// A running stopwatch. Every time is zero on targets without a clock.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stopwatch(Option<Instant>);

impl Stopwatch {
    pub fn start() -> Self {
        Self(HAS_CLOCK.then(Instant::now))
    }

    pub fn elapsed(self) -> Duration {
        self.0.map_or(Duration::ZERO, |started| started.elapsed())
    }
}
