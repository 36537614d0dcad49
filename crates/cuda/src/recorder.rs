//! The queue of a device: a CUDA stream whose work is either launched directly or recorded into
//! CUDA graphs.
//!
//! A decode step launches some three hundred small kernels. Launched one by one, each leaves a gap
//! on the device; recorded, they follow one another. Every step is recorded anew, as its parameters
//! differ, which takes the host as long as launches would: so it is divided into pieces, each of
//! which runs while the next is recorded. The executable graph of the same piece of an earlier step
//! takes over the parameters (`cuGraphExecUpdate`) if its nodes are of the same kinds; else one is
//! instantiated, which takes many times as long. A few are kept of each piece: a step in which some
//! sequence begins a block has further nodes, and of 64 sequences one does in two of five steps.
//!
//! While one thread records, the others wait: otherwise their work would end up in the graph.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

use crate::staging::{Calls, Readback, Staging, Uploads};
use crate::{CudaError, DevicePtr};

/// Calls per piece of a recording: those of some ten layers, which take the device longer than the
/// host. The first piece, for which the device waits, is shorter.
const PIECE: usize = 64;
const FIRST_PIECE: usize = 16;
/// Executable graphs kept of a piece: of steps in which none to three sequences begin a block.
const MAX_GRAPHS: usize = 4;

/// Kinds of nodes of a graph: a node cannot become one of another kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Node {
    /// A kernel that begins after the node before it.
    Kernel,
    /// A kernel that may begin earlier.
    EarlyKernel,
    Copy,
    Zero,
    Write,
}

/// A CUDA stream and, while a thread records, the graph in progress.
pub(crate) struct Recorder<C: Calls> {
    state: Mutex<State<C>>,
    /// Notified when a recording ends.
    ended: Condvar,
    calls: C,
}

struct State<C: Calls> {
    recording: Option<Recording>,
    /// The executable graphs of each piece, the last used first.
    graphs: Vec<Vec<ShapedGraph<C>>>,
    staging: Staging<C>,
    uploads: Uploads<C>,
    /// Those that no read uses now.
    readbacks: Vec<Readback<C>>,
}

struct Recording {
    thread: ThreadId,
    /// Queued pieces.
    pieces: usize,
    /// Calls of the current piece.
    calls: usize,
    /// Hash of their kinds.
    shape: u64,
    /// Memory that recorded work may still use: freed once it has run.
    freed: Vec<DevicePtr>,
}

