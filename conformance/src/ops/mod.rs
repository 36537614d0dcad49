//! One suite per op.

pub mod buffers;
pub mod embed;
pub mod gated_ffn;
pub mod matrix;
pub mod no_rows;
pub mod project;
pub mod rope;
pub mod top_k;
