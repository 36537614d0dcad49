//! The memory of all pages: one buffer, as a WGSL kernel cannot follow addresses and binds few
//! buffers. A page is a range of it.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use crate::{Gpu, WgpuError};

/// Alignment of pages in bytes.
const ALIGN: usize = 64;
/// Initial size in bytes.
const FIRST: usize = 1 << 20;

/// Memory that pages share. It grows on demand, up to the maximum binding size.
#[derive(Debug)]
pub(crate) struct Arena {
    gpu: Arc<Gpu>,
    state: Mutex<ArenaState>,
}

#[derive(Debug)]
struct ArenaState {
    buffer: wgpu::Buffer,
    /// Free ranges, in order, no two of them adjacent.
    free: Vec<Range<usize>>,
}

impl Arena {
    pub fn new(gpu: Arc<Gpu>) -> Result<Self, WgpuError> {
        let buffer = gpu.allocate(FIRST, PURPOSE)?;
        Ok(Self { gpu, state: Mutex::new(ArenaState { buffer, free: std::iter::once(0..FIRST).collect() }) })
    }

    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Returns the current buffer, for commands that are recorded before another page is taken.
    pub fn buffer(&self) -> wgpu::Buffer {
        self.state().buffer.clone()
    }

    /// Returns the maximum size.
    pub fn max_bytes(&self) -> usize {
        self.gpu.max_binding() / ALIGN * ALIGN
    }

    /// Allocates zeroed memory; returns its offset.
    ///
    /// # Errors
    /// [`WgpuError::OutOfMemory`] if the device has none, or the arena would exceed the maximum
    /// binding size.
    pub fn alloc(&self, bytes: usize) -> Result<usize, WgpuError> {
        let size = bytes.max(1).next_multiple_of(ALIGN);
        let mut state = self.state();
        let at = match allocate_first(&mut state.free, size) {
            Some(at) => at,
            None => {
                self.grow(&mut state, size)?;
                allocate_first(&mut state.free, size).expect("room was made for it")
            }
        };
        self.gpu.clear(&state.buffer, at, size);
        Ok(at)
    }

    /// Frees a range from [`Arena::alloc`].
    pub fn release(&self, at: usize, bytes: usize) {
        release_range(&mut self.state().free, at..at + bytes.max(1).next_multiple_of(ALIGN));
    }

    fn grow(&self, state: &mut ArenaState, size: usize) -> Result<(), WgpuError> {
        let old = state.buffer.size() as usize;
        let max_bytes = self.max_bytes();
        let min_bytes = old.saturating_add(size);
        if min_bytes > max_bytes {
            return Err(WgpuError::OutOfMemory { bytes: min_bytes, what: PURPOSE });
        }
        let new = old.saturating_mul(2).clamp(min_bytes, max_bytes);
        let buffer = self.gpu.allocate(new, PURPOSE)?;
        self.gpu.copy(&state.buffer, 0, &buffer, 0, old);
        state.buffer = buffer;
        release_range(&mut state.free, old..new);
        Ok(())
    }

    fn state(&self) -> std::sync::MutexGuard<'_, ArenaState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Purpose of the memory, in errors.
const PURPOSE: &str = "the cache, which is one binding of a kernel on this device";

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
