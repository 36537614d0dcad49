//! NVIDIA GPUs: reports them and loads models onto them.

use std::sync::Arc;

use kvant_backend::{Backend, BackendError, DeviceInfo, KernelChoice};
use kvant_cuda::CudaDevice;
use kvant_gguf::Gguf;
use kvant_model::{Config, LayerRange};

use crate::runtime::{self, LoadedModel};
use crate::{DeviceChoice, Error};

/// An NVIDIA GPU, to report its properties and compile its kernels.
pub struct CudaInfo(CudaDevice);

impl CudaInfo {
    /// Opens the chosen GPU; `None` for devices of other kinds.
    pub(crate) fn choose(choice: DeviceChoice) -> Result<Option<Self>, Error> {
        match choice {
            DeviceChoice::Cpu | DeviceChoice::Wgpu(_) => Ok(None),
            DeviceChoice::Cuda(index) => Self::open(index).map(Some),
            DeviceChoice::Auto => match CudaDevice::open(0) {
                Ok(device) => Ok(Some(Self(device))),
                Err(error @ BackendError::Setting { .. }) => Err(error.into()),
                // No usable GPU: the device summary shows the CPU, and `Gpu::open` returns the
                // reason.
                Err(_) => Ok(None),
            },
        }
    }

    /// Loads a part of a model onto the GPU.
    pub(crate) fn load(
        self,
        config: Config,
        part: &LayerRange,
        gguf: &Arc<Gguf>,
        progress: &mut dyn FnMut(f32),
    ) -> Result<Arc<dyn LoadedModel>, Error> {
        runtime::load(self.0, config, part, gguf, progress)
    }

    /// Returns the speed at which the GPU copies its memory, in bytes per second.
    pub(crate) fn copy_bandwidth(&self) -> Result<f64, Error> {
        Ok(self.0.copy_bandwidth()?)
    }

    /// Returns the number of GPUs.
    ///
    /// # Errors
    /// A missing or old driver.
    pub fn count() -> Result<usize, Error> {
        Ok(CudaDevice::count()?)
    }

    /// Opens GPU `index`.
    ///
    /// # Errors
    /// A missing or too old driver or run-time compiler; a missing or too old GPU.
    pub fn open(index: usize) -> Result<Self, Error> {
        Ok(Self(CudaDevice::open(index)?))
    }

    /// Returns the device information.
    pub fn info(&self) -> DeviceInfo {
        self.0.info()
    }

    /// Returns the product name, such as `NVIDIA H200`.
    pub fn product(&self) -> &str {
        self.0.product()
    }

    /// Returns the newest CUDA version that the driver supports, and the version of the compiler,
    /// as text.
    pub fn versions(&self) -> (String, String) {
        (self.0.driver().to_string(), self.0.nvrtc().to_string())
    }

    /// Returns the free and the total memory, in bytes.
    ///
    /// # Errors
    /// When the driver reports an error.
    pub fn memory(&self) -> Result<(usize, usize), Error> {
        Ok((self.0.free_bytes()?.unwrap_or(0), self.0.total_bytes()))
    }

    /// Returns the kernel of every op and type.
    pub fn kernel_choices(&self) -> Vec<KernelChoice> {
        self.0.kernel_choices()
    }

    /// Compiles every kernel that is not compiled yet. Returns the number of sources and variants.
    ///
    /// # Errors
    /// The first compile error, with the compiler's message.
    pub fn compile_kernels(&self) -> Result<usize, Error> {
        Ok(self.0.compile_all()?)
    }
}
