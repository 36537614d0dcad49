//! What stands for adapters in a build without them.

use std::sync::Arc;

use kvant_backend::BackendError;
use kvant_gguf::Gguf;
use kvant_model::{Config, Part};

use crate::Error;
use crate::device::Adapter;
use crate::runtime::Loaded;

fn missing() -> Error {
    let problem = "this build has no adapters of Vulkan, Metal or DX12 (feature `wgpu`)".to_owned();
    BackendError::Failed { device: "wgpu", problem }.into()
}

/// The adapters of this machine.
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
