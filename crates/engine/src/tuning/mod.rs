//! Results of `kvant doctor --tune` on this machine, in a small file.
//!
//! The file is `kvant/tuning.json` in the user's cache folder; `KVANT_TUNING` names another, or is
//! `off`. CPU results apply only to the processor, the kernel set and the number of threads of the
//! measurement; adapter results to the product, the interface and the driver. An unreadable file,
//! one of another version, and variants that an adapter does not support are ignored; [`unusable`]
//! lists them.

mod file;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use kvant_backend::{Backend, BackendError};
pub use kvant_cpu::Trial;
use kvant_cpu::{CpuDevice, Isa, PrefillPrecision, Tuning};
use kvant_gguf::printable_path;

pub use file::AttendVariantName;
pub(crate) use file::{AdapterId, AdapterTuning, TuningFile};
use file::{CpuTuning, path};

use crate::{DeviceChoice, Error, adapter};

/// Timed candidates, and the file with the winners.
#[derive(Debug, Clone, PartialEq)]
pub struct Tuned<T> {
    /// Every candidate, in numerical order.
    pub trials: Vec<T>,
    /// The file.
    pub path: PathBuf,
}

/// A timed attention variant of an adapter.
#[derive(Debug, Clone, PartialEq)]
pub struct VariantTrial {
    /// The variant.
    pub way: AttendVariantName,
    /// Seconds of attention in one layer: the median of the rounds.
    pub seconds: f64,
    /// Whether it was selected.
    pub is_selected: bool,
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
    let (product, kernels) = (cpu_name().unwrap_or_default(), isa.name().to_owned());
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
    let (name, trials) = adapter::tune(index, progress)?;
    let taken = trials.iter().filter(|trial| trial.is_selected);
    let ways = taken.map(|trial| trial.way.clone()).collect();
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
    let mut kept = file::read(path).ok().flatten().unwrap_or_default();
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
    match file::read(&path) {
        Err(error) => vec![entry(DeviceChoice::Cpu, error.to_string())],
        Ok(kept) => {
            let unfit = kept.map(|kept| adapter::unfit(&kept)).unwrap_or_default();
            unfit.into_iter().map(|(index, why)| entry(DeviceChoice::Wgpu(index), why)).collect()
        }
    }
}

/// Returns the saved results; defaults where the file cannot be read.
pub(crate) fn kept() -> TuningFile {
    path().and_then(|path| file::read(&path).ok()?).unwrap_or_default()
}

/// Opens the CPU with `n_threads` threads (all cores when `None`) and this prefill precision, with
/// saved tuning results.
///
/// # Errors
/// When a setting cannot be applied.
pub(crate) fn open_cpu(n_threads: Option<usize>, math: PrefillPrecision) -> Result<CpuDevice, Error> {
    let device =
        CpuDevice::from_env(n_threads)?.with_prefill_precision(math).map_err(|error| match error {
            BackendError::Setting { name, expected, got } => Error::Setting { name, expected, got },
            error => error.into(),
        })?;
    let Some(kept) = kept().cpu else { return Ok(device) };
    let fits = kept.kernels == device.isa().name()
        && kept.n_threads == device.info().n_threads
        && kept.product == cpu_name().unwrap_or_default();
    Ok(if fits { device.with_tuning(kept.tuning()) } else { device })
}

/// Returns the processor's name, where the system reports it.
pub fn cpu_name() -> Option<String> {
    match fs::read_to_string("/proc/cpuinfo") {
        Ok(info) => name_in(&info),
        // Windows has it in an environment variable.
        Err(_) => std::env::var("PROCESSOR_IDENTIFIER").ok(),
    }
}

/// Parses the processor's name from `/proc/cpuinfo`. On 64-bit ARM it consists of the implementer
/// and part of each core.
fn name_in(info: &str) -> Option<String> {
    let fields = || {
        info.lines().filter_map(|line| line.split_once(':')).map(|(key, value)| (key.trim(), value.trim()))
    };
    if let Some((_, name)) = fields().find(|(key, _)| *key == "model name") {
        return Some(name.to_owned());
    }
    let (mut cores, mut implementer) = (Vec::new(), None);
    for (key, value) in fields() {
        match key {
            "CPU implementer" => implementer = Some(value),
            "CPU part" => {
                let core = format!("implementer {} part {value}", implementer?);
                if !cores.contains(&core) {
                    cores.push(core);
                }
            }
            _ => {}
        }
    }
    (!cores.is_empty()).then(|| cores.join(", "))
}

#[cfg(test)]
mod tests {
    use super::name_in;

    #[test]
    fn processor_names_come_from_the_system_or_the_cores() {
        let x86 = "processor\t: 0\nmodel name\t: AMD EPYC 9B45\nflags\t\t: fpu\n\nprocessor\t: 1\nmodel name\t: AMD EPYC 9B45\n";
        assert_eq!(name_in(x86).unwrap(), "AMD EPYC 9B45");
        let core = |part| {
            format!("processor\t: 0\nCPU implementer\t: 0x41\nCPU variant\t: 0x1\nCPU part\t: {part}\n\n")
        };
        assert_eq!(name_in(&core("0xd0c").repeat(4)).unwrap(), "implementer 0x41 part 0xd0c");
        let both = [core("0xd05"), core("0xd05"), core("0xd41")].concat();
        assert_eq!(name_in(&both).unwrap(), "implementer 0x41 part 0xd05, implementer 0x41 part 0xd41");
        for unnamed in ["", "processor\t: 0\n", "CPU part\t: 0xd0c\n"] {
            assert_eq!(name_in(unnamed), None, "{unnamed}");
        }
    }
}
