//! `kvant.Session` and `kvant.KvUse`.

use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

use kvant::CancelFlag;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyModule};

use crate::answer::{Answer, Answers};
use crate::error::{KvantError, to_py_err};
use crate::generation::Generation;
use crate::options::{Function, Keywords};
use crate::prompt::{Prompt, TurnPrompt};

/// A conversation: tokens and their KV cache.
#[pyclass(frozen, module = "kvant")]
pub(crate) struct Session {
    shared: Mutex<SharedSession>,
    /// The thread that holds the lock.
    holder: Mutex<Option<ThreadId>>,
}

/// A session and its use counter: a generation can continue while the counter is unchanged.
pub(crate) struct SharedSession {
    session: kvant::Session,
    turn: u64,
}

impl SharedSession {
    /// Returns the session for the next token of the generation that began with `turn`.
    pub(crate) fn of(&mut self, turn: u64) -> PyResult<&mut kvant::Session> {
        if self.turn != turn {
            return Err(KvantError::new_err(
                "the session was used for something else: start a new generation",
            ));
        }
        Ok(&mut self.session)
    }

    /// Returns the session for a new use, which ends earlier generations.
    fn begin_use(&mut self) -> &mut kvant::Session {
        self.turn += 1;
        &mut self.session
    }
}

impl Session {
    pub(crate) fn new(session: kvant::Session) -> Self {
        Self { shared: Mutex::new(SharedSession { session, turn: 0 }), holder: Mutex::default() }
    }

    /// Locks the session; the caller must have released the interpreter. A signal handler that runs
    /// within a call on the same thread would deadlock, so it gets an error.
    pub(crate) fn lock(&self) -> PyResult<SessionGuard<'_>> {
        let this_thread = thread::current().id();
        if *self.holder() == Some(this_thread) {
            return Err(KvantError::new_err(
                "the session is in use on this thread: a signal handler cannot use it",
            ));
        }
        let broken = |_| KvantError::new_err("an internal error of Kvant has broken this session");
        let shared = self.shared.lock().map_err(broken)?;
        *self.holder() = Some(this_thread);
        Ok(SessionGuard { session: self, shared })
    }

    fn holder(&self) -> MutexGuard<'_, Option<ThreadId>> {
        self.holder.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `work` on the session while other Python threads run.
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut SharedSession) -> PyResult<T> + Send,
    ) -> PyResult<T> {
        py.detach(|| work(&mut *self.lock()?))
    }
}

/// A locked session.
pub(crate) struct SessionGuard<'s> {
    session: &'s Session,
    shared: MutexGuard<'s, SharedSession>,
}

impl Deref for SessionGuard<'_> {
    type Target = SharedSession;

    fn deref(&self) -> &SharedSession {
        &self.shared
    }
}

impl DerefMut for SessionGuard<'_> {
    fn deref_mut(&mut self) -> &mut SharedSession {
        &mut self.shared
    }
}

impl Drop for SessionGuard<'_> {
    fn drop(&mut self) {
        *self.session.holder() = None;
    }
}

/// Runs `work`, which calls back regularly; a signal such as Ctrl-C cancels it.
fn until_signal<T>(
    work: impl FnOnce(&CancelFlag, &mut dyn FnMut()) -> Result<T, kvant::Error>,
) -> PyResult<T> {
    let (cancel, mut signal) = (CancelFlag::default(), None);
    let done = work(&cancel, &mut || {
        if let Err(error) = Python::attach(|py| py.check_signals()) {
            signal = Some(error);
            cancel.cancel();
        }
    });
    match signal {
        Some(error) => Err(error),
        None => done.map_err(to_py_err),
    }
}

