//! One suite per op.

pub mod add_normed;
pub mod attend;
pub mod batch_invariance;
pub mod buffers;
pub mod embed;
pub mod extremes;
pub mod gate_rows;
pub mod gated_ffn;
pub mod kv_append;
pub mod layer_norm;
pub mod matrix;
pub mod moe_ffn;
pub mod no_rows;
pub mod pooled;
pub mod project;
pub mod project_each;
pub mod recurrent;
pub mod rope;
pub mod rope_append;
pub mod rwkv;
pub mod scale;
pub mod selected;
pub mod soft_cap;
pub mod streams;
pub mod top_k;
pub mod xielu;
