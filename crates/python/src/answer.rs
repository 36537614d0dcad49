//! `kvant.Answer` and `kvant.Answers`.

use std::sync::{Mutex, MutexGuard, PoisonError};

use kvant::{AnswerState, FinishReason, GenerationStats, ParsedAnswer, Part};
use pyo3::prelude::*;

use crate::async_iteration;
use crate::error::to_py_err;
use crate::session::Session;

/// Kind and text of a part.
type PartTuple = (&'static str, String);

fn part_tuple(part: Part) -> PartTuple {
    match part {
        Part::Text(text) => ("text", text),
        Part::Reasoning(text) => ("reasoning", text),
        Part::Call(name) => ("call", name),
        Part::Arguments(text) => ("arguments", text),
    }
}

/// Returns the message of an answer as a dict.
fn message<'py>(py: Python<'py>, parsed: &ParsedAnswer) -> PyResult<Bound<'py, PyAny>> {
    py.import("json")?.call_method1("loads", (parsed.message().to_string(),))
}

/// Iterator over the parts of an answer.
#[pyclass(frozen, module = "kvant")]
pub(crate) struct Answer {
    session: Py<Session>,
    state: Mutex<(AnswerState, ParsedAnswer)>,
    turn: u64,
}

impl Answer {
    pub(crate) fn new(session: Py<Session>, state: AnswerState, turn: u64) -> Self {
        Self { session, state: Mutex::new((state, ParsedAnswer::default())), turn }
    }

    fn state(&self) -> MutexGuard<'_, (AnswerState, ParsedAnswer)> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stats(&self, py: Python<'_>) -> GenerationStats {
        py.detach(|| self.state().0.stats())
    }
}

#[pymethods]
impl Answer {
    fn __iter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    fn __aiter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    fn __anext__(slf: Bound<'_, Self>) -> PyResult<Bound<'_, PyAny>> {
        async_iteration::next(slf.py(), &slf)
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<PartTuple>> {
        let session = self.session.get();
        py.detach(|| {
            let (state, parsed) = &mut *self.state();
            let part = state.next(session.lock()?.of(self.turn)?).transpose().map_err(to_py_err)?;
            parsed.extend(part.clone());
            Ok(part.map(part_tuple))
        })
    }

    #[getter]
    fn message<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let parsed = py.detach(|| self.state().1.clone());
        message(py, &parsed)
    }

    #[getter]
    fn warnings(&self, py: Python<'_>) -> Vec<String> {
        py.detach(|| self.state().0.warnings().to_vec())
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
}

/// Iterator over the parts of several answers to one prompt.
#[pyclass(frozen, module = "kvant")]
pub(crate) struct Answers(Mutex<(kvant::Answers, Vec<ParsedAnswer>)>);

impl Answers {
    pub(crate) fn new(answers: kvant::Answers, n: usize) -> Self {
        Self(Mutex::new((answers, vec![ParsedAnswer::default(); n])))
    }

    fn state(&self) -> MutexGuard<'_, (kvant::Answers, Vec<ParsedAnswer>)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl Answers {
    fn __iter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    fn __aiter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    fn __anext__(slf: Bound<'_, Self>) -> PyResult<Bound<'_, PyAny>> {
        async_iteration::next(slf.py(), &slf)
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<(usize, &'static str, String)>> {
        py.detach(|| {
            let (answers, parsed) = &mut *self.state();
            let Some((index, part)) = answers.next().transpose().map_err(to_py_err)? else { return Ok(None) };
            parsed[index].extend([part.clone()]);
            let (kind, text) = part_tuple(part);
            Ok(Some((index, kind, text)))
        })
    }

    #[getter]
    fn messages<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let parsed = py.detach(|| self.state().1.clone());
        parsed.iter().map(|parsed| message(py, parsed)).collect()
    }
}
