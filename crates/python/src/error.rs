//! The exception of the module.

use pyo3::prelude::*;

pyo3::create_exception!(kvant, KvantError, pyo3::exceptions::PyException, "An error of the engine.");

/// Converts an error of the engine to a Python exception.
pub(crate) fn to_py_err(error: impl Into<::kvant::Error>) -> PyErr {
    KvantError::new_err(error.into().to_string())
}
