//! Arguments shared by several commands, under the names that llama.cpp users know.
//!
//! These files hold data: what clap parses, and plain conversions of it. [`open`](crate::open),
//! [`model_source`](crate::model_source) and [`kv_cache`](crate::kv_cache) above them read files
//! and open models.

pub mod cache;
pub mod decode;
pub mod lora;
pub mod mmproj;
pub mod model;
pub mod sampling;
pub mod template;
pub mod value;
pub mod weight_type;
