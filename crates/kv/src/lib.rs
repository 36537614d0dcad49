//! The compressed KV cache: the storage type of each head of each layer, the location of its
//! tokens, and the size in bytes.
//!
//! A [`Plan`] defines what is stored (types per KV layer, head and side, f16 sink and recent
//! window), a [`Layout`] where; a [`Cache`] holds the blocks of a sequence, which a device appends
//! to and attends over, layer by layer; a [`BlockPool`] counts the blocks, limits them to a budget
//! and finds those that another sequence already holds. Layer always means the ordinal among layers
//! with a cache, not the model's layer number.
//!
//! [`Cache::n_bytes`] reports the bytes allocated for one cache, [`BlockPool::n_bytes`] for all
//! caches together.
//!
//! A full context returns an error: there is no context shift. Shifting would require un-rotating,
//! re-applying RoPE and re-encoding every key, and every system that tried it on a rotated cache
//! got it wrong; [`Cache::reserve`] returns [`KvError::Full`] instead.
#![forbid(unsafe_code)]

mod block_pool;
mod cache;
mod channel_scales;
mod error;
mod guard;
mod layout;
mod plan;
mod policy;
mod recurrent_states;
mod snapshot;

pub use block_pool::{BlockKey, BlockPool};
pub use cache::Cache;
pub use channel_scales::{ChannelScales, LayerScales, WeightStatistics, balance_factors, five_digits};
pub use error::KvError;
pub use guard::{GuardQueries, GuardReport, GuardSample, KvGuard};
pub use layout::Layout;
pub use plan::{HeadTypes, KeyPool, KvLayerShape, KvShape, Plan};
pub use policy::{Policies, Policy, TableRule};
pub use snapshot::CacheState;
