//! `kvant.Generation`.

use kvant::{Continuation, Finish};
use pyo3::prelude::*;

use crate::refused;
use crate::session::Session;

/// The text that follows a prompt, as it becomes complete.
#[pyclass(module = "kvant")]
pub(crate) struct Generation {
    session: Py<Session>,
    course: Continuation,
    turn: u64,
}

impl Generation {
    pub(crate) fn new(session: Py<Session>, course: Continuation, turn: u64) -> Self {
        Self { session, course, turn }
    }
}

#[pymethods]
impl Generation {
    fn __iter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    fn __next__(&mut self, py: Python<'_>) -> PyResult<Option<String>> {
        let Self { session, course, turn } = self;
        if course.stats().finish.is_some() {
            return Ok(None);
        }
        let (session, turn) = (session.get(), *turn);
        py.detach(|| match course.next(session.lock()?.of(turn)?) {
            Some(token) => token.map(|token| Some(token.text)).map_err(refused),
            // What is left of a character that did not become whole.
            None => Ok(Some(course.finish_text()).filter(|rest| !rest.is_empty())),
        })
    }

    #[getter]
    fn finish(&self) -> Option<&'static str> {
        self.course.stats().finish.map(Finish::name)
    }

    #[getter]
    fn n_prompt(&self) -> usize {
        self.course.stats().n_prompt
    }

    #[getter]
    fn n_gen(&self) -> usize {
        self.course.stats().n_gen
    }

    #[getter]
    fn prompt_tps(&self) -> f64 {
        self.course.stats().prompt_tps()
    }

    #[getter]
    fn decode_tps(&self) -> f64 {
        self.course.stats().decode_tps()
    }
}
