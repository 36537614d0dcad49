//! Memory for the examples that fill a cache.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use kvant_backend::{Held, Pages, Result};
use kvant_cpu::CpuPage;

/// New memory whenever it is asked for.
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
