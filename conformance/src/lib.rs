//! One suite per op of a device, written once for any [`Backend`]: every device is held to the same slow arithmetic.
//!
//! | module | what it is |
//! |---|---|
//! | [`judge`] | compares what a device gave with what it should have given; NaN never passes |
//! | [`mod@reference`] | every op in plain loops and f64, from its equation |
//! | [`weights`] | matrices of every weight type, and what a device may lose on each |
//! | `ops` | one suite per op: edge sizes, poisoned outputs, refusals |
//!
//! A device becomes a [`Subject`] and is held to all of [`suites`]. `tests/conformance/devices.rs` lists those that need nothing but
//! this machine; a device whose emulator lives in its own tests runs the same suites from there:
//!
//! ```text
//! let subject = Subject::new("cuda-ptx", device, Arithmetic::EightBit);
//! for suite in suites() { (suite.run)(&subject); }
//! ```
#![forbid(unsafe_code)]

pub mod judge;
mod ops;
pub mod reference;
mod subject;
pub mod weights;

use kvant_backend::Backend;

pub use subject::{Arithmetic, Subject};

/// Everything one op has to hold.
pub struct Suite<B: Backend> {
    /// The op, as [`Backend`] calls it, or what several ops have in common.
    pub op: &'static str,
    /// Runs it; panics with device, case, place and both values where the device is wrong.
    pub run: fn(&Subject<B>),
}

/// One suite for each op that every device has.
pub fn suites<B: Backend>() -> Vec<Suite<B>> {
    vec![
        Suite { op: "buffers", run: ops::buffers::run },
        Suite { op: "matrix", run: ops::matrix::run },
        Suite { op: "embed", run: ops::embed::run },
        Suite { op: "project", run: ops::project::run },
        Suite { op: "gated_ffn", run: ops::gated_ffn::run },
        Suite { op: "no_rows", run: ops::no_rows::run },
        Suite { op: "rope", run: ops::rope::run },
        Suite { op: "top_k", run: ops::top_k::run },
    ]
}

/// The ops of [`suites`], for devices that this machine lacks.
pub const OPS: [&str; 8] = ["buffers", "matrix", "embed", "project", "gated_ffn", "no_rows", "rope", "top_k"];
