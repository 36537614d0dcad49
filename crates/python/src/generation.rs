//! `kvant.Generation`.

use std::sync::{Mutex, MutexGuard, PoisonError};

use kvant::{FinishReason, GenerationState, GenerationStats};
use pyo3::prelude::*;

use crate::async_iteration;
use crate::error::to_py_err;
use crate::session::Session;

/// Iterator over the text that follows a prompt.
#[pyclass(frozen, module = "kvant")]
pub(crate) struct Generation {
    session: Py<Session>,
    state: Mutex<GenerationState>,
    turn: u64,
}

impl Generation {
    pub(crate) fn new(session: Py<Session>, state: GenerationState, turn: u64) -> Self {
        Self { session, state: Mutex::new(state), turn }
    }

    /// Locks the generation's state.
    fn state(&self) -> MutexGuard<'_, GenerationState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stats(&self, py: Python<'_>) -> GenerationStats {
        py.detach(|| self.state().stats())
    }
}

#[pymethods]
impl Generation {
    fn __iter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    fn __aiter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    fn __anext__(slf: Bound<'_, Self>) -> PyResult<Bound<'_, PyAny>> {
        async_iteration::next(slf.py(), &slf)
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<String>> {
        let session = self.session.get();
        py.detach(|| {
            let mut state = self.state();
            if state.stats().finish.is_some() {
                return Ok(None);
            }
            match state.next(session.lock()?.of(self.turn)?) {
                Some(token) => token.map(|token| Some(token.text)).map_err(to_py_err),
                // The bytes of an incomplete last character.
                None => Ok(Some(state.finish_text()).filter(|rest| !rest.is_empty())),
            }
        })
    }

    #[getter]
    fn finish(&self, py: Python<'_>) -> Option<&'static str> {
        self.stats(py).finish.map(FinishReason::name)
    }

    #[getter]
    fn n_prompt(&self, py: Python<'_>) -> usize {
        self.stats(py).n_prompt
    }

    #[getter]
    fn n_gen(&self, py: Python<'_>) -> usize {
        self.stats(py).n_gen
    }

    #[getter]
    fn prompt_tps(&self, py: Python<'_>) -> f64 {
        self.stats(py).prefill_tps()
    }

    #[getter]
    fn decode_tps(&self, py: Python<'_>) -> f64 {
        self.stats(py).decode_tps()
    }
}
