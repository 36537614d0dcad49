//! Block formats, codebooks and rotations of the Kvant inference engine: pure maths, no I/O, no
//! unsafe.
//!
//! This crate is the *reference*: scalar, deterministic, obvious. Devices own faster kernels, which
//! are tested against it and define no constants of their own.
//!
//! | module | contents |
//! |---|---|
//! | [`DType`] | the formats and their sizes in bytes |
//! | [`encode`], [`decode`] | values to block bytes and back, in GGML's byte layouts |
//! | [`fields`] | codes and scales of a block as stored, for devices that repack weights |
//! | [`block32`], [`kquant`], [`iq4`], [`iq`], [`tq`], [`tq3t`], [`turbo`] | data sheets |
//! | [`grouped`], [`fp4`], [`factored_fp4`], [`fp8`], [`nf4`] | those of other checkpoints |
//! | [`rotation`] | the signed Hadamard rotation applied before the turbo and TQ formats |
//! | [`codebook`], [`lloyd_max`] | Lloyd-Max tables of N(0, 1), and the solver that verifies them |
//! | [`trellis`] | codebooks with memory, and how they are trained |
//! | [`tile`] | the KV-cache layout of 16 tokens of one head, which kernels must match |
//! | [`candidate`] | top-k tokens of a row of logits, and their order |
//! | [`distortion`] | the measured error of a format on synthetic vectors, and its theory |
//! | [`qjl`] | the inner-product codec of the QJL paper, for research |
//! | [`two_axis`] | scales along both axes of a tile, as in KVarN, for research |
//!
//! # Non-finite numbers
//!
//! One rule holds for every format and is applied by [`encode`], [`tile::prepare_row`] and
//! [`tile::TileLayout::put`] (see [`finite`]): **NaN becomes 0, and a value outside the format's
//! range is clamped to it**, infinities included. The range is ±65,504 (the largest f16) for every
//! format but f32, bf16, mxfp4 and nvfp4, which have their own. Scales saturate at 65,504 too.
//! Encoded data therefore always decodes to finite numbers. A hot path that appends to a cache
//! cannot report an error per value, so its result must be predictable.

#![forbid(unsafe_code)]

mod block;
pub mod block32;
mod byte_book;
pub mod candidate;
pub mod codebook;
pub mod distortion;
mod dtype;
mod error;
pub mod factored_fp4;
pub mod fields;
pub mod finite;
pub mod fp4;
pub mod fp8;
pub mod grouped;
pub mod iq;
pub mod iq4;
mod kfit;
pub mod kquant;
pub mod lloyd_max;
pub mod nf4;
pub mod qjl;
pub mod random;
pub mod rotation;
pub mod step;
mod table;
pub mod tile;
pub mod tq;
pub mod tq3t;
pub mod trellis;
pub mod turbo;
pub mod two_axis;

pub use block::{decode, encode, encode_weighted};
pub use byte_book::ByteBook;
pub use codebook::Codebook;
pub use dtype::{DType, FormatSpec, KvCode, KvEncoding, Levels};
pub use error::CodecError;
pub use kfit::{Importance, weights as error_weights};
pub use rotation::Rotation;
pub use table::LevelTable;
pub use tile::{Side, TILE, TileLayout};
pub use trellis::Trellis;
