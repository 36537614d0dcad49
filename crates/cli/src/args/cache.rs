//! Arguments of the KV cache.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use kvant::{DType, Policies};

use crate::args::value::{kv_type, policies};

/// Configures the KV cache: context size, types, policies.
#[derive(Args, Debug, Clone)]
pub struct CacheArgs {
    /// Context size in tokens; 0, the default, is the model's training context
    #[arg(short = 'c', long, value_name = "N", env = "KVANT_CTX_SIZE")]
    pub ctx_size: Option<usize>,
    /// KV cache type of K (-ctk): auto f32 f16 bf16 q8_0 q4_0 turbo4 turbo3 turbo2 turbo3t turbo2t
    /// [default: f16 if only -ctv is set, else the plan beside the model (kvant plan), or turbo4]
    #[arg(long, value_name = "TYPE", env = "KVANT_CACHE_TYPE_K", value_parser = kv_type_or_auto)]
    cache_type_k: Option<KvTypeArg>,
    /// KV cache type of V (-ctv) [default: as for -ctk]
    #[arg(long, value_name = "TYPE", env = "KVANT_CACHE_TYPE_V", value_parser = kv_type_or_auto)]
    cache_type_v: Option<KvTypeArg>,
    /// KV cache policies on top of the types: none, or a comma-separated list of auto-keys:NOISE,
    /// auto-asymmetric, boundary:FIRST,LAST, sink:N, recent:N, alpha:X
    #[arg(long, value_name = "RULES", env = "KVANT_KV_POLICY", default_value_t, value_parser = policies)]
    pub kv_policy: Policies,
    /// Table of KV types per layer, head and side; lines of 'LAYER HEAD K|V|KV TYPE', * for all
    #[arg(long, value_name = "FILE", env = "KVANT_KV_TYPES")]
    pub kv_types: Option<PathBuf>,
    #[command(flatten)]
    pub plan: KvPlanArgs,
}

impl CacheArgs {
    /// Returns the K and V types that were named.
    pub fn types(&self) -> [Option<DType>; 2] {
        [self.cache_type_k, self.cache_type_v].map(|given| given.and_then(|KvTypeArg(named)| named))
    }
}

/// A KV type; `None` leaves the choice to Kvant.
#[derive(Debug, Clone, Copy)]
struct KvTypeArg(Option<DType>);

/// Parses a KV type, or `auto`.
fn kv_type_or_auto(text: &str) -> Result<KvTypeArg, String> {
    let named = if text == "auto" { None } else { Some(kv_type(text)?) };
    Ok(KvTypeArg(named))
}

/// Selects the plan of a cache.
#[derive(Args, Debug, Clone)]
pub struct KvPlanArgs {
    /// Plan of kvant plan: its types where neither -ctk nor -ctv is set, and with any types its
    /// factors on K and V
    #[arg(long, value_name = "FILE", env = "KVANT_KV_PLAN")]
    pub kv_plan: Option<PathBuf>,
    /// Factors on K and V before quantization (SmoothQuant): off, weights (derived from the model's
    /// weights) or plan [default: plan if one is used, else weights]
    #[arg(long, value_name = "FROM", env = "KVANT_KV_BALANCE")]
    pub kv_balance: Option<BalanceArg>,
}

/// Source of the factors on K and V.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BalanceArg {
    /// No factors
    Off,
    /// From the model's weights
    Weights,
    /// From the plan
    Plan,
}