#[pymethods]
impl Session {
    #[pyo3(
        signature = (prompt, **keywords),
        text_signature = "($self, prompt, *, max_tokens=None, temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, repeat_penalty=1.0, repeat_last_n=64, seed=0, ignore_eos=False, stop=None, logit_bias=None, format=None)"
    )]
    fn generate(
        slf: &Bound<'_, Self>,
        prompt: Prompt,
        keywords: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Generation> {
        let options = Keywords::read(Function::Generate, keywords)?.generate;
        let (generation, turn) = slf.get().with(slf.py(), |shared| {
            let session = shared.begin_use();
            let tokens = prompt.tokens(session.model())?;
            let generation = until_signal(|cancel, check_signals| {
                session.begin(&tokens, options, cancel, &mut |_| check_signals())
            })?;
            Ok((generation, shared.turn))
        })?;
        Ok(Generation::new(slf.clone().unbind(), generation, turn))
    }

    #[pyo3(
        signature = (prompt, **keywords),
        text_signature = "($self, prompt, *, tools=None, tool_choice='auto', parallel_tool_calls=None, enable_thinking=None, reasoning_effort=None, reasoning_budget=None, **generate)"
    )]
    fn chat(
        slf: &Bound<'_, Self>,
        prompt: TurnPrompt,
        keywords: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Answer> {
        let Keywords { generate, turn } = Keywords::read(Function::Chat, keywords)?;
        let (answer, number) = slf.get().with(slf.py(), |shared| {
            let session = shared.begin_use();
            let turn = prompt.turn(session.model(), turn)?;
            let answer = until_signal(|cancel, check_signals| {
                session.begin_answer(&turn, generate, cancel, &mut |_| check_signals())
            })?;
            Ok((answer, shared.turn))
        })?;
        Ok(Answer::new(slf.clone().unbind(), answer, number))
    }

    #[pyo3(
        signature = (prompt, n, **keywords),
        text_signature = "($self, prompt, n, *, tools=None, tool_choice='auto', parallel_tool_calls=None, enable_thinking=None, reasoning_effort=None, reasoning_budget=None, **generate)"
    )]
    fn answers(
        &self,
        py: Python<'_>,
        prompt: TurnPrompt,
        n: usize,
        keywords: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Answers> {
        let Keywords { generate, turn } = Keywords::read(Function::Answers, keywords)?;
        let answers = self.with(py, |shared| {
            let session = shared.begin_use();
            let turn = prompt.turn(session.model(), turn)?;
            until_signal(|cancel, check_signals| {
                session.answers(&turn, n, generate, cancel, &mut |_| check_signals())
            })
        })?;
        Ok(Answers::new(answers, n))
    }

    fn feed(&self, py: Python<'_>, prompt: Prompt) -> PyResult<()> {
        self.with(py, |shared| {
            let session = shared.begin_use();
            let tokens = prompt.tokens(session.model())?;
            until_signal(|cancel, check_signals| {
                session.feed(&tokens, &mut |_| {
                    check_signals();
                    !cancel.is_cancelled()
                })
            })
        })
    }

    fn logits<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let bytes: Vec<u8> = self.with(py, |shared| {
            let logits = shared.session.logits().map_err(to_py_err)?;
            Ok(logits.iter().flat_map(|logit| logit.to_ne_bytes()).collect())
        })?;
        PyModule::import(py, "array")?.getattr("array")?.call1(("f", PyBytes::new(py, &bytes)))
    }

    fn rewind(&self, py: Python<'_>, n_tokens: usize) -> PyResult<()> {
        self.with(py, |shared| shared.begin_use().rewind(n_tokens).map_err(to_py_err))
    }

    fn fork(&self, py: Python<'_>) -> PyResult<Self> {
        self.with(py, |shared| Ok(Self::new(shared.session.fork())))
    }

    #[getter]
    fn tokens(&self, py: Python<'_>) -> PyResult<Vec<u32>> {
        self.with(py, |shared| Ok(shared.session.tokens().to_vec()))
    }

    #[getter]
    fn n_ctx(&self, py: Python<'_>) -> PyResult<usize> {
        self.with(py, |shared| Ok(shared.session.n_ctx()))
    }

    #[getter]
    fn kv(&self, py: Python<'_>) -> PyResult<KvUse> {
        self.with(py, |shared| Ok(KvUse::from(shared.session.kv())))
    }
}

/// Measured size of a KV cache.
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
        let kvant::KvUse { tokens, bytes, bytes_f16, type_k, type_v, bpv_k, bpv_v, notes, .. } = kv;
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
