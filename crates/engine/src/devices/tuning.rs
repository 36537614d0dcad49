//! Results of `kvant doctor --tune` on this machine, in a small file.
//!
//! The file is `kvant/tuning.json` in the user's cache folder; `KVANT_TUNING` names another, or is
//! `off`. CPU results apply only to the processor, the kernel set and the number of threads of the
//! measurement; adapter results to the product, the interface and the driver. An unreadable file,
//! one of another version, and variants that an adapter does not support are ignored; [`unusable`]
//! lists them.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use kvant_backend::Backend;
pub use kvant_cpu::Trial;
use kvant_cpu::{CpuDevice, Isa, Tuning};
use kvant_gguf::printable_path;

use super::choice::DeviceChoice;
pub use super::report::VariantTrial;
pub use super::tuning_file::AttendVariantName;
use super::tuning_file::{AdapterTuning, CpuTuning, TuningFile, path, read};
use super::{cpu, wgpu};
use crate::error::Error;

/// Timed candidates, and the file with the winners.
#[derive(Debug, Clone, PartialEq)]
pub struct Tuned<T> {
    /// Every candidate, in numerical order.
    pub trials: Vec<T>,
    /// The file.
    pub path: PathBuf,
}

/// Times the candidates on this machine with `n_threads` threads (all cores when `None`) and saves
/// the winners for all later runs.
///
/// # Errors
/// When a setting cannot be applied, memory runs out, or the file cannot be written.
pub fn tune(n_threads: Option<usize>) -> Result<Tuned<Trial>, Error> {
    let path = target()?;
    let n_threads = CpuDevice::from_env(n_threads)?.info().n_threads;
    let isa = Isa::from_env()?;
    let (tuning, trials) = Tuning::find(isa, n_threads)?;
    let Tuning { prefetch, items_per_thread, row_block } = tuning;
    let (product, kernels) = (cpu::product().unwrap_or_default(), isa.name().to_owned());
    let cpu = CpuTuning { product, kernels, n_threads, prefetch, items_per_thread, row_block };
    save_tuning(&path, |kept| kept.cpu = Some(cpu))?;
    Ok(Tuned { trials, path })
}

/// Times the attention variants of adapter `index` for each class of types, and saves the winners
/// for all later runs on it. `progress` receives the fraction done.
///
/// # Errors
/// When the adapter does not exist, a kernel does not compile on it, memory runs out, or the file
/// cannot be written.
pub fn tune_adapter(index: usize, progress: &mut dyn FnMut(f32)) -> Result<Tuned<VariantTrial>, Error> {
    let path = target()?;
    let (name, trials) = wgpu::tune(index, progress)?;
    let taken = trials.iter().filter(|trial| trial.is_selected);
    let ways = taken.map(|trial| trial.variant.clone()).collect();
    save_tuning(&path, |kept| {
        kept.adapters.retain(|of| of.adapter != name);
        kept.adapters.push(AdapterTuning { adapter: name, ways });
    })?;
    Ok(Tuned { trials, path })
}

/// Returns the path of the file, after checking that it is writable.
fn target() -> Result<PathBuf, Error> {
    let Some(path) = path() else {
        let expected = "a cache folder: set HOME, XDG_CACHE_HOME or KVANT_TUNING".to_owned();
        return Err(Error::Setting { name: "tuning", expected, got: "none".to_owned() });
    };
    let made = path.parent().map_or(Ok(()), fs::create_dir_all);
    made.and_then(|()| kvant_files::check_target(&path)).map_err(|error| refused(&path, &error))?;
    Ok(path)
}

/// Changes the saved results, or starts from defaults where the file cannot be read.
fn save_tuning(path: &Path, change: impl FnOnce(&mut TuningFile)) -> Result<(), Error> {
    let mut kept = read(path).ok().flatten().unwrap_or_default();
    change(&mut kept);
    let text = serde_json::to_string_pretty(&kept).expect("plain JSON");
    kvant_files::write(path, format!("{text}\n").as_bytes()).map_err(|error| refused(path, &error))
}

fn refused(path: &Path, error: &io::Error) -> Error {
    Error::Setting {
        name: "tuning",
        expected: format!("{} to be written", printable_path(path)),
        got: error.to_string(),
    }
}

/// Saved results that are ignored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unusable {
    /// The device whose tuning replaces them.
    pub device: DeviceChoice,
    /// The reason, in one line.
    pub why: String,
}

/// Lists saved results that are ignored: the whole file where it cannot be read, else those of
/// adapters of this machine.
pub fn unusable() -> Vec<Unusable> {
    let Some(path) = path() else { return Vec::new() };
    let entry = |device, why| Unusable { device, why: format!("{}: {why}", printable_path(&path)) };
    match read(&path) {
        Err(error) => vec![entry(DeviceChoice::Cpu, error.to_string())],
        Ok(kept) => {
            let unfit = kept.map(|kept| wgpu::unfit(&kept)).unwrap_or_default();
            unfit.into_iter().map(|(index, why)| entry(DeviceChoice::Wgpu(index), why)).collect()
        }
    }
}
