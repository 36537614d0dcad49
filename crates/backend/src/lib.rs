//! The device interface of Kvant: the ops of a transformer step and the pages of a KV cache.
//!
//! A model calls the ops of a [`Backend`] eagerly, one after the other, without a graph. The KV
//! cache (crate `kvant-kv`) decides *where* each token of each head is stored; a device only
//! encodes rows into tiles and reads tiles during attention. [`KvBatchEntry`] connects both: the
//! rows of one sequence, the KV tensors of one layer and their memory.
//!
//! Devices never import each other, and `model` and `kv` never name a device.
#![forbid(unsafe_code)]

pub mod autotune;
mod bytes;
mod check;
#[macro_use]
mod declare;
mod device;
mod error;
pub mod host_ops;
mod input_squares;
mod kv;
pub mod limits;
mod ops;
mod params;
mod pooled;
mod recurrent;
mod rwkv;
mod streams;
mod table;

pub use bytes::SharedBytes;
pub use device::{
    Buffer, DeviceInfo, ExpertWeights, Experts, FfnWeights, Input, KernelChoice, KernelTime, Matrix, Output,
    Page, PageTable, Result, Router, WeightSource,
};
pub use error::BackendError;
pub use input_squares::{ColumnSquares, InputSquares};
pub use kv::{
    ChannelScaleLayout, CountedPage, KvBatchEntry, KvLayer, KvMemory, KvTensor, KvTensorSpec,
    PREFIX_ALIGNMENT, PageAllocator, StateBatchEntry, TILES_PER_BLOCK, TOKENS_PER_BLOCK, TensorSizes,
    TileLocation, TileRef, TileRows, TileWrite, TokenSpan, Writes, batch_rows,
};
pub use kvant_codec::candidate::{Candidate, top_k};
pub use ops::{Backend, Kernels};
pub use params::{
    Activation, AttendParams, BidirectionalParams, BlockSelection, Columns, ExpertGroups, Heads, Norm,
    Pairing, Rope, RopeParams, RouterScores, Routing, Selected, Selection, TopK, Xielu,
};
pub use pooled::{PooledBatchEntry, PooledKeys, SelectedKeys, TokenPool};
pub use recurrent::{ConvForm, Gate, KeySharing, ShortConv, StateHeads, StateInputs, StateRule};
pub use rwkv::{FirstValues, TokenShift, Wkv7Inputs, Wkv7Weights};
pub use streams::{GatedStreams, HyperConnections, NgramInjection, StreamAttention, StreamMixing, Streams};
pub use table::decode_embedding_rows;
