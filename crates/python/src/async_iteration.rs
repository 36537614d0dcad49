//! `async for` over the iterators of the module.

use std::ffi::CString;

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

/// Returns an awaitable of the next item of `iterator`, which a thread of asyncio's pool computes,
/// so that the event loop stays responsive.
pub(crate) fn next<'py>(py: Python<'py>, iterator: impl IntoPyObject<'py>) -> PyResult<Bound<'py, PyAny>> {
    static STEP: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let step = STEP.get_or_try_init(py, || {
        let code = CString::new(include_str!("async_iteration.py"))?;
        let module = PyModule::from_code(py, &code, c"async_iteration.py", c"kvant.async_iteration")?;
        PyResult::Ok(module.getattr("step")?.unbind())
    })?;
    step.bind(py).call1((iterator,))
}
