//! Copies of pages between the device and the host, on a stream of their own: steps that are queued
//! meanwhile do not wait for a copy to the host, and those behind a copy to the device wait for it
//! on the device.
//!
//! From pageable memory the driver would stage bytes itself, and hold up the stream of the steps.
//! Here they go through a ring of pinned pieces, so that the device copies one while the host
//! copies the next. Events order both streams: a copy begins when the work queued before it is
//! done, and work that is queued after a copy to the device begins when that is done.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::recorder::Recorder;
use crate::staging::Calls;
use crate::{CudaError, DevicePtr};

/// Pieces of the ring.
const PIECES: usize = 4;
/// Bytes of each: a page of 128 tokens of all layers has a few million.
const PIECE_BYTES: usize = 16 << 20;

/// The second stream of a device.
pub(crate) struct Transfers<C: Calls> {
    /// Held during a copy.
    ring: Mutex<Ring<C>>,
    calls: C,
}

struct Ring<C: Calls> {
    /// Those used so far.
    pieces: Vec<Piece<C>>,
    /// Bytes of each.
    piece_bytes: usize,
    /// The one that was used the longest ago.
    next: usize,
}

struct Piece<C: Calls> {
    memory: C::Pinned,
    /// Reached when the device has copied the last contents.
    copied: C::Event,
}

/// Bytes on their way to the host.
struct Pending<'a> {
    /// The piece that receives them.
    piece: usize,
    dst: &'a mut [u8],
}

impl<C: Calls> Transfers<C> {
    /// Creates transfers on the stream of `calls`.
    pub fn new(calls: C) -> Self {
        Self::with_pieces(calls, PIECE_BYTES)
    }

    /// As [`Self::new`], with pieces of this size.
    fn with_pieces(calls: C, piece_bytes: usize) -> Self {
        Self { ring: Mutex::new(Ring { pieces: Vec::new(), piece_bytes, next: 0 }), calls }
    }

    /// Copies memory to the host, as the work that is queued so far leaves it. Waits for that work
    /// and for the copy; the memory may be written afterwards.
    pub fn read(&self, queue: &Recorder<C>, src: DevicePtr, dst: &mut [u8]) -> Result<(), CudaError> {
        let mut ring = self.begin(queue)?;
        let mut pending = VecDeque::new();
        let piece_bytes = ring.piece_bytes;
        for (i, dst) in dst.chunks_mut(piece_bytes).enumerate() {
            if pending.len() == PIECES {
                pending.pop_front().map_or(Ok(()), |oldest| ring.take_out(&self.calls, oldest))?;
            }
            let piece = ring.idle(&self.calls)?;
            let Piece { memory, copied } = &ring.pieces[piece];
            // SAFETY: the piece is idle. It is read or used again once the host has waited for
            // `copied`, and lives as long as `self`, which waits for the stream.
            unsafe { self.calls.fetch(memory, 0..dst.len(), src + (i * piece_bytes) as u64) }?;
            self.calls.record(copied)?;
            pending.push_back(Pending { piece, dst });
        }
        pending.into_iter().try_for_each(|pending| ring.take_out(&self.calls, pending))
    }

    /// Copies bytes to the device, behind the work that is queued so far and before all that is
    /// queued later. Waits only for pieces that earlier copies still use.
    pub fn write(&self, queue: &Recorder<C>, dst: DevicePtr, src: &[u8]) -> Result<(), CudaError> {
        let mut ring = self.begin(queue)?;
        let written = self.write_pieces(&mut ring, dst, src);
        let ordered = written.and_then(|last| match last {
            Some(last) => queue.wait_for(&ring.pieces[last].copied),
            None => Ok(()),
        });
        if ordered.is_err() {
            // Later work would not wait for the copies that are queued.
            let _ = self.calls.synchronize();
        }
        ordered
    }

    /// Returns the piece of the last copy.
    fn write_pieces(
        &self,
        ring: &mut Ring<C>,
        dst: DevicePtr,
        src: &[u8],
    ) -> Result<Option<usize>, CudaError> {
        let mut last = None;
        let piece_bytes = ring.piece_bytes;
        for (i, src) in src.chunks(piece_bytes).enumerate() {
            let index = ring.idle(&self.calls)?;
            let Piece { memory, copied } = &mut ring.pieces[index];
            // SAFETY: the piece is idle.
            unsafe { self.calls.fill(memory, 0..src.len(), &mut |to| to.copy_from_slice(src)) };
            // SAFETY: the piece is used again once the host has waited for `copied`, and lives as
            // long as `self`, which waits for the stream.
            unsafe { self.calls.copy(dst + (i * piece_bytes) as u64, memory, 0..src.len()) }?;
            self.calls.record(copied)?;
            last = Some(index);
        }
        Ok(last)
    }

    /// Lets this stream wait for the work that is queued so far.
    fn begin(&self, queue: &Recorder<C>) -> Result<MutexGuard<'_, Ring<C>>, CudaError> {
        // First: while a thread records, it is refused here, and others wait here without the ring.
        let reached = queue.reached()?;
        let ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        self.calls.wait_for(&reached)?;
        Ok(ring)
    }
}

impl<C: Calls> Ring<C> {
    /// Returns a piece that the device does not use; waits for it if necessary.
    fn idle(&mut self, calls: &C) -> Result<usize, CudaError> {
        let index = self.next;
        match self.pieces.get(index) {
            Some(piece) => calls.wait(&piece.copied)?,
            None => self.pieces.push(Piece { memory: calls.pin(self.piece_bytes)?, copied: calls.event()? }),
        }
        self.next = (index + 1) % PIECES;
        Ok(index)
    }

    /// Waits for bytes, and copies them from their piece.
    fn take_out(&mut self, calls: &C, Pending { piece, dst }: Pending<'_>) -> Result<(), CudaError> {
        let Piece { memory, copied } = &mut self.pieces[piece];
        calls.wait(copied)?;
        let len = dst.len();
        // SAFETY: the device has copied the last contents.
        unsafe { calls.fill(memory, 0..len, &mut |from| dst.copy_from_slice(from)) };
        Ok(())
    }
}

impl<C: Calls> Drop for Transfers<C> {
    fn drop(&mut self) {
        let _ = self.calls.bind();
        // The device may still use the pieces.
        let _ = self.calls.synchronize();
    }
}

#[cfg(test)]
mod tests;
