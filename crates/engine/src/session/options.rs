//! What a session stores and how long it is, and what that takes.

use std::str::FromStr;
use std::sync::Arc;

use kvant_codec::DType;
use kvant_kv::{Balance, KvError, KvShape, Plan, Policies};

use crate::Error;

/// What the KV cache stores.
#[derive(Debug, Clone, PartialEq)]
pub struct KvOptions {
    /// Type of the keys.
    pub k: DType,
    /// Type of the values.
    pub v: DType,
    /// Rules that change the types of some heads or keep some tokens in f16.
    pub policies: Policies,
    /// What keys and values are multiplied by before they are stored.
    pub balance: Option<Arc<Balance>>,
    /// Whether the youngest tokens, those that do not fill a tile yet, wait in f16. On except for measurements:
    /// without, what is stored depends on how tokens are fed.
    pub tail: bool,
}

impl KvOptions {
    /// The same type for keys and values, with the default policies.
    pub fn symmetric(dtype: DType) -> Self {
        Self { k: dtype, v: dtype, ..Default::default() }
    }

    /// What each layer and head of a model of this shape stores then.
    ///
    /// # Errors
    /// Policies or a balance that do not fit the model.
    pub fn plan(&self, shape: &KvShape) -> Result<Plan, KvError> {
        if let Some(balance) = &self.balance {
            balance.check(shape)?;
        }
        let plan = Plan::new(shape, self.k, self.v, &self.policies)?;
        Ok(Plan { tail: self.tail, balance: self.balance.clone(), ..plan })
    }
}

/// One type for keys and values, or `K/V`.
impl FromStr for KvOptions {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let (k, v) = text.split_once('/').unwrap_or((text, text));
        let dtype = |name: &str| {
            let expected = format!("a KV type ({}), or K/V", DType::KV.map(DType::name).join(" "));
            name.parse().map_err(|_| Error::Setting { name: "kv_type", expected, got: text.to_owned() })
        };
        Ok(Self { k: dtype(k)?, v: dtype(v)?, ..Self::default() })
    }
}

impl Default for KvOptions {
    fn default() -> Self {
        Self { k: DType::F16, v: DType::F16, policies: Policies::default(), balance: None, tail: true }
    }
}

/// How to make a session.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct SessionOptions {
    /// Tokens the context holds; the model's training length when `None`. A model with LongRoPE turns positions otherwise in
    /// contexts that are longer than its [original one](kvant_model::Config::n_ctx_short).
    pub n_ctx: Option<usize>,
    /// What the cache stores.
    pub kv: KvOptions,
}

/// What a cache takes, measured.
#[derive(Debug, Clone, PartialEq)]
pub struct KvUse {
    /// Tokens stored.
    pub tokens: usize,
    /// Bytes allocated: pages, f16 parts and padding.
    pub bytes: usize,
    /// Bytes an f16 cache would have allocated for the same tokens.
    pub bytes_f16: usize,
    /// Bytes that the cache of a [draft model](crate::OpenOptions::draft) has allocated beside.
    pub bytes_draft: usize,
    /// Name of the keys' type (`mixed` when heads differ).
    pub type_k: &'static str,
    /// Name of the values' type (`mixed` when heads differ).
    pub type_v: &'static str,
    /// Bits per key value, scales included.
    pub bpv_k: f64,
    /// Bits per value value, scales included.
    pub bpv_v: f64,
    /// What policies changed, one line each.
    pub notes: Vec<String>,
}
