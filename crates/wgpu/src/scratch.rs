//! Memory that ops take for a moment. What is recorded runs in its order, so a buffer may be another op's as soon as the op that
//! had it is recorded, and a step that does what the last one did finds the very buffers that it had.

use std::ops::Deref;
use std::sync::{Mutex, PoisonError};

use crate::{Gpu, WgpuError};

/// Buffers that nobody has at the moment.
#[derive(Debug, Default)]
pub(crate) struct Shelf {
    free: Mutex<Vec<wgpu::Buffer>>,
}

impl Shelf {
    /// Lets go of all.
    pub fn clear(&self) {
        self.free().clear();
    }

    fn free(&self) -> std::sync::MutexGuard<'_, Vec<wgpu::Buffer>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A buffer from the shelf, which goes back there when it is dropped. It holds what the last op left.
#[derive(Debug)]
pub(crate) struct Scratch<'a> {
    gpu: &'a Gpu,
    buffer: wgpu::Buffer,
}

impl Gpu {
    /// Memory for `bytes` bytes or more, for `what`, until it is dropped.
    ///
    /// # Errors
    /// [`WgpuError::OutOfMemory`] as [`Gpu::allocate`].
    pub fn scratch(&self, bytes: usize, what: &'static str) -> Result<Scratch<'_>, WgpuError> {
        // Sizes that differ little are one, or prompts of many lengths would leave many buffers behind.
        let size = match bytes.checked_next_power_of_two() {
            Some(size) if size <= self.max_binding() => size.max(16),
            _ => bytes,
        };
        let mut free = self.shelf.free();
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
        self.gpu.shelf.free().push(self.buffer.clone());
    }
}
