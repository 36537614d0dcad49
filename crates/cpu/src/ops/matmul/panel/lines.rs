//! Memory for panels: cache lines, zero and untouched until written.

use bytemuck::{Pod, Zeroable};
use kvant_backend::BackendError;
#[cfg(not(target_family = "wasm"))]
use memmap2::MmapMut;

/// One cache line, the width of a vector register: the unit every kernel loads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C, align(64))]
pub(crate) struct Line(pub [u8; 64]);

impl Line {
    pub const ZERO: Self = Self([0; 64]);

    /// Returns the f16 at index `i` of 32, as bits.
    pub fn half(&self, i: usize) -> u16 {
        u16::from_le_bytes([self.0[2 * i], self.0[2 * i + 1]])
    }

    /// Sets the 16-bit value at index `i` of 32.
    pub fn set_half(&mut self, i: usize, bits: u16) {
        self.0[2 * i..2 * i + 2].copy_from_slice(&bits.to_le_bytes());
    }
}

/// An allocation of lines. The system provides it zeroed, so that first touch places each line in
/// the memory of the thread that writes it; in huge pages where the system has them, since all of
/// it is read for every token (3 to 10 % faster in a virtual machine).
pub(crate) struct Lines {
    map: Memory,
    len: usize,
}

#[cfg(not(target_family = "wasm"))]
type Memory = MmapMut;
/// WebAssembly has one linear memory, so the allocator provides the lines.
#[cfg(target_family = "wasm")]
type Memory = Vec<Line>;

#[cfg(not(target_family = "wasm"))]
fn memory(len: usize) -> Option<Memory> {
    // The system refuses an empty mapping.
    let len = len.saturating_mul(64).max(1);
    if !cfg!(target_os = "linux") || len < HUGE_PAGE {
        return MmapMut::map_anon(len).ok();
    }
    // Linux aligns to huge pages what is a whole number of them. Pages beyond the end are never
    // written, so that they take no memory; a huge page that reaches there would.
    let map = MmapMut::map_anon(len.checked_next_multiple_of(HUGE_PAGE)?).ok()?;
    // A hint: a system without huge pages refuses it.
    #[cfg(target_os = "linux")]
    let _ = map.advise_range(memmap2::Advice::HugePage, 0, len / HUGE_PAGE * HUGE_PAGE);
    Some(map)
}

/// Bytes of a huge page of most systems.
#[cfg(not(target_family = "wasm"))]
const HUGE_PAGE: usize = 2 << 20;

#[cfg(target_family = "wasm")]
fn memory(len: usize) -> Option<Memory> {
    let mut lines = Vec::new();
    lines.try_reserve_exact(len).ok()?;
    lines.resize(len, Line::ZERO);
    Some(lines)
}

impl Lines {
    /// Returns `len` zeroed lines.
    ///
    /// # Errors
    /// [`BackendError::OutOfMemory`].
    pub fn zeroed(len: usize) -> Result<Self, BackendError> {
        let bytes = len.saturating_mul(64);
        let map = memory(len).ok_or(BackendError::OutOfMemory { bytes, what: "weights" })?;
        Ok(Self { map, len })
    }

    pub fn as_slice(&self) -> &[Line] {
        // SAFETY: mappings are aligned to pages, lines to themselves, and this memory has the
        // `64 len` bytes requested, all initialized; every byte pattern is a valid `Line`.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr().cast(), self.len) }
    }

    pub fn as_mut_slice(&mut self) -> &mut [Line] {
        // SAFETY: as in `as_slice`; `&mut self` makes the borrow unique.
        unsafe { std::slice::from_raw_parts_mut(self.map.as_mut_ptr().cast(), self.len) }
    }
}

impl std::fmt::Debug for Lines {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Lines({})", self.len)
    }
}
