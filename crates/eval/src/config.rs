//! Description of a measured KV cache.

use kvant::{KvOptions, Model, Policies};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use crate::error::EvalError;

/// A cache configuration, as named in results.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KvConfig {
    /// Type of K, `mixed` when heads differ.
    pub type_k: String,
    /// Type of V, `mixed` when heads differ.
    pub type_v: String,
    /// Bits per K value, scales included.
    pub bpv_k: f64,
    /// Bits per V value, scales included.
    pub bpv_v: f64,
    /// Bytes of the cache of one chunk, f16 parts and padding included.
    pub bytes: usize,
    /// Bytes of an f16 cache for the same tokens.
    pub bytes_f16: usize,
    /// Whether recent tokens stay in f16.
    pub tail: bool,
    /// The policies, in the syntax of [`Policies`](kvant::Policies).
    pub policies: String,
    /// The changes by policies, one line each.
    pub notes: Vec<String>,
    /// Distinguishes plans of the same name.
    #[serde(skip)]
    fingerprint: String,
}

impl KvConfig {
    /// Returns the configuration of `kv` on `model`, with sizes for `tokens` tokens.
    ///
    /// # Errors
    ///
    /// When the types or policies do not fit the model.
    pub fn new(model: &Model, kv: &KvOptions, tokens: usize) -> Result<Self, EvalError> {
        let shape = model.config().kv_shape();
        let plan = |kv: &KvOptions| kv.plan(&shape).map_err(kvant::Error::from);
        let plan_f16 = plan(&KvOptions { policies: Policies::none(), ..KvOptions::default() })?;
        let plan = plan(kv)?;
        let ((type_k, type_v), (bpv_k, bpv_v)) = (plan.type_names(), plan.bits_per_value(&shape));
        Ok(Self {
            type_k: type_k.to_owned(),
            type_v: type_v.to_owned(),
            bpv_k,
            bpv_v,
            bytes: plan.n_bytes(&shape, tokens),
            bytes_f16: plan_f16.n_bytes(&shape, tokens),
            tail: kv.tail,
            policies: kv.policies.to_string(),
            fingerprint: format!("{:016x}", xxh3_64(format!("{plan:?}").as_bytes())),
            notes: plan.notes,
        })
    }

    /// Returns `turbo3`, or `q8_0/turbo3` when K and V differ.
    pub fn name(&self) -> String {
        if self.type_k == self.type_v {
            self.type_k.clone()
        } else {
            format!("{}/{}", self.type_k, self.type_v)
        }
    }

    /// Returns the name with the plan's fingerprint.
    pub(crate) fn identity(&self) -> String {
        format!("{} ({})", self.name(), self.fingerprint)
    }

    /// Returns the mean bits per value of K and V together.
    pub fn bpv(&self) -> f64 {
        (self.bpv_k + self.bpv_v) / 2.0
    }
}
