//! How long work takes.

use std::time::{Duration, Instant};

/// WebAssembly by itself has no clock: whoever runs it has to look at theirs.
const HAS_CLOCK: bool = !cfg!(all(target_family = "wasm", target_os = "unknown"));

/// A clock that was started. Where there is none, every time is zero.
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
