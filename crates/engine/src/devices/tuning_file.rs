//! The tuning file: results for the CPU, and for any number of adapters.

use std::io;
use std::path::{Path, PathBuf};

use kvant_cpu::Tuning;
use serde::{Deserialize, Serialize};

/// Contents of the file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TuningFile {
    pub cpu: Option<CpuTuning>,
    pub adapters: Vec<AdapterTuning>,
}

/// Results for a CPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CpuTuning {
    pub product: String,
    pub kernels: String,
    pub n_threads: usize,
    pub prefetch: usize,
    pub items_per_thread: usize,
    pub row_block: usize,
}

impl CpuTuning {
    pub fn tuning(&self) -> Tuning {
        let Self { prefetch, items_per_thread, row_block, .. } = *self;
        Tuning { prefetch, items_per_thread, row_block }
    }
}

/// Identity of an adapter: another driver, or another version of it, compiles differently.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct AdapterId {
    pub product: String,
    pub interface: String,
    /// The driver and its version.
    pub driver: String,
}

/// Results for an adapter.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct AdapterTuning {
    pub adapter: AdapterId,
    pub ways: Vec<AttendVariantName>,
}

/// Attention variant of an adapter for one class of KV types.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttendVariantName {
    /// The class: `floats`, `integers` or `codebooks`.
    pub types: String,
    /// Codebook lookup, such as `select`; for codebooks alone.
    pub look_ups: Option<String>,
    /// Maximum of queries that share unpacked codes.
    pub queries: usize,
    /// Words of codes per thread and iteration.
    pub words: usize,
}

/// Returns the path of the file; `None` where tuning is off, or no cache folder exists.
pub(crate) fn path() -> Option<PathBuf> {
    match std::env::var_os("KVANT_TUNING") {
        Some(path) => (path != "off").then(|| path.into()),
        None => Some(kvant_files::cache_folder()?.join("tuning.json")),
    }
}

/// Reads the file at `path`; `None` where it does not exist.
pub(crate) fn read(path: &Path) -> io::Result<Option<TuningFile>> {
    match kvant_files::read(path) {
        Ok(text) => match serde_json::from_slice::<TuningFile>(&text)? {
            kept if kept.cpu.as_ref().is_none_or(|cpu| cpu.tuning().is_plausible()) => Ok(Some(kept)),
            _ => Err(io::Error::new(io::ErrorKind::InvalidData, "values that tuning cannot result in")),
        },
        // Without a home, or with one that is not a folder, no results are saved.
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Returns the saved results; defaults where the file cannot be read.
pub(crate) fn saved() -> TuningFile {
    path().and_then(|path| read(&path).ok()?).unwrap_or_default()
}