/// An executable graph, and the hash of the kinds of its nodes.
struct ShapedGraph<C: Calls> {
    shape: u64,
    runnable: C::Runnable,
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
        let (graphs, readbacks) = (Vec::new(), Vec::new());
        let state = State { recording: None, graphs, staging, uploads, readbacks };
        Self { state: Mutex::new(state), ended: Condvar::new(), calls }
    }

    /// Returns the right to queue `node`. Waits until no other thread records.
    pub fn queue(&self, node: Node) -> Result<Queue<'_, C>, CudaError> {
        let mut queue = self.lock()?;
        queue.state.count(&self.calls, node)?;
        Ok(queue)
    }

    fn lock(&self) -> Result<Queue<'_, C>, CudaError> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let me = thread::current().id();
        while state.recording.as_ref().is_some_and(|recording| recording.thread != me) {
            state = self.ended.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        // The thread that records did so when it began.
        if state.recording.is_none() {
            self.calls.bind()?;
        }
        Ok(Queue { calls: &self.calls, state })
    }

    pub fn write(&self, dst: DevicePtr, src: &[u8]) -> Result<(), CudaError> {
        let mut queue = self.queue(Node::Write)?;
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
        let mut queue = self.lock()?;
        queue.check_not_recording("upload")?;
        queue.state.uploads.copy(queue.calls, dst, n_bytes, unit, fill)
    }

    pub fn read(&self, src: DevicePtr, dst: &mut [u8]) -> Result<(), CudaError> {
        let mut queue = self.lock()?;
        queue.check_not_recording("read")?;
        if dst.len() > Readback::<C>::MAX_BYTES {
            // SAFETY: `dst` is live and exclusive until the stream has been waited for below.
            unsafe { queue.calls.read(src, dst) }?;
            return queue.wait();
        }
        let mut readback = match queue.state.readbacks.pop() {
            Some(readback) => readback,
            None => Readback::new(queue.calls)?,
        };
        readback.queue(queue.calls, src, dst.len())?;
        // Other threads may queue or record meanwhile.
        drop(queue);
        readback.take(&self.calls, dst)?;
        self.state.lock().unwrap_or_else(PoisonError::into_inner).readbacks.push(readback);
        Ok(())
    }

    /// Waits for the queued work.
    pub fn finish(&self) -> Result<(), CudaError> {
        self.lock()?.wait()
    }

    /// Returns an event at the end of the queued work, for another stream to wait for.
    pub fn reached(&self) -> Result<C::Event, CudaError> {
        let queue = self.lock()?;
        queue.check_not_recording("reached")?;
        let reached = queue.calls.event()?;
        queue.calls.record(&reached)?;
        Ok(reached)
    }

    /// Lets work that is queued later wait for an event of another stream.
    pub fn wait_for(&self, event: &C::Event) -> Result<(), CudaError> {
        let queue = self.lock()?;
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
        self.lock()?.calls.record(&started)?;
        ops()?;
        self.lock()?.calls.record(&ended)?;
        self.calls.wait(&ended)?;
        self.calls.seconds(&started, &ended)
    }

    /// Starts to record the work that this thread queues.
    pub fn begin(&self) -> Result<(), CudaError> {
        let mut queue = self.lock()?;
        queue.check_not_recording("begin")?;
        if queue.state.staging.is_used() {
            // The last recording may still read it.
            queue.calls.synchronize()?;
            queue.state.staging.clear();
        }
        queue.calls.begin()?;
        let thread = thread::current().id();
        let recording = Recording { thread, pieces: 0, calls: 0, shape: 0, freed: Vec::new() };
        queue.state.recording = Some(recording);
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
        let Recording { pieces, shape, .. } = recording;
        let result = ended.and_then(|graph| queue.state.run(queue.calls, pieces, shape, &graph));
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
    fn count(&mut self, calls: &C, node: Node) -> Result<(), CudaError> {
        let Some(recording) = &mut self.recording else { return Ok(()) };
        let max_calls = if recording.pieces == 0 { FIRST_PIECE } else { PIECE };
        let is_full = recording.calls == max_calls;
        let (piece, shape) = (recording.pieces, recording.shape);
        if is_full {
            (recording.pieces, recording.calls, recording.shape) = (piece + 1, 0, 0);
        }
        recording.calls += 1;
        // FNV-1a.
        recording.shape = (recording.shape ^ (node as u64 + 1)).wrapping_mul(0x100_0000_01b3);
        if !is_full {
            return Ok(());
        }
        let graph = calls.end()?;
        self.run(calls, piece, shape, &graph)?;
        calls.begin()
    }

    /// Queues `graph`, piece `piece` of a step, whose nodes have the kinds of `shape`.
    fn run(&mut self, calls: &C, piece: usize, shape: u64, graph: &C::Graph) -> Result<(), CudaError> {
        if self.graphs.len() == piece {
            self.graphs.push(Vec::new());
        }
        let graphs = &mut self.graphs[piece];
        let known = graphs.iter().position(|graph| graph.shape == shape).map(|index| graphs.remove(index));
        let updated = match known {
            Some(mut known) => calls.update(&mut known.runnable, graph)?.then_some(known),
            None => None,
        };
        let graph = match updated {
            Some(known) => known,
            None => {
                // The oldest is dropped first, so that its memory can be reused.
                graphs.truncate(MAX_GRAPHS - 1);
                ShapedGraph { shape, runnable: calls.make(graph)? }
            }
        };
        graphs.insert(0, graph);
        calls.run(&graphs[0].runnable)
    }
}

#[cfg(test)]
mod tests;
