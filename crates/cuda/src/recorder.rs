//! The queue of a device: a CUDA stream whose work is either launched directly or recorded into
//! CUDA graphs.
//!
//! A decode step launches some three hundred small kernels. Launched one by one, each leaves a gap
//! on the device; recorded, they follow one another. Every step is recorded anew, as its parameters
//! differ, which takes the host as long as launches would: so it is divided into pieces, each of
//! which runs while the next is recorded. The executable graph of the same piece of the previous
//! step takes over the parameters (`cuGraphExecUpdate`); where the kernels themselves differ, a new
//! one is instantiated.
//!
//! While one thread records, the others wait: otherwise their work would end up in the graph.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

use crate::staging::{Calls, Staging, Uploads};
use crate::{CudaError, DevicePtr};

/// Calls per piece of a recording: those of some ten layers, which take the device longer than the
/// host. The first piece, for which the device waits, is shorter.
const PIECE: usize = 64;
const FIRST_PIECE: usize = 16;

/// A CUDA stream and, while a thread records, the graph in progress.
pub(crate) struct Recorder<C: Calls> {
    state: Mutex<State<C>>,
    /// Notified when a recording ends.
    ended: Condvar,
    calls: C,
}

struct State<C: Calls> {
    recording: Option<Recording>,
    /// The executable graphs of the last step, by piece.
    runnables: Vec<C::Runnable>,
    staging: Staging<C>,
    uploads: Uploads<C>,
}

struct Recording {
    thread: ThreadId,
    /// Queued pieces.
    pieces: usize,
    /// Calls of the current piece.
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

    /// Waits for the work queued so far.
    fn wait(self) -> Result<(), CudaError> {
        self.check_not_recording("wait")?;
        let (calls, reached) = (self.calls, self.calls.event()?);
        calls.record(&reached)?;
        // Other threads may queue or record meanwhile; a stream in capture mode cannot be waited
        // for.
        drop(self);
        calls.wait(&reached)
    }
}

impl<C: Calls> Recorder<C> {
    /// Creates a queue on the stream of `calls`.
    pub fn new(calls: C) -> Self {
        let (staging, uploads) = (Staging::default(), Uploads::default());
        let state = State { recording: None, runnables: Vec::new(), staging, uploads };
        Self { state: Mutex::new(state), ended: Condvar::new(), calls }
    }

    /// Returns the right to queue one more call. Waits until no other thread records.
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
            // A recorded copy runs later, so it reads from staging memory that does not change
            // until then.
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

    /// Waits for the queued work.
    pub fn finish(&self) -> Result<(), CudaError> {
        self.queue()?.wait()
    }

    /// Returns an event at the end of the queued work, for another stream to wait for.
    pub fn reached(&self) -> Result<C::Event, CudaError> {
        let queue = self.queue()?;
        queue.check_not_recording("reached")?;
        let reached = queue.calls.event()?;
        queue.calls.record(&reached)?;
        Ok(reached)
    }

    /// Lets work that is queued later wait for an event of another stream.
    pub fn wait_for(&self, event: &C::Event) -> Result<(), CudaError> {
        let queue = self.queue()?;
        queue.check_not_recording("wait_for")?;
        queue.calls.wait_for(event)
    }

    pub fn free(&self, ptr: DevicePtr) {
        // A failure cannot be handled: it means that the context is lost, and its memory with it.
        let Ok(mut queue) = self.lock() else { return };
        match &mut queue.state.recording {
            Some(recording) => recording.freed.push(ptr),
            None => queue.calls.free(ptr),
        }
    }

    /// Queues the work of `ops`, waits for it and returns the seconds on the device clock.
    pub fn timed(&self, ops: &mut dyn FnMut() -> Result<(), CudaError>) -> Result<f64, CudaError> {
        self.calls.bind()?;
        let (started, ended) = (self.calls.event()?, self.calls.event()?);
        self.queue()?.calls.record(&started)?;
        ops()?;
        self.queue()?.calls.record(&ended)?;
        self.calls.wait(&ended)?;
        self.calls.seconds(&started, &ended)
    }

    /// Starts to record the work that this thread queues.
    pub fn begin(&self) -> Result<(), CudaError> {
        let mut queue = self.queue()?;
        queue.check_not_recording("begin")?;
        if queue.state.staging.is_used() {
            // The last recording may still read it.
            queue.calls.synchronize()?;
            queue.state.staging.clear();
        }
        queue.calls.begin()?;
        let thread = thread::current().id();
        queue.state.recording = Some(Recording { thread, pieces: 0, calls: 0, freed: Vec::new() });
        Ok(())
    }

    /// Ends the recording and queues its remainder, also after a failed step: the caller relies on
    /// recorded work (addresses on the device, zeroed slabs) as on queued work.
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
        // The device may still use the memory of the state.
        let _ = self.calls.synchronize();
    }
}

impl<C: Calls> State<C> {
    /// Counts a call, and begins a new piece when the current one is full.
    fn count(&mut self, calls: &C) -> Result<(), CudaError> {
        let Some(recording) = &mut self.recording else { return Ok(()) };
        recording.calls += 1;
        let max_calls = if recording.pieces == 0 { FIRST_PIECE } else { PIECE };
        if recording.calls <= max_calls {
            return Ok(());
        }
        let piece = recording.pieces;
        (recording.pieces, recording.calls) = (piece + 1, 1);
        let graph = calls.end()?;
        self.run(calls, piece, &graph)?;
        calls.begin()
    }

    /// Queues `graph`, piece `piece` of a step.
    fn run(&mut self, calls: &C, piece: usize, graph: &C::Graph) -> Result<(), CudaError> {
        let is_updated = match self.runnables.get_mut(piece) {
            Some(runnable) => calls.update(runnable, graph)?,
            None => false,
        };
        if !is_updated {
            // The first step, or other kernels than in the last one from this piece on. The old
            // graphs are dropped first, so that their memory can be reused.
            self.runnables.truncate(piece);
            self.runnables.push(calls.make(graph)?);
        }
        calls.run(&self.runnables[piece])
    }
}

#[cfg(test)]
mod tests;
