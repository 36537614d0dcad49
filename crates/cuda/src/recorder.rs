//! The queue of a device: a stream whose work is either done at once or recorded into graphs.
//!
//! A decode step launches some three hundred small kernels. Launched one by one, each leaves a gap on the device; recorded, they
//! follow one another. Every step is recorded anew, as its parameters differ, which takes the host as long as launches would: so
//! it is cut into pieces, each of which runs while the next is recorded. The executable graph of that piece of the step before
//! takes the parameters over (`cuGraphExecUpdate`); where the kernels themselves differ, a new one is made.
//!
//! While one thread records, the others wait: what they queued would end up in the graph.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

use crate::staging::{Calls, Staging, Uploads};
use crate::{CudaError, DevicePtr};

/// Calls that a piece of a recording has: those of some ten layers, of which the device has more to do than the host. The first, for which
/// it waits, is shorter.
const PIECE: usize = 64;
const FIRST_PIECE: usize = 16;

/// A stream and, while a thread records, the graph in the making.
pub(crate) struct Recorder<C: Calls> {
    state: Mutex<State<C>>,
    /// Told when a recording ends.
    ended: Condvar,
    calls: C,
}

struct State<C: Calls> {
    recording: Option<Recording>,
    /// The graphs of the last step, ready to run, by piece.
    runnables: Vec<C::Runnable>,
    staging: Staging<C>,
    uploads: Uploads<C>,
}

struct Recording {
    thread: ThreadId,
    /// Pieces that are queued.
    pieces: usize,
    /// Of the piece that is recorded.
    calls: usize,
    /// Memory that recorded work may still use: freed once it has run.
    freed: Vec<DevicePtr>,
}

/// The right to queue work, until it is dropped.
pub(crate) struct Queue<'a, C: Calls> {
    pub calls: &'a C,
    state: MutexGuard<'a, State<C>>,
}

impl<C: Calls> Queue<'_, C> {
    fn check_not_recording(&self, call: &str) -> Result<(), CudaError> {
        match self.state.recording {
            None => Ok(()),
            Some(_) => Err(CudaError::call(call, "a step is being recorded")),
        }
    }

    /// Waits for what is queued so far.
    fn wait(self) -> Result<(), CudaError> {
        self.check_not_recording("wait")?;
        let (calls, reached) = (self.calls, self.calls.event()?);
        calls.record(&reached)?;
        // Others may queue work meanwhile, or record; a stream that is being recorded cannot be waited for.
        drop(self);
        calls.wait(&reached)
    }
}

impl<C: Calls> Recorder<C> {
    /// A queue on the stream of `calls`.
    pub fn new(calls: C) -> Self {
        let (staging, uploads) = (Staging::default(), Uploads::default());
        let state = State { recording: None, runnables: Vec::new(), staging, uploads };
        Self { state: Mutex::new(state), ended: Condvar::new(), calls }
    }

