//! Devices whose feature this build lacks: opening one is an error that names the feature.

use kvant_backend::BackendError;

use super::OpenDevice;
use crate::error::Error;

/// Returns the error of a device that is not in this build.
fn missing<T>(device: &'static str, what: &str) -> Result<T, Error> {
    let problem = format!("this build has no {what} (feature `{device}`)");
    Err(BackendError::Failed { device, problem }.into())
}

#[cfg(not(feature = "cuda"))]
pub mod cuda {
    use super::*;
    use crate::devices::encoders::EncoderDevice;
    use crate::devices::report::{CudaDetails, DeviceReport};

    const WHAT: &str = "GPU devices";

    pub fn count() -> Result<usize, Error> {
        missing("cuda", WHAT)
    }

    pub fn open(_: usize) -> Result<Box<dyn OpenDevice>, Error> {
        missing("cuda", WHAT)
    }

    pub fn open_encoders(_: usize) -> Result<Box<dyn EncoderDevice>, Error> {
        missing("cuda", WHAT)
    }

    pub fn report(_: usize) -> Result<DeviceReport<CudaDetails>, Error> {
        missing("cuda", WHAT)
    }
}

#[cfg(not(feature = "wgpu"))]
pub mod wgpu {
    use super::*;
    use crate::devices::report::{DeviceReport, VariantTrial, WgpuDetails};
    use crate::devices::tuning_file::{AdapterId, TuningFile};

    const WHAT: &str = "adapters of Vulkan, Metal or DX12";

    pub fn adapters() -> Result<Vec<DeviceReport<WgpuDetails>>, Error> {
        missing("wgpu", WHAT)
    }

    pub fn open(_: usize) -> Result<Box<dyn OpenDevice>, Error> {
        missing("wgpu", WHAT)
    }

    pub fn tune(_: usize, _: &mut dyn FnMut(f32)) -> Result<(AdapterId, Vec<VariantTrial>), Error> {
        missing("wgpu", WHAT)
    }

    /// Returns no adapters: tuning results of other builds stay saved.
    pub fn unfit(_: &TuningFile) -> Vec<(usize, String)> {
        Vec::new()
    }
}
