//! The memory of all pages: a few buffers (*slabs*), as a WGSL kernel cannot follow pointers and
//! binds few buffers. A page is a range of one of them, and kernels address its words by the number
//! of the slab and the word.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use crate::{Gpu, WgpuError};

/// Maximum number of slabs: with them a kernel binds no more than the 8 buffers of every adapter.
pub(crate) const MAX_SLABS: usize = 4;
/// Bits of an address for the word within a slab; those above are the number of the slab.
pub(crate) const WORD_BITS: u32 = 30;

/// Alignment of pages in bytes.
const ALIGN: usize = 64;
/// Initial size of a slab in bytes.
const FIRST: usize = 1 << 20;

/// Memory that pages share. It grows on demand.
#[derive(Debug)]
pub(crate) struct Arena {
    gpu: Arc<Gpu>,
    /// Maximum size of a slab in bytes.
    max_slab_bytes: usize,
    slabs: Mutex<Vec<Slab>>,
}

#[derive(Debug)]
struct Slab {
    buffer: wgpu::Buffer,
    /// Free ranges, in order, no two of them adjacent.
    free: Vec<Range<usize>>,
}

/// Where a page begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    /// The number of its slab.
    pub slab: usize,
    /// Its first byte in the slab.
    pub at: usize,
}

impl Place {
    /// Returns the address, in kernels, of the word that begins at byte `offset` of the page.
    ///
    /// # Panics
    /// Unless `offset` is a multiple of 4, as it is for the parts of tiles.
    pub fn address(self, offset: usize) -> u32 {
        let at = self.at + offset;
        assert!(at.is_multiple_of(4), "byte {at} does not begin a word");
        ((self.slab << WORD_BITS) + at / 4) as u32
    }
}

impl Arena {
    /// Creates an arena with slabs of at most `max_slab_bytes`, or of what a kernel can bind.
    pub fn new(gpu: Arc<Gpu>, max_slab_bytes: usize) -> Result<Self, WgpuError> {
        // The largest address within a slab.
        let addressable = usize::try_from(4_u64 << WORD_BITS).unwrap_or(usize::MAX);
        let max_slab_bytes = max_slab_bytes.min(addressable).min(gpu.max_binding()) / ALIGN * ALIGN;
        let first = Slab::new(&gpu, FIRST.min(max_slab_bytes))?;
        Ok(Self { gpu, max_slab_bytes, slabs: Mutex::new(vec![first]) })
    }

    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Returns the current slabs, for commands that are recorded before another page is taken.
    pub fn buffers(&self) -> Vec<wgpu::Buffer> {
        self.slabs().iter().map(|slab| slab.buffer.clone()).collect()
    }

    /// Returns the current buffer of slab `slab`, likewise.
    pub fn buffer(&self, slab: usize) -> wgpu::Buffer {
        self.slabs()[slab].buffer.clone()
    }

    /// Returns the maximum size of all pages together.
    pub fn max_bytes(&self) -> usize {
        self.max_slab_bytes.saturating_mul(MAX_SLABS)
    }

    /// Allocates zeroed memory.
    ///
    /// # Errors
    /// [`WgpuError::OutOfMemory`] if the device has none, or the slabs have reached their maximum.
    pub fn alloc(&self, bytes: usize) -> Result<Place, WgpuError> {
        let size = padded(bytes);
        let mut slabs = self.slabs();
        let place = match allocate(&mut slabs, size) {
            Some(place) => place,
            None => {
                self.grow(&mut slabs, size)?;
                allocate(&mut slabs, size).expect("room was made for it")
            }
        };
        self.gpu.clear(&slabs[place.slab].buffer, place.at, size);
        Ok(place)
    }

    /// Frees a range from [`Arena::alloc`].
    pub fn release(&self, Place { slab, at }: Place, bytes: usize) {
        release_range(&mut self.slabs()[slab].free, at..at + padded(bytes));
    }

