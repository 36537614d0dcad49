//! Block formats, codebooks and rotations of the Kvant inference engine: pure maths, no I/O, no unsafe.
//!
//! Everything here is a *reference*: scalar, deterministic, obvious. Devices own faster versions and are held to
//! these; they never bring constants of their own.
//!
//! | module | what it answers |
//! |---|---|
//! | [`DType`] | which formats exist, how many bytes they take |
//! | [`encode`], [`decode`] | values to block bytes and back, in GGML's byte layouts |
//! | [`fields`] | the codes and scales of a block as stored, for devices that lay them out anew |
//! | [`block32`], [`kquant`], [`iq4`], [`iq`], [`fp4`], [`tq`], [`turbo`] | one data sheet per family of formats |
//! | [`rotation`] | the signed Hadamard rotation in front of the turbo and TQ formats |
//! | [`codebook`], [`lloyd_max`] | the Lloyd-Max tables of N(0, 1), and the solver they are checked against |
//! | [`trellis`] | codebooks with a memory, and how they are trained |
//! | [`tile`] | how the KV cache stores 16 tokens of one head; the layout kernels are held to |
//! | [`candidate`] | the likeliest tokens of a row of logits, and their order |
//! | [`distortion`] | what a format loses on synthetic vectors, beside what theory predicts |
//! | [`qjl`] | the paper's inner-product codec, for research |
//! | [`two_axis`] | scales along both axes of a tile, as KVarN has them, for research |
//!
//! # Bad numbers
//!
//! One rule for every format, applied by [`encode`], [`tile::prepare_row`] and [`tile::TileLayout::put`] alike
//! (see [`finite`]): **NaN becomes 0, and a value outside the format's range is clamped to it**, infinities
//! included. The range is ±65,504 (the largest f16) for every format but f32, bf16, mxfp4 and nvfp4, which have their own. Scales
//! saturate at 65,504 too. So what was encoded here always decodes to finite numbers. A hot path
//! that appends to a cache cannot report an error per value; it can be predictable.

#![forbid(unsafe_code)]

mod block;
pub mod block32;
mod byte_book;
pub mod candidate;
pub mod codebook;
pub mod distortion;
mod dtype;
mod error;
pub mod fields;
pub mod finite;
pub mod fp4;
pub mod iq;
pub mod iq4;
mod kfit;
pub mod kquant;
pub mod lloyd_max;
pub mod qjl;
pub mod random;
pub mod rotation;
pub mod step;
mod table;
pub mod tile;
pub mod tq;
pub mod trellis;
pub mod turbo;
pub mod two_axis;

pub use block::{decode, encode};
pub use byte_book::ByteBook;
pub use codebook::Codebook;
pub use dtype::{Code, DType, Format, Kv, Levels};
pub use error::CodecError;
pub use rotation::Rotation;
pub use table::Table;
pub use tile::{Side, TILE, TileLayout};
pub use trellis::Trellis;
