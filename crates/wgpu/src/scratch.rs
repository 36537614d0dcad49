//! Scratch memory of the ops.
//!
//! Recorded commands run in order, so a buffer can be reused as soon as the op that used it is
//! recorded, and a step with the same ops as the last one gets the same buffers.

use std::ops::Deref;
use std::sync::{Mutex, PoisonError};

use crate::{Gpu, WgpuError};

/// Unused buffers.
#[derive(Debug, Default)]
pub(crate) struct ScratchPool {
    free: Mutex<Vec<wgpu::Buffer>>,
}

impl ScratchPool {
    /// Drops all buffers.
    pub fn clear(&self) {
        self.free().clear();
    }

    fn free(&self) -> std::sync::MutexGuard<'_, Vec<wgpu::Buffer>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A scratch buffer, reused after it is dropped. Its contents are those of its last use.
#[derive(Debug)]
pub(crate) struct Scratch<'a> {
    gpu: &'a Gpu,
    buffer: wgpu::Buffer,
}

impl Gpu {
    /// Returns `bytes` or more of memory, for `what`, until it is dropped.
    ///
    /// # Errors
    /// [`WgpuError::OutOfMemory`] as [`Gpu::allocate`].
    pub fn scratch(&self, bytes: usize, what: &'static str) -> Result<Scratch<'_>, WgpuError> {
        // Similar sizes share a size class, or prompts of many lengths would leave many buffers
        // behind.
        let size = match bytes.checked_next_power_of_two() {
            Some(size) if size <= self.max_binding() => size.max(16),
            _ => bytes,
        };
        let mut free = self.scratch_pool.free();
        let buffer = match free.iter().rposition(|buffer| buffer.size() == size as u64) {
            Some(at) => free.remove(at),
            None => {
                drop(free);
                self.allocate(size, what)?
            }
        };
        Ok(Scratch { gpu: self, buffer })
    }
}

impl Deref for Scratch<'_> {
    type Target = wgpu::Buffer;

    fn deref(&self) -> &wgpu::Buffer {
        &self.buffer
    }
}

impl Drop for Scratch<'_> {
    fn drop(&mut self) {
        self.gpu.scratch_pool.free().push(self.buffer.clone());
    }
}
