//! NVIDIA GPUs: one to be asked what it is, or to load a model onto.

use std::sync::Arc;

use kvant_backend::{Backend, BackendError, DeviceInfo, KernelChoice};
use kvant_cuda::CudaDevice;
use kvant_gguf::Gguf;
use kvant_model::{Config, Part};

use crate::runtime::{self, Loaded};
use crate::{DeviceChoice, Error};

/// An NVIDIA GPU, to be asked what it is and whether its kernels compile.
pub struct Gpu(CudaDevice);

impl Gpu {
    /// The chosen GPU; `None` for devices of other kinds.
    pub(crate) fn choose(choice: DeviceChoice) -> Result<Option<Self>, Error> {
        match choice {
            DeviceChoice::Cpu | DeviceChoice::Wgpu(_) => Ok(None),
            DeviceChoice::Cuda(index) => Self::open(index).map(Some),
            DeviceChoice::Auto => match CudaDevice::open(0) {
                Ok(device) => Ok(Some(Self(device))),
                Err(error @ BackendError::Setting { .. }) => Err(error.into()),
                // No GPU that can be used: the device in the summary says so, `Gpu::open` says why.
                Err(_) => Ok(None),
            },
        }
    }

    /// Loads a part of a model onto it.
    pub(crate) fn load(
        self,
        config: Config,
        part: &Part,
        gguf: &Arc<Gguf>,
        progress: &mut dyn FnMut(f32),
    ) -> Result<Arc<dyn Loaded>, Error> {
        runtime::load(self.0, config, part, gguf, progress)
    }

    /// The speed at which it copies its memory, in bytes per second.
    pub(crate) fn copy_bandwidth(&self) -> Result<f64, Error> {
        Ok(self.0.copy_bandwidth()?)
    }

    /// How many GPUs there are.
    ///
    /// # Errors
    /// A missing or old driver.
    pub fn count() -> Result<usize, Error> {
        Ok(CudaDevice::count()?)
    }

    /// Opens GPU `index`.
    ///
    /// # Errors
    /// What is missing or too old: the driver, the run-time compiler, the GPU.
    pub fn open(index: usize) -> Result<Self, Error> {
        Ok(Self(CudaDevice::open(index)?))
    }

    /// What it is.
    pub fn info(&self) -> DeviceInfo {
        self.0.info()
    }

    /// The product's name, such as `NVIDIA H200`.
    pub fn product(&self) -> &str {
        self.0.product()
    }

    /// The newest CUDA that the driver supports, and the version of the compiler, as text.
    pub fn versions(&self) -> (String, String) {
        (self.0.driver().to_string(), self.0.nvrtc().to_string())
    }

    /// Memory that is free, and all of it, in bytes.
    ///
    /// # Errors
    /// When the driver does not say.
    pub fn memory(&self) -> Result<(usize, usize), Error> {
        Ok((self.0.free_bytes()?.unwrap_or(0), self.0.total_bytes()))
    }

    /// The kernel for every op and type.
    pub fn kernel_choices(&self) -> Vec<KernelChoice> {
        self.0.kernel_choices()
    }

    /// Compiles every kernel, or finds it compiled. Returns how many sources and variants there are.
    ///
    /// # Errors
    /// The first one that does not compile, with the compiler's words.
    pub fn compile_kernels(&self) -> Result<usize, Error> {
        Ok(self.0.compile_all()?)
    }
}
