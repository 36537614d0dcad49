//! Stub for Vulkan, Metal and DX12 adapters in a build without the feature `wgpu`.

use std::sync::Arc;

use kvant_backend::BackendError;
use kvant_gguf::Gguf;
use kvant_model::{Config, Part};

use crate::Error;
use crate::device::Adapter;
use crate::runtime::Loaded;
use crate::tuning::{AdapterName, Kept, WayTrial};

fn missing() -> Error {
    let problem = "this build has no adapters of Vulkan, Metal or DX12 (feature `wgpu`)".to_owned();
    BackendError::Failed { device: "wgpu", problem }.into()
}

/// Lists the adapters of this machine.
///
/// # Errors
/// Always.
pub fn adapters() -> Result<Vec<Adapter>, Error> {
    Err(missing())
}

pub(crate) fn load(
    _: usize,
    _: Config,
    _: &Part,
    _: &Arc<Gguf>,
    _: &mut dyn FnMut(f32),
) -> Result<Arc<dyn Loaded>, Error> {
    Err(missing())
}

pub(crate) fn tune(_: usize, _: &mut dyn FnMut(f32)) -> Result<(AdapterName, Vec<WayTrial>), Error> {
    Err(missing())
}

/// Returns no adapters: tuning results of other builds stay saved.
pub(crate) fn unfit(_: &Kept) -> Vec<(usize, String)> {
    Vec::new()
}
