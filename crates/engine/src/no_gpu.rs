//! Stub for NVIDIA GPUs in a build without the feature `cuda`: opening one is an error.

use std::convert::Infallible;
use std::sync::Arc;

use kvant_backend::{BackendError, DeviceInfo, KernelChoice};
use kvant_gguf::Gguf;
use kvant_model::{Config, LayerRange};

use crate::runtime::LoadedModel;
use crate::{DeviceChoice, Error};

/// An NVIDIA GPU; uninhabited in this build.
pub struct CudaInfo(Infallible);

fn missing() -> Error {
    let problem = "this build has no GPU devices (feature `cuda`)".to_owned();
    BackendError::Failed { device: "cuda", problem }.into()
}

impl CudaInfo {
    /// Returns an error for an NVIDIA GPU, and `None` for other devices.
    pub(crate) fn choose(choice: DeviceChoice) -> Result<Option<Self>, Error> {
        match choice {
            DeviceChoice::Cpu | DeviceChoice::Wgpu(_) | DeviceChoice::Auto => Ok(None),
            DeviceChoice::Cuda(_) => Err(missing()),
        }
    }

    pub(crate) fn load(
        self,
        _: Config,
        _: &LayerRange,
        _: &Arc<Gguf>,
        _: &mut dyn FnMut(f32),
    ) -> Result<Arc<dyn LoadedModel>, Error> {
        match self.0 {}
    }

    pub(crate) fn copy_bandwidth(&self) -> Result<f64, Error> {
        match self.0 {}
    }

    /// Returns the number of GPUs.
    ///
    /// # Errors
    /// Always.
    pub fn count() -> Result<usize, Error> {
        Err(missing())
    }

    /// Opens GPU `index`.
    ///
    /// # Errors
    /// Always.
    pub fn open(_: usize) -> Result<Self, Error> {
        Err(missing())
    }

    /// Returns the device information.
    pub fn info(&self) -> DeviceInfo {
        match self.0 {}
    }

    /// Returns the product name.
    pub fn product(&self) -> &str {
        match self.0 {}
    }

    /// Returns the newest CUDA version that the driver supports, and the version of the compiler,
    /// as text.
    pub fn versions(&self) -> (String, String) {
        match self.0 {}
    }

    /// Returns the free and the total memory, in bytes.
    ///
    /// # Errors
    /// Never.
    pub fn memory(&self) -> Result<(usize, usize), Error> {
        match self.0 {}
    }

    /// Returns the kernel of every op and type.
    pub fn kernel_choices(&self) -> Vec<KernelChoice> {
        match self.0 {}
    }

    /// Compiles every kernel.
    ///
    /// # Errors
    /// Never.
    pub fn compile_kernels(&self) -> Result<usize, Error> {
        match self.0 {}
    }
}
