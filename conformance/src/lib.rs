//! One suite per op of a device, written once for any [`Backend`]: every device is held to the same slow arithmetic.
//!
//! | module | what it is |
//! |---|---|
//! | [`judge`] | compares what a device gave with what it should have given; NaN never passes |
//! | [`mod@reference`] | every op in plain loops and f64, from its equation |
//! | [`kv`] | caches of every shape, what they must hold, and what a device may lose when it attends |
//! | [`weights`] | matrices of every weight type, and what a device may lose on each |
//! | `ops` | one suite per op: edge sizes, poisoned outputs, refusals |
//!
//! A device becomes a [`Subject`] and is held to all of [`suites`]. `tests/conformance/devices.rs` lists those that need nothing but
//! this machine; a device whose emulator lives in its own tests runs the same suites from there, as `crates/cuda` does.
//!
//! A device need not have every shape of cache, and an interpreter need not try every combination of sizes ([`Coverage`]): what it
//! refuses with [`BackendError::Unsupported`](kvant_backend::BackendError), what it does not promise and what it is not asked for
//! is in the [`Lacks`] that a suite gives back, and whoever runs it tells that on a line `skipped: ..`.
#![forbid(unsafe_code)]

pub mod judge;
pub mod kv;
mod lacks;
mod ops;
pub mod reference;
mod subject;
pub mod weights;

use kvant_backend::Backend;

pub use lacks::Lacks;
pub use subject::{Arithmetic, Attention, Coverage, Subject};

/// Everything one op has to hold.
pub struct Suite<B: Backend> {
    /// The op, as [`Backend`] calls it, or a part of what it has to hold, or what several ops have in common.
    pub op: &'static str,
    /// Runs it; panics with device, case, place and both values where the device is wrong. Gives what the device lacks.
    pub run: fn(&Subject<B>) -> Lacks,
}

/// Names and suites from one list, so that they cannot differ.
macro_rules! list {
    ($($op:literal: $run:expr,)*) => {
        /// One suite for each op that every device has.
        pub fn suites<B: Backend>() -> Vec<Suite<B>> {
            vec![$(Suite { op: $op, run: |subject| $run(subject).into() }),*]
        }

        /// The ops of [`suites`], for devices that this machine lacks.
        pub const OPS: &[&str] = &[$($op),*];
    };
}

list! {
    "buffers": ops::buffers::run,
    "matrix": ops::matrix::run,
    "embed": ops::embed::run,
    "project": ops::project::run,
    "gated_ffn": ops::gated_ffn::run,
    "expert_ffn": ops::expert_ffn::run,
    "expert_ffn_types": ops::expert_ffn::types,
    "project_each": ops::project_each::run,
    "copy_columns": ops::project_each::columns,
    "gate_rows": ops::gate_rows::run,
    "add_normed": ops::add_normed::run,
    "layer_norm": ops::layer_norm::run,
    "soft_cap": ops::soft_cap::run,
    "scale": ops::scale::run,
    "gate": ops::recurrent::gate,
    "short_conv": ops::recurrent::short_conv,
    "recur": ops::recurrent::recur,
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
    "attend_joint": ops::attend::joint,
    "attend_company": ops::company::run,
    "attend_sizes": ops::extremes::sizes,
    "attend_clipped": ops::extremes::clipped,
    "attend_bad_queries": ops::extremes::bad_queries,
    "attend_forgotten": ops::extremes::forgotten,
    "attend_stages": ops::extremes::stages,
}
