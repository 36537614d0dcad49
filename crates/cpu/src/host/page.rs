//! KV cache pages on the CPU: zeroed bytes aligned to a cache line.

use bytemuck::{Pod, Zeroable};
use kvant_backend::{BackendError, Page, Result};

/// One cache line, the unit of allocation, so that every tile can be read with aligned vector
/// loads.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// An allocation of the KV cache, aligned to 64 bytes.
#[derive(Debug, Clone)]
pub struct CpuPage {
    lines: Vec<Line>,
}

impl CpuPage {
    /// Allocates a zeroed page. The allocated and reported size is rounded up to whole cache lines.
    ///
    /// # Errors
    /// [`BackendError::OutOfMemory`] when the allocator refuses.
    pub fn zeroed(n_bytes: usize) -> Result<Self> {
        let n_lines = n_bytes.div_ceil(64);
        let mut lines = Vec::new();
        lines
            .try_reserve_exact(n_lines)
            .map_err(|_| BackendError::OutOfMemory { bytes: n_bytes, what: "the cache" })?;
        lines.resize(n_lines, Line([0; 64]));
        Ok(Self { lines })
    }

    /// Returns the bytes.
    pub fn as_bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.lines)
    }

    /// Returns the bytes, to write.
    pub fn as_mut_bytes(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(&mut self.lines)
    }
}

impl Page for CpuPage {
    type Table = ();

    fn duplicate(&self) -> Result<Self> {
        Ok(self.clone())
    }

    fn copy_from(&mut self, other: &Self) -> Result<()> {
        self.as_mut_bytes().copy_from_slice(other.as_bytes());
        Ok(())
    }

    fn n_bytes(&self) -> usize {
        self.as_bytes().len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_zeroed_aligned_and_of_the_reported_length() {
        for n in [0, 1, 63, 64, 65, 6400] {
            let mut page = CpuPage::zeroed(n).unwrap();
            assert!(page.n_bytes() >= n && page.n_bytes() < n + 64);
            assert_eq!(page.as_bytes().len(), page.n_bytes());
            assert!(page.as_bytes().iter().all(|&b| b == 0));
            assert_eq!(page.as_mut_bytes().as_ptr() as usize % 64, 0);
        }
        assert!(CpuPage::zeroed(usize::MAX).is_err());
    }
}
