//! The fidelity guard of a model's caches.

use std::sync::Arc;

use kvant_kv::KvGuard;
use kvant_model::Config;

use crate::error::Error;

/// Returns a guard of the caches of a model, or an error if it can follow none of their heads.
pub(crate) fn new(config: &Config) -> Result<Arc<KvGuard>, Error> {
    KvGuard::new(&config.kv_shape()).map(Arc::new).ok_or_else(|| Error::Setting {
        name: "kv_guard",
        expected: "a model with keys and values of their own, over windows of 256 tokens or more".to_owned(),
        got: config.family.name.to_owned(),
    })
}
