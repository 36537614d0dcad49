//! What `kvant doctor --tune` found on this machine, kept in a small file.
//!
//! The file is `kvant/tuning.json` in the user's cache folder; `KVANT_TUNING` names another, or is `off`. It counts
//! only for the processor, the kernel set and the number of threads it was measured with.

use std::path::{Path, PathBuf};
use std::{fs, io};

use kvant_backend::Backend;
use kvant_cpu::{CpuDevice, Isa, Trial, Tuning};
use serde::{Deserialize, Serialize};

use crate::{Error, durable};

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
    let (tuning, trials) = Tuning::find(isa, n_threads)?;
    let Tuning { prefetch, items_per_thread, row_block } = tuning;
    let (cpu, kernels) = (cpu_name().unwrap_or_default(), isa.name().to_owned());
    let kept = Kept { cpu, kernels, n_threads, prefetch, items_per_thread, row_block };
    let text = serde_json::to_string_pretty(&kept).expect("plain JSON");
    let written = path.parent().map_or(Ok(()), fs::create_dir_all).and_then(|()| {
        durable::write_whole(&path, |file| io::Write::write_all(file, format!("{text}\n").as_bytes()))
    });
    match written {
        Ok(()) => Ok(Tuned { trials, path }),
        Err(error) => Err(unusable(&path, "to be written", &error)),
    }
}

/// The CPU with `n_threads` threads (all cores when `None`), tuned when this machine has been.
///
/// # Errors
/// When a setting cannot be honoured, or the file exists and cannot be read.
pub(crate) fn open_cpu(n_threads: Option<usize>) -> Result<CpuDevice, Error> {
    let device = CpuDevice::from_env(n_threads)?;
    let Some(kept) = path().map_or(Ok(None), |path| read(&path))? else { return Ok(device) };
    let fits = kept.kernels == device.isa().name()
        && kept.n_threads == device.info().n_threads
        && kept.cpu == cpu_name().unwrap_or_default();
    let Kept { prefetch, items_per_thread, row_block, .. } = kept;
    Ok(if fits { device.with_tuning(Tuning { prefetch, items_per_thread, row_block }) } else { device })
}

fn read(path: &Path) -> Result<Option<Kept>, Error> {
    match fs::read_to_string(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(unusable(path, "to be readable", &error)),
        Ok(text) => match serde_json::from_str(&text) {
            Ok(kept) => Ok(Some(kept)),
            Err(error) => Err(unusable(path, "to be what tuning writes (delete it)", &error)),
        },
    }
}

fn unusable(path: &Path, expected: &str, error: &dyn std::fmt::Display) -> Error {
    Error::Setting {
        name: "tuning",
        expected: format!("{} {expected}", path.display()),
        got: error.to_string(),
    }
}

fn path() -> Option<PathBuf> {
    if let Some(path) = std::env::var_os("KVANT_TUNING") {
        return (path != "off").then(|| path.into());
    }
    let folder = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let home = || folder("HOME").map(|home| home.join(".cache"));
    let base = folder("XDG_CACHE_HOME").or_else(|| folder("LOCALAPPDATA")).or_else(home)?;
    Some(base.join("kvant").join("tuning.json"))
}

/// The processor's own name, where the system tells it.
pub fn cpu_name() -> Option<String> {
    let info = fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = info.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}
