//! Activations on the CPU: f32 values aligned to a cache line.

use kvant_backend::{BackendError, Buffer};

/// One cache line of values, the unit of allocation.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; 16]);

/// A buffer of f32 values, aligned to 64 bytes.
#[derive(Clone)]
pub struct CpuBuffer {
    lines: Vec<Line>,
    len: usize,
}

impl CpuBuffer {
    /// Returns a buffer of `len` zeros.
    ///
    /// # Errors
    /// [`BackendError::OutOfMemory`] when the allocator refuses.
    pub fn zeroed(len: usize) -> Result<Self, BackendError> {
        let n_lines = len.div_ceil(16);
        let mut lines = Vec::new();
        lines.try_reserve_exact(n_lines).map_err(|_| BackendError::OutOfMemory {
            bytes: n_lines.saturating_mul(64),
            what: "activations",
        })?;
        lines.resize(n_lines, Line([0.0; 16]));
        Ok(Self { lines, len })
    }

    /// Returns the number of values.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether it holds no value.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the values.
    pub fn as_slice(&self) -> &[f32] {
        // SAFETY: `lines` holds `len.div_ceil(16)` lines of 16 initialized values each, without
        // padding (`Line` is `repr(C)` around `[f32; 16]`, 64 bytes, aligned to 64), so at least
        // `len` values are in bounds.
        unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast(), self.len) }
    }

    /// Returns the values, to write.
    pub fn as_mut_slice(&mut self) -> &mut [f32] {
        // SAFETY: as in `as_slice`; `&mut self` makes the borrow unique.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.len) }
    }
}

impl Buffer for CpuBuffer {
    fn n_values(&self) -> usize {
        self.len
    }
}

impl std::fmt::Debug for CpuBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CpuBuffer({} values)", self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_zeroed_aligned_and_of_the_given_length() {
        for len in [0, 1, 15, 16, 17, 1000] {
            let mut buffer = CpuBuffer::zeroed(len).unwrap();
            assert_eq!(buffer.as_slice(), vec![0.0; len]);
            assert_eq!(buffer.as_mut_slice().as_ptr() as usize % 64, 0);
        }
        assert!(CpuBuffer::zeroed(usize::MAX / 8).is_err());
    }
}
