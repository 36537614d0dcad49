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
    room: Mutex<FreeSpan>,
}

#[derive(Debug)]
struct FreeSpan {
    buffer: wgpu::Buffer,
    /// Free ranges, in order, no two of them adjacent.
    free: Vec<Range<usize>>,
}

impl Arena {
    pub fn new(gpu: Arc<Gpu>) -> Result<Self, WgpuError> {
        let buffer = gpu.allocate(FIRST, WHAT)?;
        Ok(Self { gpu, room: Mutex::new(FreeSpan { buffer, free: std::iter::once(0..FIRST).collect() }) })
    }

    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Returns the current buffer, for commands that are recorded before another page is taken.
    pub fn buffer(&self) -> wgpu::Buffer {
        self.room().buffer.clone()
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
        let mut room = self.room();
        let at = match take_first(&mut room.free, size) {
            Some(at) => at,
            None => {
                self.grow(&mut room, size)?;
                take_first(&mut room.free, size).expect("room was made for it")
            }
        };
        self.gpu.clear(&room.buffer, at, size);
        Ok(at)
    }

    /// Frees a range from [`Arena::take`].
    pub fn release(&self, at: usize, bytes: usize) {
        give_back(&mut self.room().free, at..at + bytes.max(1).next_multiple_of(ALIGN));
    }

    fn grow(&self, room: &mut FreeSpan, size: usize) -> Result<(), WgpuError> {
        let old = room.buffer.size() as usize;
        let most = self.max_bytes();
        let least = old.saturating_add(size);
        if least > most {
            return Err(WgpuError::OutOfMemory { bytes: least, what: WHAT });
        }
        let new = old.saturating_mul(2).clamp(least, most);
        let buffer = self.gpu.allocate(new, WHAT)?;
        self.gpu.copy((&room.buffer, 0), (&buffer, 0), old);
        room.buffer = buffer;
        give_back(&mut room.free, old..new);
        Ok(())
    }

    fn room(&self) -> std::sync::MutexGuard<'_, FreeSpan> {
        self.room.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Purpose of the memory, in errors.
const WHAT: &str = "the cache, which is one binding of a kernel on this device";

/// Takes `size` bytes of the first range that is large enough.
fn take_first(free: &mut Vec<Range<usize>>, size: usize) -> Option<usize> {
    let index = free.iter().position(|range| range.len() >= size)?;
    let at = free[index].start;
    free[index].start += size;
    if free[index].is_empty() {
        free.remove(index);
    }
    Some(at)
}

/// Returns `range` to the list, and joins it to its neighbours.
fn give_back(free: &mut Vec<Range<usize>>, range: Range<usize>) {
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
            [64, 128, 64, 256].map(|size| (take_first(&mut free, size).unwrap(), size)).into();
        assert_eq!(taken, [(0, 64), (64, 128), (192, 64), (256, 256)]);
        assert_eq!(take_first(&mut free, 1024), None);
        for (at, size) in [taken[1], taken[3], taken[0], taken[2]] {
            give_back(&mut free, at..at + size);
        }
        assert!(free.len() == 1 && free[0] == (0..1024), "{free:?}");
    }

    #[test]
    fn the_first_range_that_is_large_enough_is_taken() {
        let mut free = vec![0..64, 128..320, 512..640];
        assert_eq!(take_first(&mut free, 128), Some(128));
        assert_eq!(free, [0..64, 256..320, 512..640]);
        assert_eq!(take_first(&mut free, 64), Some(0));
        assert_eq!(free, [256..320, 512..640]);
    }
}
