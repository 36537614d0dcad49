//! Page allocation for the examples that fill a KV cache.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use kvant_backend::{Held, Pages, Result};
use kvant_cpu::CpuPage;

/// Allocates a new page for every request.
#[derive(Default)]
pub struct Fresh(Arc<AtomicUsize>);

impl Pages<CpuPage> for Fresh {
    fn page(&self, n_bytes: usize) -> Result<Held<CpuPage>> {
        Ok(Held::new(CpuPage::zeroed(n_bytes)?, &self.0))
    }

    fn copy(&self, page: &CpuPage) -> Result<Held<CpuPage>> {
        Ok(Held::new(page.clone(), &self.0))
    }
}
