//! `kvant.Session` and `kvant.KvUse`.

use std::sync::{Mutex, MutexGuard};

use kvant::{CancelFlag, Continuation, GenerateOptions, SamplerParams};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyModule};

use crate::generation::Generation;
use crate::prompt::Prompt;
use crate::{KvantError, refused};

/// A conversation: tokens and their KV cache.
#[pyclass(frozen, module = "kvant")]
pub(crate) struct Session(Mutex<Turns>);

/// A session, and whose turn it is: a generation goes on while nobody else has used the session.
pub(crate) struct Turns {
    session: kvant::Session,
    turn: u64,
}

impl Turns {
    /// The session for the next token of the generation that began with `turn`.
    pub(crate) fn of(&mut self, turn: u64) -> PyResult<&mut kvant::Session> {
        if self.turn != turn {
            return Err(KvantError::new_err("the session was used for something else: generate anew"));
        }
        Ok(&mut self.session)
    }

    /// The session for something new.
    fn anew(&mut self) -> &mut kvant::Session {
        self.turn += 1;
        &mut self.session
    }
}

impl Session {
    pub(crate) fn new(session: kvant::Session) -> Self {
        Self(Mutex::new(Turns { session, turn: 0 }))
    }

    /// The session, once no other thread of Python uses it; to be waited for with the interpreter let go.
    pub(crate) fn lock(&self) -> PyResult<MutexGuard<'_, Turns>> {
        self.0.lock().map_err(|_| KvantError::new_err("a fault of Kvant has broken this session"))
    }

    /// Does something with the session while other threads of Python run.
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut Turns) -> PyResult<T> + Send,
    ) -> PyResult<T> {
        py.detach(|| work(&mut *self.lock()?))
    }
}

/// Reads a prompt; a signal stops it, as Ctrl-C does.
fn begin(session: &mut kvant::Session, prompt: &[u32], options: GenerateOptions) -> PyResult<Continuation> {
    let (cancel, mut signal) = (CancelFlag::default(), None);
    let begun = session.begin(prompt, options, &cancel, &mut |_| {
        if let Err(error) = Python::attach(|py| py.check_signals()) {
            signal = Some(error);
            cancel.cancel();
        }
    });
    match signal {
        Some(error) => Err(error),
        None => begun.map_err(refused),
    }
}

#[pymethods]
impl Session {
    #[pyo3(signature = (
        prompt, *, max_tokens = None, temperature = 0.8, top_k = 40, top_p = 0.95, min_p = 0.05, repeat_penalty = 1.0,
        repeat_last_n = 64, seed = 0, ignore_eos = false
    ))]
    #[expect(clippy::too_many_arguments, reason = "they are named where they are written")]
    fn generate(
        slf: &Bound<'_, Self>,
        prompt: Prompt,
        max_tokens: Option<usize>,
        temperature: f32,
        top_k: usize,
        top_p: f32,
        min_p: f32,
        repeat_penalty: f32,
        repeat_last_n: usize,
        seed: u64,
        ignore_eos: bool,
    ) -> PyResult<Generation> {
        let sampler = SamplerParams { temperature, top_k, top_p, min_p, repeat_penalty, repeat_last_n, seed };
        let options = GenerateOptions { max_tokens, sampler, ignore_eos };
        let (course, turn) = slf.get().with(slf.py(), |turns| {
            let session = turns.anew();
            let tokens = prompt.tokens(session.model())?;
            Ok((begin(session, &tokens, options)?, turns.turn))
        })?;
        Ok(Generation::new(slf.clone().unbind(), course, turn))
    }

    fn feed(&self, py: Python<'_>, prompt: Prompt) -> PyResult<()> {
        self.with(py, |turns| {
            let session = turns.anew();
            let tokens = prompt.tokens(session.model())?;
            session.feed(&tokens, &mut |_| true).map_err(refused)
        })
    }

    fn logits<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let bytes: Vec<u8> = self.with(py, |turns| {
            let logits = turns.session.logits().map_err(refused)?;
            Ok(logits.iter().flat_map(|logit| logit.to_ne_bytes()).collect())
        })?;
        PyModule::import(py, "array")?.getattr("array")?.call1(("f", PyBytes::new(py, &bytes)))
    }

    fn rewind(&self, py: Python<'_>, n_tokens: usize) -> PyResult<()> {
        self.with(py, |turns| turns.anew().rewind(n_tokens).map_err(refused))
    }

    fn fork(&self, py: Python<'_>) -> PyResult<Self> {
        self.with(py, |turns| Ok(Self::new(turns.session.fork())))
    }

    #[getter]
    fn tokens(&self, py: Python<'_>) -> PyResult<Vec<u32>> {
        self.with(py, |turns| Ok(turns.session.tokens().to_vec()))
    }

    #[getter]
    fn n_ctx(&self, py: Python<'_>) -> PyResult<usize> {
        self.with(py, |turns| Ok(turns.session.n_ctx()))
    }

    #[getter]
    fn kv(&self, py: Python<'_>) -> PyResult<KvUse> {
        self.with(py, |turns| Ok(KvUse::from(turns.session.kv())))
    }
}

/// What a cache takes, measured.
#[pyclass(frozen, get_all, module = "kvant")]
pub(crate) struct KvUse {
    tokens: usize,
    bytes: usize,
    bytes_f16: usize,
    type_k: &'static str,
    type_v: &'static str,
    bpv_k: f64,
    bpv_v: f64,
    notes: Vec<String>,
}

impl From<kvant::KvUse> for KvUse {
    fn from(kv: kvant::KvUse) -> Self {
        let kvant::KvUse { tokens, bytes, bytes_f16, type_k, type_v, bpv_k, bpv_v, notes } = kv;
        Self { tokens, bytes, bytes_f16, type_k, type_v, bpv_k, bpv_v, notes }
    }
}

#[pymethods]
impl KvUse {
    fn __repr__(&self) -> String {
        let Self { tokens, bytes, bytes_f16, type_k, type_v, .. } = self;
        format!("<{tokens} tokens as {type_k}/{type_v}: {bytes} bytes, f16 {bytes_f16}>")
    }
}
