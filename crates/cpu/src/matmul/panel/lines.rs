//! Memory for panels: cache lines, zero until written, untouched until then.

use kvant_backend::BackendError;

/// One cache line, the width of a vector register: the unit every kernel loads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C, align(64))]
pub(crate) struct Line(pub [u8; 64]);

impl Line {
    pub const ZERO: Self = Self([0; 64]);

    /// The f16 at index `i` of 32, as bits.
    pub fn half(&self, i: usize) -> u16 {
        u16::from_le_bytes([self.0[2 * i], self.0[2 * i + 1]])
    }

    /// Sets the 16-bit value at index `i` of 32.
    pub fn set_half(&mut self, i: usize, bits: u16) {
        self.0[2 * i..2 * i + 2].copy_from_slice(&bits.to_le_bytes());
    }
}

/// A heap block of lines. It comes from the system zeroed, so that the thread that writes a line first is the one
/// whose memory it becomes.
pub(crate) struct Lines {
    bytes: Vec<u8>,
    offset: usize,
    len: usize,
}

impl Lines {
    /// `len` zeroed lines.
    ///
    /// # Errors
    /// [`BackendError::OutOfMemory`] when the size does not fit the address space.
    pub fn zeroed(len: usize) -> Result<Self, BackendError> {
        let n_bytes = len.checked_add(1).and_then(|n| n.checked_mul(64));
        let n_bytes = n_bytes.filter(|&n| isize::try_from(n).is_ok());
        let n_bytes = n_bytes.ok_or(BackendError::OutOfMemory { bytes: usize::MAX, what: "weights" })?;
        let bytes = vec![0u8; n_bytes];
        let offset = bytes.as_ptr().align_offset(64);
        assert!(offset < 64, "a pointer to bytes can be aligned within 64 of them");
        Ok(Self { bytes, offset, len })
    }

    pub fn as_slice(&self) -> &[Line] {
        // SAFETY: `offset < 64` aligns the start to 64 bytes, and `len` lines end at most at `offset + 64 len`, within
        // the `64 (len + 1)` initialised bytes; every byte pattern is a valid `Line`.
        unsafe { std::slice::from_raw_parts(self.bytes.as_ptr().add(self.offset).cast(), self.len) }
    }

    pub fn as_mut_slice(&mut self) -> &mut [Line] {
        // SAFETY: as in `as_slice`; `&mut self` makes the borrow unique.
        unsafe { std::slice::from_raw_parts_mut(self.bytes.as_mut_ptr().add(self.offset).cast(), self.len) }
    }
}

impl std::fmt::Debug for Lines {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Lines({})", self.len)
    }
}
