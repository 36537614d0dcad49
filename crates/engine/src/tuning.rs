//! What `kvant doctor --tune` found on this machine, kept in a small file.
//!
//! The file is `kvant/tuning.json` in the user's cache folder; `KVANT_TUNING` names another, or is `off`. It counts
//! only for the processor, the kernel set and the number of threads it was measured with. One that cannot be read, or that
//! another version wrote, counts for nothing and stops nothing; [`unusable`] tells of it.

use std::path::{Path, PathBuf};
use std::{fs, io};

use kvant_backend::{Backend, BackendError};
use kvant_cpu::{CpuDevice, Isa, PromptMath, Trial, Tuning};
use kvant_gguf::printable_path;
use serde::{Deserialize, Serialize};

use crate::Error;

/// The file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Kept {
    cpu: String,
    kernels: String,
    n_threads: usize,
    prefetch: usize,
    items_per_thread: usize,
    row_block: usize,
}

impl Kept {
    fn tuning(&self) -> Tuning {
        let Self { prefetch, items_per_thread, row_block, .. } = *self;
        Tuning { prefetch, items_per_thread, row_block }
    }
}

/// What was tried, and where the winners are kept.
#[derive(Debug, Clone, PartialEq)]
pub struct Tuned {
    /// Every candidate, in the order of the numbers.
    pub trials: Vec<Trial>,
    /// The file.
    pub path: PathBuf,
}

/// Times the candidates on this machine with `n_threads` threads (all cores when `None`) and keeps the winners for all
/// later runs.
///
/// # Errors
/// When a setting cannot be honoured, memory runs out, or the file cannot be written.
pub fn tune(n_threads: Option<usize>) -> Result<Tuned, Error> {
    let Some(path) = path() else {
        let expected = "a cache folder: set HOME, XDG_CACHE_HOME or KVANT_TUNING".to_owned();
        return Err(Error::Setting { name: "tuning", expected, got: "none".to_owned() });
    };
    let n_threads = CpuDevice::from_env(n_threads)?.info().n_threads;
    let isa = Isa::from_env()?;
    let refused = |error: io::Error| Error::Setting {
        name: "tuning",
        expected: format!("{} to be written", printable_path(&path)),
        got: error.to_string(),
    };
    path.parent().map_or(Ok(()), fs::create_dir_all).map_err(refused)?;
    kvant_files::check_target(&path).map_err(refused)?;
    let (tuning, trials) = Tuning::find(isa, n_threads)?;
    let Tuning { prefetch, items_per_thread, row_block } = tuning;
    let (cpu, kernels) = (cpu_name().unwrap_or_default(), isa.name().to_owned());
    let kept = Kept { cpu, kernels, n_threads, prefetch, items_per_thread, row_block };
    let text = serde_json::to_string_pretty(&kept).expect("plain JSON");
    kvant_files::write(&path, format!("{text}\n").as_bytes()).map_err(refused)?;
    Ok(Tuned { trials, path })
}

/// Why the file that is there counts for nothing, in one line; `None` where there is none, or it can be read.
pub fn unusable() -> Option<String> {
    let path = path()?;
    let error = read(&path).err()?;
    Some(format!("{}: {error}", printable_path(&path)))
}

/// The CPU with `n_threads` threads (all cores when `None`), which computes prompts so, tuned when this machine has been.
///
/// # Errors
/// When a setting cannot be honoured.
pub(crate) fn open_cpu(n_threads: Option<usize>, math: PromptMath) -> Result<CpuDevice, Error> {
    let device = CpuDevice::from_env(n_threads)?.with_prompt_math(math).map_err(|error| match error {
        BackendError::Setting { name, expected, got } => Error::Setting { name, expected, got },
        error => error.into(),
    })?;
    let Some(kept) = path().and_then(|path| read(&path).ok()?) else { return Ok(device) };
    let fits = kept.kernels == device.isa().name()
        && kept.n_threads == device.info().n_threads
        && kept.cpu == cpu_name().unwrap_or_default();
    Ok(if fits { device.with_tuning(kept.tuning()) } else { device })
}

fn read(path: &Path) -> io::Result<Option<Kept>> {
    match kvant_files::read(path) {
        Ok(text) => match serde_json::from_slice::<Kept>(&text)? {
            kept if kept.tuning().can_be_found() => Ok(Some(kept)),
            _ => Err(io::Error::new(io::ErrorKind::InvalidData, "numbers that tuning does not come to")),
        },
        // Without a home, or with one that is no folder, nothing was kept.
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

fn path() -> Option<PathBuf> {
    match std::env::var_os("KVANT_TUNING") {
        Some(path) => (path != "off").then(|| path.into()),
        None => Some(kvant_files::cache_folder()?.join("tuning.json")),
    }
}

/// The processor's own name, where the system tells it.
pub fn cpu_name() -> Option<String> {
    let info = fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = info.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}
