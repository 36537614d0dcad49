//! Stub for Vulkan, Metal and DX12 adapters in a build without the feature `wgpu`.

use std::sync::Arc;

use kvant_backend::BackendError;
use kvant_gguf::Gguf;
use kvant_model::{Config, LayerRange};

use crate::Error;
use crate::device::WgpuInfo;
use crate::runtime::LoadedModel;
use crate::tuning::{AdapterId, TuningFile, VariantTrial};

fn missing() -> Error {
    let problem = "this build has no adapters of Vulkan, Metal or DX12 (feature `wgpu`)".to_owned();
    BackendError::Failed { device: "wgpu", problem }.into()
}

/// Lists the adapters of this machine.
///
/// # Errors
/// Always.
pub fn adapters() -> Result<Vec<WgpuInfo>, Error> {
    Err(missing())
}

pub(crate) fn load(
    _: usize,
    _: Config,
    _: &LayerRange,
    _: &Arc<Gguf>,
    _: &mut dyn FnMut(f32),
) -> Result<Arc<dyn LoadedModel>, Error> {
    Err(missing())
}

pub(crate) fn tune(_: usize, _: &mut dyn FnMut(f32)) -> Result<(AdapterId, Vec<VariantTrial>), Error> {
    Err(missing())
}

/// Returns no adapters: tuning results of other builds stay saved.
pub(crate) fn unfit(_: &TuningFile) -> Vec<(usize, String)> {
    Vec::new()
}
