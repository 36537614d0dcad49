//! Conformance suites, one per op, written once for any [`Backend`]: every device is compared with
//! the same f64 reference.
//!
//! | module | content |
//! |---|---|
//! | [`judge`] | comparison of a device's results with the expected ones; NaN never passes |
//! | [`mod@reference`] | every op in plain loops and f64, from its equation |
//! | [`kv`] | KV caches of every shape, their expected content, and error bounds of attention |
//! | [`weights`] | matrices of every weight type, and their error bounds |
//! | `ops` | one suite per op: edge sizes, poisoned outputs, rejections |
//!
//! A device is wrapped in a [`DeviceUnderTest`] and runs all [`suites`].
//! `tests/conformance/devices.rs` lists the devices that need only this machine; a device whose
//! emulator is in its own tests runs the same suites from there, as `crates/cuda` does.
//!
//! A device need not support every cache shape, and an interpreter need not run every combination
//! of sizes ([`Coverage`]): cases rejected with
//! [`BackendError::Unsupported`](kvant_backend::BackendError), not promised or not requested are
//! listed in the [`Skipped`] that a suite returns, and its caller prints them on a line `skipped:
//! ..`.
#![forbid(unsafe_code)]

mod cpu_sets;
mod device_under_test;
pub mod judge;
pub mod kv;
mod ops;
pub mod reference;
mod skipped;
pub mod weights;

use kvant_backend::Backend;

pub use cpu_sets::{CPU_SETS, CpuSet};
pub use device_under_test::{Arithmetic, Attention, Coverage, DeviceUnderTest};
pub use skipped::Skipped;

/// All requirements on one op.
pub struct Suite<B: Backend> {
    /// The op, as named by [`Backend`], an aspect of it, or a property of several ops.
    pub op: &'static str,
    /// Runs the suite; panics with device, case, index and both values where the device is wrong.
    /// Returns the skipped cases.
    pub run: fn(&DeviceUnderTest<B>) -> Skipped,
}

/// Generates names and suites from one list, so that they cannot differ.
macro_rules! list {
    ($($op:literal: $run:expr,)*) => {
        /// Returns one suite per op of every device.
        pub fn suites<B: Backend>() -> Vec<Suite<B>> {
            vec![$(Suite { op: $op, run: |subject| $run(subject).into() }),*]
        }

        /// The ops of [`suites`], for devices that are absent on this machine.
        pub const OPS: &[&str] = &[$($op),*];
    };
}

list! {
    "buffers": ops::buffers::run,
    "matrix": ops::matrix::run,
    "embed": ops::embed::run,
    "project": ops::project::run,
    "gated_ffn": ops::gated_ffn::run,
    "dense_ffn": ops::dense_ffn::run,
    "activate": ops::gated_ffn::activate,
    "situ": ops::situ::run,
    "expert_ffn": ops::moe_ffn::run,
    "expert_ffn_types": ops::moe_ffn::types,
    "project_each": ops::project_each::run,
    "copy_columns": ops::project_each::columns,
    "gate_rows": ops::gate_rows::run,
    "add_normed": ops::add_normed::run,
    "layer_norm": ops::layer_norm::run,
    "soft_cap": ops::soft_cap::run,
    "xielu": ops::xielu::run,
    "apply": ops::apply::run,
    "mix_streams": ops::streams::mix,
    "connect_streams": ops::streams::connect,
    "attend_streams": ops::streams::attend,
    "gate_streams": ops::gated_streams::gate,
    "inject_ngrams": ops::gated_streams::inject,
    "scale_by_rms": ops::streams::scale,
    "gate_sparsely": ops::streams::gate,
    "add": ops::scale::add,
    "scale": ops::scale::run,
    "gate": ops::recurrent::gate,
    "short_conv": ops::recurrent::short_conv,
    "recur": ops::recurrent::recur,
    "shift_tokens": ops::rwkv::shift_tokens,
    "wkv7": ops::rwkv::wkv7,
    "no_rows": ops::no_rows::run,
    "rope": ops::rope::run,
    "top_k": ops::top_k::run,
    "kv_append": ops::kv_append::run,
    "kv_append_heads": ops::kv_append::heads,
    "kv_append_chunks": ops::kv_append::chunks,
    "rope_append": ops::rope_append::run,
    "attend_types": ops::attend::types,
    "attend_heads": ops::attend::heads,
    "attend_steps": ops::attend::steps,
    "attend_capped": ops::attend::capped,
    "attend_sinks": ops::attend::sinks,
    "attend_shared_kv": ops::attend::shared_kv,
    "select_tokens": ops::selected::select,
    "attend_selected": ops::selected::attend,
    "pool_tokens": ops::pooled::pool,
    "select_pooled": ops::pooled::select,
    "attend_pooled": ops::pooled::attend,
    "attend_all": ops::attend_all::run,
    "attend_batch_invariance": ops::batch_invariance::run,
    "attend_sizes": ops::extremes::sizes,
    "attend_clipped": ops::extremes::clipped,
    "attend_bad_queries": ops::extremes::bad_queries,
    "attend_forgotten": ops::extremes::forgotten,
    "attend_stages": ops::extremes::stages,
}
