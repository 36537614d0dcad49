//! Activations and pages of the cache.

use std::sync::Arc;

use kvant_backend::{Buffer, Page, Result};

use crate::arena::Arena;

/// f32 activations on the device.
#[derive(Debug)]
pub struct WgpuBuffer {
    pub(crate) buffer: wgpu::Buffer,
    pub(crate) n_values: usize,
}

impl Buffer for WgpuBuffer {
    fn n_values(&self) -> usize {
        self.n_values
    }
}

/// A range of the memory of all pages.
#[derive(Debug)]
pub struct WgpuPage {
    arena: Arc<Arena>,
    at: usize,
    n_bytes: usize,
}

impl WgpuPage {
    /// Creates a zeroed page.
    pub(crate) fn new(arena: &Arc<Arena>, n_bytes: usize) -> Result<Self> {
        let at = arena.alloc(n_bytes)?;
        Ok(Self { arena: Arc::clone(arena), at, n_bytes })
    }

    /// Returns its offset in bytes.
    pub(crate) fn at(&self) -> usize {
        self.at
    }

    /// Returns its size in bytes, in whole words.
    pub(crate) fn padded(&self) -> usize {
        self.n_bytes.next_multiple_of(4)
    }
}

impl Page for WgpuPage {
    type Table = ();

    fn n_bytes(&self) -> usize {
        self.n_bytes
    }

    fn duplicate(&self) -> Result<Self> {
        let new = Self::new(&self.arena, self.n_bytes)?;
        let buffer = self.arena.buffer();
        // A device does not copy within one buffer: copies through another.
        let gpu = self.arena.gpu();
        let staging = gpu.scratch(self.padded(), "a copy of a page")?;
        gpu.copy(&buffer, self.at, &staging, 0, self.padded());
        gpu.copy(&staging, 0, &buffer, new.at, self.padded());
        Ok(new)
    }
}

impl Drop for WgpuPage {
    fn drop(&mut self) {
        self.arena.release(self.at, self.n_bytes);
    }
}
