//! Measures the read bandwidth of memory: the roofline of decode.

use std::hint::black_box;
use std::time::Instant;

use kvant_backend::BackendError;

use crate::device::CpuDevice;
use crate::ops::matmul::panel::{Line, Lines};

/// Far more than any cache holds.
const BYTES: usize = 1 << 30;
const PASSES: usize = 7;
/// Independent sums, so that additions never wait for each other: eight vectors of 512 bits.
const LANES: usize = 64;

impl CpuDevice {
    /// Returns the bytes per second that all threads of this device together read from memory, the
    /// best of several passes. The memory is of the kind that holds weights.
    ///
    /// # Errors
    /// [`BackendError::OutOfMemory`].
    pub fn read_bandwidth(&self) -> Result<f64, BackendError> {
        let mut lines = Lines::zeroed(BYTES / size_of::<Line>())?;
        // Unwritten pages are all the same one.
        lines.as_mut_slice().fill(Line([1; 64]));
        let words: &[u64] = bytemuck::cast_slice(lines.as_slice());
        let share = words.len() / self.pool().n_threads();
        let best = (0..PASSES)
            .map(|_| {
                let started = Instant::now();
                self.pool().region().run(&|thread| {
                    black_box(sum(&words[thread * share..][..share]));
                });
                started.elapsed().as_secs_f64()
            })
            .fold(f64::INFINITY, f64::min);
        Ok((share * self.pool().n_threads() * size_of::<u64>()) as f64 / best)
    }
}

fn sum(words: &[u64]) -> u64 {
    let mut sums = [0_u64; LANES];
    for chunk in words.chunks_exact(LANES) {
        for (sum, word) in sums.iter_mut().zip(chunk) {
            *sum = sum.wrapping_add(*word);
        }
    }
    sums.iter().fold(0, |a, b| a.wrapping_add(*b))
}
