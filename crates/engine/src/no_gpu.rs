//! What stands for a GPU in a build without one: it cannot be opened, and says why.

use std::convert::Infallible;
use std::sync::Arc;

use kvant_backend::{BackendError, DeviceInfo, KernelChoice};
use kvant_gguf::Gguf;
use kvant_model::{Config, Part};

use crate::runtime::Loaded;
use crate::{DeviceChoice, Error};

/// An NVIDIA GPU, of which there is none in this build.
pub struct Gpu(Infallible);

fn missing() -> Error {
    let problem = "this build has no GPU devices (feature `cuda`)".to_owned();
    BackendError::Failed { device: "cuda", problem }.into()
}

impl Gpu {
    /// Says that there is none.
    pub(crate) fn choose(choice: DeviceChoice) -> Result<Option<Self>, Error> {
        match choice {
            DeviceChoice::Cpu | DeviceChoice::Wgpu(_) | DeviceChoice::Auto => Ok(None),
            DeviceChoice::Cuda(_) => Err(missing()),
        }
    }

    pub(crate) fn load(
        self,
        _: Config,
        _: &Part,
        _: &Arc<Gguf>,
        _: &mut dyn FnMut(f32),
    ) -> Result<Arc<dyn Loaded>, Error> {
        match self.0 {}
    }

    pub(crate) fn copy_bandwidth(&self) -> Result<f64, Error> {
        match self.0 {}
    }

    /// How many GPUs there are.
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

    /// What it is.
    pub fn info(&self) -> DeviceInfo {
        match self.0 {}
    }

    /// The product's name.
    pub fn product(&self) -> &str {
        match self.0 {}
    }

    /// The newest CUDA that the driver supports, and the version of the compiler, as text.
    pub fn versions(&self) -> (String, String) {
        match self.0 {}
    }

    /// Memory that is free, and all of it, in bytes.
    ///
    /// # Errors
    /// Never.
    pub fn memory(&self) -> Result<(usize, usize), Error> {
        match self.0 {}
    }

    /// The kernel for every op and type.
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
