//! Activations and pages of the cache.

use std::sync::Arc;

use kvant_backend::{Buffer, Page, Result};

use crate::arena::{Arena, Place};

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
    place: Place,
    n_bytes: usize,
}

impl WgpuPage {
    /// Creates a zeroed page.
    pub(crate) fn new(arena: &Arc<Arena>, n_bytes: usize) -> Result<Self> {
        let place = arena.alloc(n_bytes)?;
        Ok(Self { arena: Arc::clone(arena), place, n_bytes })
    }

    /// Returns the address, in kernels, of the word that begins at byte `offset`.
    pub(crate) fn address(&self, offset: usize) -> u32 {
        self.place.address(offset)
    }

    /// Returns its first byte in its slab.
    pub(crate) fn at(&self) -> usize {
        self.place.at
    }

    /// Returns its slab, for commands that are recorded before another page is taken.
    pub(crate) fn slab(&self) -> wgpu::Buffer {
        self.arena.buffer(self.place.slab)
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
        // A device does not copy within one buffer: copies through another.
        let gpu = self.arena.gpu();
        let staging = gpu.scratch(self.padded(), "a copy of a page")?;
        gpu.copy(&self.slab(), self.at(), &staging, 0, self.padded());
        gpu.copy(&staging, 0, &new.slab(), new.at(), self.padded());
        Ok(new)
    }
}

impl Drop for WgpuPage {
    fn drop(&mut self) {
        self.arena.release(self.place, self.n_bytes);
    }
}
