//! The ops, on slices whose shapes have been checked. Each chooses its kernels by the
//! [`Isa`](crate::simd::isa::Isa) and divides its work over a [`Pool`](crate::host::pool::Pool).

pub(crate) mod append;
pub(crate) mod attend;
pub(crate) mod attend_bidirectional;
pub(crate) mod channel_scales;
pub(crate) mod columns;
pub(crate) mod context;
pub(crate) mod embed;
pub(crate) mod exp;
pub(crate) mod gate_rows;
pub(crate) mod linear_attention;
pub(crate) mod matmul;
pub(crate) mod ngrams;
pub(crate) mod norm;
pub(crate) mod pooled;
pub(crate) mod rope;
pub(crate) mod rwkv;
pub(crate) mod short_conv;
pub(crate) mod soft_cap;
pub(crate) mod streams;
pub(crate) mod xielu;
