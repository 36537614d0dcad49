//! Python bindings of Kvant, the module `kvant`; `kvant.pyi` documents its contents.
//!
//! This is a thin layer; behaviour is documented in the Rust library [`kvant`]. Long
//! calls release the GIL. The command `kvant` is part of it (`command.rs`).

#![forbid(unsafe_code)]

mod answer;
mod async_iteration;
mod command;
mod error;
mod generation;
mod model;
mod options;
mod prompt;
mod session;

use pyo3::prelude::*;

use crate::error::KvantError;

#[pymodule(name = "kvant")]
fn kvant_module(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("KvantError", module.py().get_type::<KvantError>())?;
    module.add_class::<model::Model>()?;
    module.add_class::<session::Session>()?;
    module.add_class::<session::KvUse>()?;
    module.add_class::<generation::Generation>()?;
    module.add_class::<answer::Answer>()?;
    module.add_class::<answer::Answers>()?;
    module.add_function(wrap_pyfunction!(command::run, module)?)
}
