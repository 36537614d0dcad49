//! Kvant for Python, as the module `kvant`; `kvant.pyi` tells what it holds.
//!
//! This is a skin: what things do is told by the library [`kvant`]. Other threads of Python run while the engine works.

#![forbid(unsafe_code)]

mod generation;
mod model;
mod prompt;
mod session;

use pyo3::prelude::*;

pyo3::create_exception!(kvant, KvantError, pyo3::exceptions::PyException, "The engine refused.");

/// What Python is told of an error of the engine.
fn refused(error: impl Into<::kvant::Error>) -> PyErr {
    KvantError::new_err(error.into().to_string())
}

#[pymodule(name = "kvant")]
fn kvant_module(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("KvantError", module.py().get_type::<KvantError>())?;
    module.add_class::<model::Model>()?;
    module.add_class::<session::Session>()?;
    module.add_class::<session::KvUse>()?;
    module.add_class::<generation::Generation>()
}