    /// Makes room for `size` bytes: in the last slab, or else in a new one.
    fn grow(&self, slabs: &mut Vec<Slab>, size: usize) -> Result<(), WgpuError> {
        let has_new = slabs.len() < MAX_SLABS;
        if let Some(last) = slabs.last_mut() {
            let old = last.buffer.size() as usize;
            let min_bytes = old.saturating_add(size);
            let grown = match min_bytes <= self.max_slab_bytes {
                true => last.grow(&self.gpu, old.saturating_mul(2).clamp(min_bytes, self.max_slab_bytes)),
                false => Err(WgpuError::OutOfMemory { bytes: min_bytes, what: PURPOSE }),
            };
            if grown.is_ok() || !has_new {
                return grown;
            }
        }
        // The device may have room beside a slab that it has not for a larger copy of it.
        if size > self.max_slab_bytes {
            return Err(WgpuError::OutOfMemory { bytes: size, what: PURPOSE });
        }
        slabs.push(Slab::new(&self.gpu, FIRST.clamp(size, self.max_slab_bytes))?);
        Ok(())
    }

    fn slabs(&self) -> std::sync::MutexGuard<'_, Vec<Slab>> {
        self.slabs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Slab {
    fn new(gpu: &Gpu, bytes: usize) -> Result<Self, WgpuError> {
        Ok(Self { buffer: gpu.allocate(bytes, PURPOSE)?, free: std::iter::once(0..bytes).collect() })
    }

    /// Moves to a buffer of `bytes`.
    fn grow(&mut self, gpu: &Gpu, bytes: usize) -> Result<(), WgpuError> {
        let old = self.buffer.size() as usize;
        let buffer = gpu.allocate(bytes, PURPOSE)?;
        gpu.copy(&self.buffer, 0, &buffer, 0, old);
        self.buffer = buffer;
        release_range(&mut self.free, old..bytes);
        Ok(())
    }
}

/// Purpose of the memory, in errors.
const PURPOSE: &str = "the cache, which is at most four bindings of a kernel on this device";

fn padded(bytes: usize) -> usize {
    bytes.max(1).next_multiple_of(ALIGN)
}

/// Takes `size` bytes of the first slab that has them.
fn allocate(slabs: &mut [Slab], size: usize) -> Option<Place> {
    let mut slabs = slabs.iter_mut().enumerate();
    slabs.find_map(|(slab, of)| Some(Place { slab, at: allocate_first(&mut of.free, size)? }))
}

/// Takes `size` bytes of the first range that is large enough.
fn allocate_first(free: &mut Vec<Range<usize>>, size: usize) -> Option<usize> {
    let index = free.iter().position(|range| range.len() >= size)?;
    let at = free[index].start;
    free[index].start += size;
    if free[index].is_empty() {
        free.remove(index);
    }
    Some(at)
}

/// Returns `range` to the list, and joins it to its neighbours.
fn release_range(free: &mut Vec<Range<usize>>, range: Range<usize>) {
    let index = free.partition_point(|other| other.start < range.start);
    free.insert(index, range);
    for left in [index, index.wrapping_sub(1)] {
        if left != usize::MAX && left + 1 < free.len() && free[left].end == free[left + 1].start {
            free[left].end = free.remove(left + 1).end;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn freed_ranges_are_merged() {
        let mut free: Vec<_> = std::iter::once(0..1024).collect();
        let taken: Vec<_> =
            [64, 128, 64, 256].map(|size| (allocate_first(&mut free, size).unwrap(), size)).into();
        assert_eq!(taken, [(0, 64), (64, 128), (192, 64), (256, 256)]);
        assert_eq!(allocate_first(&mut free, 1024), None);
        for (at, size) in [taken[1], taken[3], taken[0], taken[2]] {
            release_range(&mut free, at..at + size);
        }
        assert!(free.len() == 1 && free[0] == (0..1024), "{free:?}");
    }

    #[test]
    fn the_first_range_that_is_large_enough_is_taken() {
        let mut free = vec![0..64, 128..320, 512..640];
        assert_eq!(allocate_first(&mut free, 128), Some(128));
        assert_eq!(free, [0..64, 256..320, 512..640]);
        assert_eq!(allocate_first(&mut free, 64), Some(0));
        assert_eq!(free, [256..320, 512..640]);
    }
}
