//! Keeps modules from being loaded while a step is recorded: the driver compiles a module as it
//! loads it, which takes a second and cannot be recorded.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

use crate::{CudaError, Gpu};

/// Who records on a device, and how many threads load.
#[derive(Default)]
pub(crate) struct Turns {
    state: Mutex<State>,
    /// Notified when a recording ends.
    ended: Condvar,
}

#[derive(Default)]
struct State {
    recorder: Option<ThreadId>,
    n_loading: usize,
}

/// A recording in progress, which ends when this is dropped.
pub(crate) struct Recording<'a> {
    turns: &'a Turns,
    gpu: &'a dyn Gpu,
}

/// The right to load modules, until it is dropped.
pub(crate) struct Loading<'a>(&'a Turns);

impl Turns {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until no other thread records.
    fn until_unrecorded<'a>(&'a self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.ended.wait_while(state, |state| state.recorder.is_some()).unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins to record what this thread queues on `gpu`, unless a thread loads a module.
    ///
    /// # Errors
    /// As [`Gpu::begin`].
    pub fn record<'a>(&'a self, gpu: &'a dyn Gpu) -> Result<Option<Recording<'a>>, CudaError> {
        let mut state = self.until_unrecorded(self.lock());
        if state.n_loading > 0 {
            return Ok(None);
        }
        gpu.begin()?;
        state.recorder = Some(thread::current().id());
        Ok(Some(Recording { turns: self, gpu }))
    }

    /// Waits until no other thread records. A recording of this thread ends here: the rest of its
    /// step is queued without one.
    ///
    /// # Errors
    /// As [`Gpu::end`].
    pub fn load(&self, gpu: &dyn Gpu) -> Result<Loading<'_>, CudaError> {
        self.stop(gpu)?;
        let mut state = self.until_unrecorded(self.lock());
        state.n_loading += 1;
        Ok(Loading(self))
    }

    /// Ends the recording of this thread, if it has one.
    fn stop(&self, gpu: &dyn Gpu) -> Result<(), CudaError> {
        let mut state = self.lock();
        if state.recorder != Some(thread::current().id()) {
            return Ok(());
        }
        state.recorder = None;
        self.ended.notify_all();
        gpu.end()
    }
}

impl Recording<'_> {
    /// Ends the recording, unless a load has ended it, and queues its remainder.
    ///
    /// # Errors
    /// As [`Gpu::end`].
    pub fn end(self) -> Result<(), CudaError> {
        self.turns.stop(self.gpu)
    }
}

impl Drop for Recording<'_> {
    fn drop(&mut self) {
        // After `end` there is nothing to stop; else the error that led here takes precedence.
        let _ = self.turns.stop(self.gpu);
    }
}

impl Drop for Loading<'_> {
    fn drop(&mut self) {
        self.0.lock().n_loading -= 1;
    }
}