    /// The right to queue one more call. Waits until no other thread records.
    pub fn queue(&self) -> Result<Queue<'_, C>, CudaError> {
        let mut queue = self.lock()?;
        queue.state.count(&self.calls)?;
        Ok(queue)
    }

    fn lock(&self) -> Result<Queue<'_, C>, CudaError> {
        self.calls.bind()?;
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let me = thread::current().id();
        while state.recording.as_ref().is_some_and(|recording| recording.thread != me) {
            state = self.ended.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        Ok(Queue { calls: &self.calls, state })
    }

    pub fn write(&self, dst: DevicePtr, src: &[u8]) -> Result<(), CudaError> {
        let mut queue = self.queue()?;
        match queue.state.recording {
            // A recorded copy happens later, so it reads from memory of ours that stays as it is until then.
            Some(_) => queue.state.staging.copy(queue.calls, dst, src),
            None => queue.calls.write(dst, src),
        }
    }

    /// See [`Gpu::upload`](crate::Gpu::upload).
    pub fn upload(
        &self,
        dst: DevicePtr,
        n_bytes: usize,
        unit: usize,
        fill: &mut dyn FnMut(usize, &mut [u8]),
    ) -> Result<(), CudaError> {
        let mut queue = self.queue()?;
        queue.check_not_recording("upload")?;
        queue.state.uploads.copy(queue.calls, dst, n_bytes, unit, fill)
    }

    pub fn read(&self, src: DevicePtr, dst: &mut [u8]) -> Result<(), CudaError> {
        let queue = self.queue()?;
        queue.check_not_recording("read")?;
        // SAFETY: `dst` is live and exclusive until the stream has been waited for below.
        unsafe { queue.calls.read(src, dst) }?;
        queue.wait()
    }

    /// Waits for what is queued.
    pub fn finish(&self) -> Result<(), CudaError> {
        self.queue()?.wait()
    }

    pub fn free(&self, ptr: DevicePtr) {
        // There is nothing to do about a failure: the context is lost then, and its memory with it.
        let Ok(mut queue) = self.lock() else { return };
        match &mut queue.state.recording {
            Some(recording) => recording.freed.push(ptr),
            None => queue.calls.free(ptr),
        }
    }

    /// Queues what `ops` does, waits for it and returns the seconds the device took, by its own clock.
    pub fn timed(&self, ops: &mut dyn FnMut() -> Result<(), CudaError>) -> Result<f64, CudaError> {
        self.calls.bind()?;
        let (started, ended) = (self.calls.event()?, self.calls.event()?);
        self.queue()?.calls.record(&started)?;
        ops()?;
        self.queue()?.calls.record(&ended)?;
        self.calls.wait(&ended)?;
        self.calls.seconds(&started, &ended)
    }

    /// Starts to record what this thread queues.
    pub fn begin(&self) -> Result<(), CudaError> {
        let mut queue = self.queue()?;
        queue.check_not_recording("begin")?;
        if queue.state.staging.is_used() {
            // The last recording may still be reading it.
            queue.calls.synchronize()?;
            queue.state.staging.clear();
        }
        queue.calls.begin()?;
        let thread = thread::current().id();
        queue.state.recording = Some(Recording { thread, pieces: 0, calls: 0, freed: Vec::new() });
        Ok(())
    }

    /// Ends the recording and queues what is left of it, also of a step that failed: whoever recorded counts on what was recorded
    /// (addresses that are on the device, slabs that are zero), as on what is queued without a recording.
    pub fn end(&self) -> Result<(), CudaError> {
        let mut queue = self.lock()?;
        let Some(recording) = queue.state.recording.take() else {
            return Err(CudaError::call("end", "no step is being recorded"));
        };
        let ended = queue.calls.end();
        let result = ended.and_then(|graph| queue.state.run(queue.calls, recording.pieces, &graph));
        recording.freed.into_iter().for_each(|ptr| queue.calls.free(ptr));
        self.ended.notify_all();
        result
    }
}

impl<C: Calls> Drop for Recorder<C> {
    fn drop(&mut self) {
        let _ = self.calls.bind();
        // What the state holds may still be in use by the device.
        let _ = self.calls.synchronize();
    }
}

impl<C: Calls> State<C> {
    /// Counts a call, which begins a new piece where the last one is full.
    fn count(&mut self, calls: &C) -> Result<(), CudaError> {
        let Some(recording) = &mut self.recording else { return Ok(()) };
        recording.calls += 1;
        let most = if recording.pieces == 0 { FIRST_PIECE } else { PIECE };
        if recording.calls <= most {
            return Ok(());
        }
        let piece = recording.pieces;
        (recording.pieces, recording.calls) = (piece + 1, 1);
        let graph = calls.end()?;
        self.run(calls, piece, &graph)?;
        calls.begin()
    }

    /// Queues what `graph` says, piece `piece` of a step.
    fn run(&mut self, calls: &C, piece: usize, graph: &C::Graph) -> Result<(), CudaError> {
        let is_updated = match self.runnables.get_mut(piece) {
            Some(runnable) => calls.update(runnable, graph)?,
            None => false,
        };
        if !is_updated {
            // The first, or other kernels than last time, and so from here on. The old ones go first, so that their memory can be used.
            self.runnables.truncate(piece);
            self.runnables.push(calls.make(graph)?);
        }
        calls.run(&self.runnables[piece])
    }
}

#[cfg(test)]
mod tests;
