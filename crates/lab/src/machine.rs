//! The judge's own clock, and a fixed loop that shows how fast the machine runs.

use std::hint::black_box;
use std::time::Instant;

/// A machine that runs both sides.
pub trait Machine {
    /// Returns seconds since any fixed time, on the judge's clock.
    fn now(&self) -> f64;
    /// Returns the seconds that a fixed loop takes.
    fn calibrate(&mut self) -> f64;
}

/// This machine.
#[derive(Debug)]
pub struct ThisMachine {
    start: Instant,
}

impl Default for ThisMachine {
    fn default() -> Self {
        Self { start: Instant::now() }
    }
}

/// Steps of the loop: about 0.2 ms.
const STEPS: u64 = 150_000;
/// Runs of the loop, of which the fastest counts: a neighbour that interrupts one of them is no
/// change of the clock rate.
const RUNS: usize = 4;

impl Machine for ThisMachine {
    fn now(&self) -> f64 {
        self.start.elapsed().as_secs_f64()
    }

    fn calibrate(&mut self) -> f64 {
        let run = |seed: u64| {
            let start = Instant::now();
            // Each step waits for the one before it and touches no memory: the time is a number of
            // clock cycles.
            let last = (0..STEPS).fold(black_box(seed), |x, i| (x ^ i).wrapping_mul(0x9e37_79b9_7f4a_7c15));
            black_box(last);
            start.elapsed().as_secs_f64()
        };
        (0..RUNS as u64).map(run).fold(f64::INFINITY, f64::min)
    }
}
