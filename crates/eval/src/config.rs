//! What a measured cache stores, in words and numbers.

use kvant::{KvOptions, Model, Policies};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use crate::EvalError;

/// A cache configuration, as results name it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KvConfig {
    /// Type of the keys, `mixed` when heads differ.
    pub type_k: String,
    /// Type of the values, `mixed` when heads differ.
    pub type_v: String,
    /// Bits per key value, scales included.
    pub bpv_k: f64,
    /// Bits per value value, scales included.
    pub bpv_v: f64,
    /// Bytes that the cache of one chunk takes, f16 parts and padding included.
    pub bytes: usize,
    /// Bytes that an f16 cache takes for the same tokens.
    pub bytes_f16: usize,
    /// Whether the youngest tokens wait in f16.
    pub tail: bool,
    /// The policies, as [`Policies`](kvant::Policies) are written.
    pub policies: String,
    /// What the policies changed, one line each.
    pub notes: Vec<String>,
    /// Tells plans apart that are called the same.
    #[serde(skip)]
    fingerprint: String,
}

impl KvConfig {
    /// The configuration that `kv` makes of `model`, with sizes for `tokens` tokens.
    ///
    /// # Errors
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

    /// `turbo3`, or `q8_0/turbo3` when keys and values differ.
    pub fn name(&self) -> String {
        if self.type_k == self.type_v {
            self.type_k.clone()
        } else {
            format!("{}/{}", self.type_k, self.type_v)
        }
    }

    /// The name, and what tells plans of the same name apart.
    pub(crate) fn identity(&self) -> String {
        format!("{} ({})", self.name(), self.fingerprint)
    }

    /// Mean bits per value of keys and values together.
    pub fn bpv(&self) -> f64 {
        (self.bpv_k + self.bpv_v) / 2.0
    }
}
