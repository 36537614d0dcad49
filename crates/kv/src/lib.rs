//! The compressed KV cache: which type each head of each layer is stored in, where its tokens live, and what that
//! costs in bytes.
//!
//! A [`Plan`] says what to store (types per KV layer, head and side, f16 sink and recent window), a [`Layout`] where; a
//! [`Cache`] holds the blocks of a sequence, which a device appends to and attends over, layer by layer; a [`Pool`] counts
//! them, keeps them within a budget and finds those that another sequence holds already. Layer always means
//! the ordinal among layers that have a cache, not the model's layer number.
//!
//! What a cache reports as resident is what it allocated ([`Cache::n_bytes`]); what all hold together, [`Pool::n_bytes`].
//!
//! A context that is full is full: there is no context shift. Shifting would mean un-rotating, re-turning and
//! re-encoding every key, and every system that tried it on a rotated cache got it wrong; [`Cache::reserve`] refuses
//! with [`KvError::Full`] instead.
#![forbid(unsafe_code)]

mod balance;
mod cache;
mod error;
mod image;
mod layout;
mod plan;
mod policy;
mod pool;
mod states;

pub use balance::{Balance, LayerBalance, WeightStatistics, balance_factors, five_digits};
pub use cache::Cache;
pub use error::KvError;
pub use image::CacheState;
pub use layout::Layout;
pub use plan::{HeadTypes, KvLayerShape, KvShape, Plan};
pub use policy::{Policies, Policy};
pub use pool::{BlockKey, Pool};
