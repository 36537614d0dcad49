//! Pinned host memory that the device copies from by itself.

use std::ffi::c_void;
use std::ptr;

use cudarc::driver::sys;

use crate::driver::check;
use crate::event::Event;
use crate::{CudaError, DevicePtr};

/// Size of one piece of memory for recorded copies.
const STAGING_BYTES: usize = 256 * 1024;
/// Size of one piece of an upload.
const UPLOAD_BYTES: usize = 16 << 20;

/// Memory that recorded copies read from.
#[derive(Default)]
pub(crate) struct Staging {
    /// Pinned memory and its size.
    pieces: Vec<(*mut c_void, usize)>,
    /// Pieces that are full, and bytes used of the next.
    full: usize,
    filled: usize,
}

impl Staging {
    pub fn used(&self) -> bool {
        self.full + self.filled > 0
    }

    pub fn clear(&mut self) {
        (self.full, self.filled) = (0, 0);
    }

    /// Copies `src` to where it stays until `clear`.
    pub fn put(&mut self, src: &[u8]) -> Result<*const c_void, CudaError> {
        while self.pieces.get(self.full).is_some_and(|&(_, size)| size - self.filled < src.len()) {
            (self.full, self.filled) = (self.full + 1, 0);
        }
        if self.full == self.pieces.len() {
            let (mut piece, size) = (ptr::null_mut(), src.len().max(STAGING_BYTES));
            // SAFETY: `piece` is live; the context is current (every caller holds the queue).
            check("cuMemAllocHost", unsafe { sys::cuMemAllocHost_v2(&mut piece, size) })?;
            self.pieces.push((piece, size));
        }
        // SAFETY: `filled + src.len()` is at most the piece's size, and nothing else reads or writes that part of it.
        let place = unsafe {
            let place = self.pieces[self.full].0.cast::<u8>().add(self.filled);
            place.copy_from_nonoverlapping(src.as_ptr(), src.len());
            place
        };
        self.filled += src.len().next_multiple_of(16).min(self.pieces[self.full].1 - self.filled);
        Ok(place.cast())
    }

    pub fn destroy(&mut self) {
        for (piece, _) in self.pieces.drain(..) {
            // SAFETY: allocated by `cuMemAllocHost`, freed once, with the stream idle.
            let _ = unsafe { sys::cuMemFreeHost(piece) };
        }
    }
}

/// Two pieces of memory that take turns: while the device copies one, the host fills the other.
#[derive(Default)]
pub(crate) struct Uploads {
    pieces: [Option<Piece>; 2],
}

struct Piece {
    memory: *mut c_void,
    bytes: usize,
    /// Reached when the device has copied what was last put here.
    copied: Event,
}

impl Uploads {
    /// See [`Gpu::upload`](crate::Gpu::upload). The context is current.
    pub fn copy(
        &mut self,
        stream: sys::CUstream,
        dst: DevicePtr,
        n_bytes: usize,
        unit: usize,
        fill: &mut dyn FnMut(usize, &mut [u8]),
    ) -> Result<(), CudaError> {
        let step = piece_bytes(unit);
        for (turn, offset) in (0..n_bytes).step_by(step).enumerate() {
            let len = step.min(n_bytes - offset);
            let piece = Piece::of(&mut self.pieces[turn % 2], len)?;
            piece.copied.wait()?;
            // SAFETY: `len` bytes of ours, which the device has done with and nobody else refers to.
            let bytes = unsafe { std::slice::from_raw_parts_mut(piece.memory.cast::<u8>(), len) };
            fill(offset, bytes);
            // SAFETY: `dst` has `n_bytes` (the caller's allocation); the piece stays as it is until `copied` is reached.
            check("cuMemcpyHtoDAsync", unsafe {
                sys::cuMemcpyHtoDAsync_v2(dst + offset as u64, piece.memory, len, stream)
            })?;
            piece.copied.record(stream)?;
        }
        Ok(())
    }

    /// Gives the memory back. The stream is idle.
    pub fn destroy(&mut self) {
        self.pieces.iter_mut().for_each(|piece| drop(piece.take()));
    }
}

/// Bytes of a piece: as many whole units as fit, at least one.
pub(crate) fn piece_bytes(unit: usize) -> usize {
    (UPLOAD_BYTES / unit.max(1)).max(1) * unit.max(1)
}

impl Piece {
    /// The piece in `slot`, made or made larger where it does not hold `bytes`.
    fn of(slot: &mut Option<Self>, bytes: usize) -> Result<&mut Self, CudaError> {
        if slot.as_ref().is_none_or(|piece| piece.bytes < bytes) {
            if let Some(old) = slot.take() {
                old.copied.wait()?;
            }
            let (mut memory, bytes) = (ptr::null_mut(), bytes.max(UPLOAD_BYTES));
            let copied = Event::new()?;
            // SAFETY: `memory` is live; the context is current.
            check("cuMemAllocHost", unsafe { sys::cuMemAllocHost_v2(&mut memory, bytes) })?;
            *slot = Some(Self { memory, bytes, copied });
        }
        Ok(slot.as_mut().expect("made above"))
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        // SAFETY: allocated by `cuMemAllocHost`, freed once; whoever drops a piece has waited for the device.
        let _ = unsafe { sys::cuMemFreeHost(self.memory) };
    }
}
