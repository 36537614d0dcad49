//! What `kvant doctor --tune` found on this machine, kept in a small file.
//!
//! The file is `kvant/tuning.json` in the user's cache folder; `KVANT_TUNING` names another, or is `off`. What it says of the CPU counts
//! only for the processor, the kernel set and the number of threads it was measured with, and what it says of an adapter for the
//! product, the interface and the driver. A file that cannot be read, or that another version wrote, and ways that an adapter
//! does not go, count for nothing and stop nothing; [`unusable`] tells of them.

mod file;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use kvant_backend::{Backend, BackendError};
pub use kvant_cpu::Trial;
use kvant_cpu::{CpuDevice, Isa, PromptMath, Tuning};
use kvant_gguf::printable_path;

pub use file::Way;
pub(crate) use file::{AdapterName, Kept, KeptAdapter};
use file::{KeptCpu, path};

use crate::{DeviceChoice, Error, adapter};

/// What was tried, and where the winners are kept.
#[derive(Debug, Clone, PartialEq)]
pub struct Tuned<T> {
    /// Every candidate, in the order of the numbers.
    pub trials: Vec<T>,
    /// The file.
    pub path: PathBuf,
}

/// A way of an adapter that was tried.
#[derive(Debug, Clone, PartialEq)]
pub struct WayTrial {
    /// The way.
    pub way: Way,
    /// Seconds of attention in one layer: the median of the rounds.
    pub seconds: f64,
    /// Whether it was taken.
    pub is_taken: bool,
}

/// Times the candidates on this machine with `n_threads` threads (all cores when `None`) and keeps the winners for all
/// later runs.
///
/// # Errors
/// When a setting cannot be honoured, memory runs out, or the file cannot be written.
pub fn tune(n_threads: Option<usize>) -> Result<Tuned<Trial>, Error> {
    let path = target()?;
    let n_threads = CpuDevice::from_env(n_threads)?.info().n_threads;
    let isa = Isa::from_env()?;
    let (tuning, trials) = Tuning::find(isa, n_threads)?;
    let Tuning { prefetch, items_per_thread, row_block } = tuning;
    let (product, kernels) = (cpu_name().unwrap_or_default(), isa.name().to_owned());
    let cpu = KeptCpu { product, kernels, n_threads, prefetch, items_per_thread, row_block };
    keep(&path, |kept| kept.cpu = Some(cpu))?;
    Ok(Tuned { trials, path })
}

/// Times the ways that adapter `index` attends, for each class of types, and keeps the winners for all later runs on it. `progress` is
/// told what part of it is done.
///
/// # Errors
/// When there is no such adapter, a kernel does not compile there, memory runs out, or the file cannot be written.
pub fn tune_adapter(index: usize, progress: &mut dyn FnMut(f32)) -> Result<Tuned<WayTrial>, Error> {
    let path = target()?;
    let (name, trials) = adapter::tune(index, progress)?;
    let taken = trials.iter().filter(|trial| trial.is_taken);
    let ways = taken.map(|trial| trial.way.clone()).collect();
    keep(&path, |kept| {
        kept.adapters.retain(|of| of.adapter != name);
        kept.adapters.push(KeptAdapter { adapter: name, ways });
    })?;
    Ok(Tuned { trials, path })
}

/// The file, which can be written.
fn target() -> Result<PathBuf, Error> {
    let Some(path) = path() else {
        let expected = "a cache folder: set HOME, XDG_CACHE_HOME or KVANT_TUNING".to_owned();
        return Err(Error::Setting { name: "tuning", expected, got: "none".to_owned() });
    };
    let made = path.parent().map_or(Ok(()), fs::create_dir_all);
    made.and_then(|()| kvant_files::check_target(&path)).map_err(|error| refused(&path, &error))?;
    Ok(path)
}

/// Changes what is kept, or begins anew where the file cannot be read.
fn keep(path: &Path, change: impl FnOnce(&mut Kept)) -> Result<(), Error> {
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

/// What is kept and counts for nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unusable {
    /// The device whose tuning makes it anew.
    pub device: DeviceChoice,
    /// Why it counts for nothing, in one line.
    pub why: String,
}

/// What is kept and counts for nothing: the file, where it cannot be read, else what it says of adapters of this machine.
pub fn unusable() -> Vec<Unusable> {
    let Some(path) = path() else { return Vec::new() };
    let told = |device, why| Unusable { device, why: format!("{}: {why}", printable_path(&path)) };
    match file::read(&path) {
        Err(error) => vec![told(DeviceChoice::Cpu, error.to_string())],
        Ok(kept) => {
            let unfit = kept.map(|kept| adapter::unfit(&kept)).unwrap_or_default();
            unfit.into_iter().map(|(index, why)| told(DeviceChoice::Wgpu(index), why)).collect()
        }
    }
}

/// What is kept; nothing where it cannot be read.
pub(crate) fn kept() -> Kept {
    path().and_then(|path| file::read(&path).ok()?).unwrap_or_default()
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
    let Some(kept) = kept().cpu else { return Ok(device) };
    let fits = kept.kernels == device.isa().name()
        && kept.n_threads == device.info().n_threads
        && kept.product == cpu_name().unwrap_or_default();
    Ok(if fits { device.with_tuning(kept.tuning()) } else { device })
}

/// The processor's own name, where the system tells it.
pub fn cpu_name() -> Option<String> {
    match fs::read_to_string("/proc/cpuinfo") {
        Ok(info) => name_in(&info),
        // Windows tells every process.
        Err(_) => std::env::var("PROCESSOR_IDENTIFIER").ok(),
    }
}

/// What `/proc/cpuinfo` calls the processor. Of 64-bit ARM it has no name, but who made each core and which one it is.
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
    fn a_processor_has_the_name_that_the_system_gives_it_or_those_of_its_cores() {
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
