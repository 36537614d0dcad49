//! Pinned host memory that the device copies from by itself.

use crate::calls::Calls;
use crate::{CudaError, DevicePtr};

/// Size of one piece of memory for recorded copies.
const STAGING_BYTES: usize = 256 * 1024;
/// Size of one piece of an upload.
const UPLOAD_BYTES: usize = 16 << 20;
/// What is staged starts at multiples of this: the device's longest load.
const ALIGN: usize = 16;

/// Memory that recorded copies read from.
pub(crate) struct Staging<C: Calls> {
    pieces: Vec<Piece<C>>,
    /// Pieces that are full, and bytes used of the next.
    full: usize,
    filled: usize,
}

struct Piece<C: Calls> {
    memory: C::Pinned,
    bytes: usize,
}

impl<C: Calls> Default for Staging<C> {
    fn default() -> Self {
        Self { pieces: Vec::new(), full: 0, filled: 0 }
    }
}

impl<C: Calls> Staging<C> {
    /// Whether there is anything to [`Staging::clear`].
    pub fn is_used(&self) -> bool {
        self.full + self.filled > 0
    }

    /// Takes everything back; the stream has come past every copy from here.
    pub fn clear(&mut self) {
        (self.full, self.filled) = (0, 0);
    }

    /// Queues a copy of what `src` holds now to the device, from where it stays until `clear`.
    pub fn copy(&mut self, calls: &C, dst: DevicePtr, src: &[u8]) -> Result<(), CudaError> {
        while self.pieces.get(self.full).is_some_and(|piece| piece.bytes - self.filled < src.len()) {
            (self.full, self.filled) = (self.full + 1, 0);
        }
        if self.full == self.pieces.len() {
            let bytes = src.len().max(STAGING_BYTES);
            self.pieces.push(Piece { memory: calls.pin(bytes)?, bytes });
        }
        let piece = &mut self.pieces[self.full];
        let part = self.filled..self.filled + src.len();
        self.filled = part.end.next_multiple_of(ALIGN).min(piece.bytes);
        // SAFETY: nothing has been copied from beyond `filled` since the last `clear`.
        unsafe { calls.fill(&mut piece.memory, part.clone(), &mut |to| to.copy_from_slice(src)) };
        // SAFETY: until `clear` that part is written no more, and pieces stay for as long as this does, which outlives the
        // stream's work (the recorder waits for it before it drops this).
        unsafe { calls.copy(dst, &piece.memory, part) }
    }
}

/// Two pieces of memory that take turns: while the device copies one, the host fills the other.
pub(crate) struct Uploads<C: Calls> {
    turns: [Option<Turn<C>>; 2],
}

struct Turn<C: Calls> {
    piece: Piece<C>,
    /// Reached when the device has copied what was last put here.
    copied: C::Event,
}

impl<C: Calls> Default for Uploads<C> {
    fn default() -> Self {
        Self { turns: [None, None] }
    }
}

impl<C: Calls> Uploads<C> {
    /// See [`Gpu::upload`](crate::Gpu::upload).
    pub fn copy(
        &mut self,
        calls: &C,
        dst: DevicePtr,
        n_bytes: usize,
        unit: usize,
        fill: &mut dyn FnMut(usize, &mut [u8]),
    ) -> Result<(), CudaError> {
        let step = piece_bytes(unit);
        for (i, offset) in (0..n_bytes).step_by(step).enumerate() {
            let len = step.min(n_bytes - offset);
            let Turn { piece, copied } = Turn::of(&mut self.turns[i % 2], calls, len)?;
            calls.wait(copied)?;
            // SAFETY: the device has copied what was last put here.
            unsafe { calls.fill(&mut piece.memory, 0..len, &mut |bytes| fill(offset, bytes)) };
            // SAFETY: before the piece is filled again or dropped, `copied` is waited for, or all of the stream.
            unsafe { calls.copy(dst + offset as u64, &piece.memory, 0..len) }?;
            calls.record(copied)?;
        }
        Ok(())
    }
}

/// Bytes of a piece: as many whole units as fit, at least one.
fn piece_bytes(unit: usize) -> usize {
    (UPLOAD_BYTES / unit.max(1)).max(1) * unit.max(1)
}

impl<C: Calls> Turn<C> {
    /// The piece in `slot`, made or made larger where it does not hold `bytes`.
    fn of<'a>(slot: &'a mut Option<Self>, calls: &C, bytes: usize) -> Result<&'a mut Self, CudaError> {
        if slot.as_ref().is_none_or(|turn| turn.piece.bytes < bytes) {
            if let Some(old) = slot.take() {
                calls.wait(&old.copied)?;
            }
            let bytes = bytes.max(UPLOAD_BYTES);
            let copied = calls.event()?;
            *slot = Some(Self { piece: Piece { memory: calls.pin(bytes)?, bytes }, copied });
        }
        Ok(slot.as_mut().expect("made above"))
    }
}

#[cfg(test)]
mod tests;
