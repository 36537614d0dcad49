//! The file that tuning is kept in: what was found for the CPU, and for any number of adapters.

use std::io;
use std::path::{Path, PathBuf};

use kvant_cpu::Tuning;
use serde::{Deserialize, Serialize};

/// The file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Kept {
    pub cpu: Option<KeptCpu>,
    pub adapters: Vec<KeptAdapter>,
}

/// What was found for a CPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct KeptCpu {
    pub product: String,
    pub kernels: String,
    pub n_threads: usize,
    pub prefetch: usize,
    pub items_per_thread: usize,
    pub row_block: usize,
}

impl KeptCpu {
    pub fn tuning(&self) -> Tuning {
        let Self { prefetch, items_per_thread, row_block, .. } = *self;
        Tuning { prefetch, items_per_thread, row_block }
    }
}

/// Which adapter: another driver, or another version of it, compiles otherwise.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct AdapterName {
    pub product: String,
    pub interface: String,
    /// The driver and its version.
    pub driver: String,
}

/// What was found for an adapter.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct KeptAdapter {
    pub adapter: AdapterName,
    pub ways: Vec<Way>,
}

/// How an adapter attends over types of the cache that are read alike.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Way {
    /// The types: `floats`, `integers` or `codebooks`.
    pub types: String,
    /// How codes become levels, such as `select`; of codebooks alone.
    pub look_ups: Option<String>,
    /// Queries that share what is unpacked, at most.
    pub queries: usize,
    /// Words of codes that a thread takes at a time.
    pub words: usize,
}

/// Where the file is; `None` where none is wanted, or there is no place for it.
pub(crate) fn path() -> Option<PathBuf> {
    match std::env::var_os("KVANT_TUNING") {
        Some(path) => (path != "off").then(|| path.into()),
        None => Some(kvant_files::cache_folder()?.join("tuning.json")),
    }
}

/// What the file at `path` holds; `None` where there is none.
pub(crate) fn read(path: &Path) -> io::Result<Option<Kept>> {
    match kvant_files::read(path) {
        Ok(text) => match serde_json::from_slice::<Kept>(&text)? {
            kept if kept.cpu.as_ref().is_none_or(|cpu| cpu.tuning().can_be_found()) => Ok(Some(kept)),
            _ => Err(io::Error::new(io::ErrorKind::InvalidData, "numbers that tuning does not come to")),
        },
        // Without a home, or with one that is no folder, nothing was kept.
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}
