//! The compressed KV cache: which type each head of each layer is stored in, where its tokens live, and what that
//! costs in bytes.
//!
//! A [`Plan`] says what to store (types per KV layer, head and side, f16 sink and recent window); a [`Cache`] owns
//! the memory and is handed, layer by layer, to a device that appends to it and attends over it. Layer always means
//! the ordinal among layers that have a cache, not the model's layer number.
//!
//! What a cache reports as resident is what it allocated ([`Cache::n_bytes`]).
//!
//! A context that is full is full: there is no context shift. Shifting would mean un-rotating, re-turning and
//! re-encoding every key, and every system that tried it on a rotated cache got it wrong; [`Cache::reserve`] refuses
//! with [`KvError::Full`] instead.
#![forbid(unsafe_code)]

mod cache;
mod error;
mod image;
mod plan;
mod policy;

pub use cache::Cache;
pub use error::KvError;
pub use image::StreamImage;
pub use plan::{HeadTypes, KvShape, Plan};
pub use policy::{Policies, Policy};
