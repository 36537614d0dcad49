//! NVIDIA GPUs: reports them and loads models onto them.

use std::sync::Arc;

use kvant_backend::Backend;
use kvant_cuda::CudaDevice;
use kvant_gguf::Gguf;
use kvant_model::{Config, LayerRange};

use super::OpenDevice;
use super::encoders::EncoderDevice;
use super::report::{CudaDetails, DeviceReport};
use crate::error::Error;
use crate::runtime::{self, LoadedModel};

/// Returns the number of GPUs; an error for a missing or old driver.
pub fn count() -> Result<usize, Error> {
    Ok(CudaDevice::count()?)
}

/// Opens GPU `index`.
pub fn open(index: usize) -> Result<Box<dyn OpenDevice>, Error> {
    Ok(Box::new(CudaDevice::open(index)?))
}

/// Opens GPU `index` for encoders.
pub fn open_encoders(index: usize) -> Result<Box<dyn EncoderDevice>, Error> {
    Ok(Box::new(Arc::new(CudaDevice::open(index)?)))
}

/// Reports GPU `index`, and compiles every listed kernel that is neither in this binary nor cached.
pub fn report(index: usize) -> Result<DeviceReport<CudaDetails>, Error> {
    let gpu = CudaDevice::open(index)?;
    let details = CudaDetails {
        info: gpu.info(),
        nvrtc: gpu.nvrtc()?.map(|version| version.to_string()),
        free_bytes: Backend::free_bytes(&gpu)?.unwrap_or(0),
        total_bytes: gpu.total_bytes(),
        n_kernel_sources: gpu.compile_all()?,
    };
    let (product, driver) = (gpu.product().to_owned(), gpu.driver().to_string());
    let device = details.info.name.clone();
    Ok(DeviceReport { device, product: Some(product), driver: Some(driver), details })
}

impl OpenDevice for CudaDevice {
    fn memory_bandwidth(&self) -> Result<f64, Error> {
        Ok(self.copy_bandwidth()?)
    }

    fn free_bytes(&self) -> Result<Option<usize>, Error> {
        Ok(Backend::free_bytes(self)?)
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
