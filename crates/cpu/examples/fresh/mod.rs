//! Page allocation for the examples that fill a KV cache.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use kvant_backend::{CountedPage, PageAllocator, Result};
use kvant_cpu::CpuPage;

/// Allocates a new page for every request.
#[derive(Default)]
pub struct Fresh(Arc<AtomicUsize>);

impl PageAllocator<CpuPage> for Fresh {
    fn page(&self, n_bytes: usize) -> Result<CountedPage<CpuPage>> {
        Ok(CountedPage::new(CpuPage::zeroed(n_bytes)?, &self.0))
    }

    fn copy(&self, page: &CpuPage) -> Result<CountedPage<CpuPage>> {
        Ok(CountedPage::new(page.clone(), &self.0))
    }
}
