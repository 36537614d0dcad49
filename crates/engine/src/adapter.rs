//! Adapters of Vulkan, Metal and DX12: to be asked what they are, or to load a model onto.

use std::sync::Arc;

use kvant_gguf::Gguf;
use kvant_model::{Config, Part};
use kvant_wgpu::{AdapterReport, WgpuDevice};

use crate::Error;
use crate::device::Adapter;
use crate::runtime::{self, Loaded};

/// The adapters of this machine, in the order of their numbers.
///
/// # Errors
/// In a build without them.
pub fn adapters() -> Result<Vec<Adapter>, Error> {
    let adapter = |report: AdapterReport| {
        let AdapterReport { device, product, interface, driver, is_software, max_binding, features, .. } =
            report;
        let features = features.into_iter().map(str::to_owned).collect();
        Adapter { device, product, interface, driver, is_software, max_binding, features }
    };
    Ok(kvant_wgpu::adapters().into_iter().map(adapter).collect())
}

/// Loads a part of a model onto adapter `index`.
pub(crate) fn load(
    index: usize,
    config: Config,
    part: &Part,
    gguf: &Arc<Gguf>,
    progress: &mut dyn FnMut(f32),
) -> Result<Arc<dyn Loaded>, Error> {
    runtime::load(WgpuDevice::open(index)?, config, part, gguf, progress)
}
