//! The CPU: reports it and loads models onto it.

use std::fs;
use std::sync::Arc;

use kvant_backend::{Backend, BackendError, limits};
use kvant_cpu::{CpuDevice, Isa, MatrixUnit, PrefillPrecision};
use kvant_gguf::Gguf;
use kvant_model::{Config, LayerRange};

use super::report::{CpuDetails, DeviceReport};
use super::{OpenDevice, tuning_file};
use crate::error::Error;
use crate::runtime::{self, LoadedModel};

/// Opens the CPU with `n_threads` threads (all cores when `None`) and this prefill precision, with
/// saved tuning results.
pub fn open(n_threads: Option<usize>, precision: PrefillPrecision) -> Result<CpuDevice, Error> {
    let device =
        CpuDevice::from_env(n_threads)?.with_prefill_precision(precision).map_err(|error| match error {
            BackendError::Setting { name, expected, got } => Error::Setting { name, expected, got },
            error => error.into(),
        })?;
    let Some(kept) = tuning_file::saved().cpu else { return Ok(device) };
    let fits = kept.kernels == device.isa().name()
        && kept.n_threads == device.info().n_threads
        && kept.product == product().unwrap_or_default();
    Ok(if fits { device.with_tuning(kept.tuning()) } else { device })
}

/// Reports the CPU as models with `n_threads` threads use it.
pub fn report(n_threads: Option<usize>) -> Result<DeviceReport<CpuDetails>, Error> {
    let device = open(n_threads, PrefillPrecision::Exact)?;
    let details = CpuDetails {
        info: device.info(),
        instruction_sets: Isa::available().into_iter().map(Isa::name).collect(),
        matrix_unit: MatrixUnit::find().to_string(),
        kernel_choices: device.kernel_choices(),
    };
    Ok(DeviceReport { device: details.info.name.clone(), product: product(), driver: None, details })
}

impl OpenDevice for CpuDevice {
    fn memory_bandwidth(&self) -> Result<f64, Error> {
        Ok(self.read_bandwidth()?)
    }

    fn free_bytes(&self) -> Result<Option<usize>, Error> {
        Ok(limits::available_bytes())
    }

    fn load(
        self: Box<Self>,
        config: Config,
        part: &LayerRange,
        gguf: &Arc<Gguf>,
        progress: &mut dyn FnMut(f32),
    ) -> Result<Arc<dyn LoadedModel>, Error> {
        runtime::load(*self, config, part, gguf, progress)
    }
}

/// Returns the processor's name, where the system reports it.
pub fn product() -> Option<String> {
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
