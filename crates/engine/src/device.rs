//! The device a model would run on, without a model.

use kvant_backend::{Backend, DeviceInfo, KernelChoice};
use kvant_cpu::{CpuDevice, Isa};

use crate::Error;

/// A device, to be asked what it is and what it runs.
pub struct Device(CpuDevice);

impl Device {
    /// Opens the device that models are loaded onto, with `n_threads` threads (all cores when `None`).
    ///
    /// # Errors
    /// When a setting cannot be honoured.
    pub fn open(n_threads: Option<usize>) -> Result<Self, Error> {
        Ok(Self(CpuDevice::from_env(n_threads)?))
    }

    /// What it is.
    pub fn info(&self) -> DeviceInfo {
        self.0.info()
    }

    /// The kernel for every op and type.
    pub fn kernel_choices(&self) -> Vec<KernelChoice> {
        self.0.kernel_choices()
    }

    /// The speed at which all threads together read memory, in bytes per second: the best of several passes over
    /// 1 GiB. What bounds decoding.
    pub fn read_bandwidth(&self) -> f64 {
        self.0.read_bandwidth()
    }

    /// The kernel sets this machine can run, slowest first.
    pub fn instruction_sets(&self) -> Vec<&'static str> {
        Isa::available().into_iter().map(Isa::name).collect()
    }
}
