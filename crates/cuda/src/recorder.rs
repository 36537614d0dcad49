//! The queue of a device: a stream whose work is either done at once or recorded into a graph.
//!
//! A decode step launches some three hundred small kernels. Launched one by one, each costs the host microseconds and
//! the device a gap; recorded, they cost one launch. Every step is recorded anew, as its parameters differ, and the
//! executable graph of the step before takes them over (`cuGraphExecUpdate`); where the kernels themselves differ, a
//! new one is made.
//!
//! While one thread records, the others wait: what they queued would end up in the graph.

use std::mem::MaybeUninit;
use std::ptr;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

use cudarc::driver::sys::{self, CUresult};

use crate::driver::{bind, check};
use crate::event::Event;
use crate::staging::{Staging, Uploads};
use crate::{CudaError, DevicePtr};

/// A stream and, while a thread records, the graph in the making.
pub(crate) struct Recorder {
    context: sys::CUcontext,
    stream: sys::CUstream,
    state: Mutex<State>,
    /// Told when a recording ends.
    ended: Condvar,
}

struct State {
    recording: Option<Recording>,
    /// The graph of the last step, ready to run; null before the first.
    graph: sys::CUgraphExec,
    staging: Staging,
    uploads: Uploads,
}

struct Recording {
    thread: ThreadId,
    /// Memory that recorded work may still use: freed once it has run.
    freed: Vec<DevicePtr>,
}

/// The right to queue work, until it is dropped.
pub(crate) struct Queue<'a> {
    pub stream: sys::CUstream,
    state: MutexGuard<'a, State>,
}

impl Queue<'_> {
    fn check_not_recording(&self, call: &str) -> Result<(), CudaError> {
        match self.state.recording {
            None => Ok(()),
            Some(_) => {
                let (call, problem) = (call.to_owned(), "a step is being recorded".to_owned());
                Err(CudaError::Call { call, problem })
            }
        }
    }

    /// Waits for what is queued so far.
    fn wait(self) -> Result<(), CudaError> {
        self.check_not_recording("wait")?;
        let reached = Event::new()?;
        reached.record(self.stream)?;
        // Others may queue work meanwhile, or record; a stream that is being recorded cannot be waited for.
        drop(self);
        reached.wait()
    }
}

impl Recorder {
    /// A queue on a new stream of `context`.
    pub fn new(context: sys::CUcontext) -> Result<Self, CudaError> {
        bind(context)?;
        let mut stream = ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: `stream` is live; the context is current. Destroyed in `destroy`.
        check("cuStreamCreate", unsafe { sys::cuStreamCreate(&mut stream, flags) })?;
        let state = State {
            recording: None,
            graph: ptr::null_mut(),
            staging: Staging::default(),
            uploads: Uploads::default(),
        };
        Ok(Self { context, stream, state: Mutex::new(state), ended: Condvar::new() })
    }

    /// Waits until no other thread records.
    pub fn queue(&self) -> Result<Queue<'_>, CudaError> {
        bind(self.context)?;
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let me = thread::current().id();
        while state.recording.as_ref().is_some_and(|recording| recording.thread != me) {
            state = self.ended.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        Ok(Queue { stream: self.stream, state })
    }

    pub fn write(&self, dst: DevicePtr, src: &[u8]) -> Result<(), CudaError> {
        let mut queue = self.queue()?;
        let from = match queue.state.recording {
            // A recorded copy happens later, so it reads from memory of ours that stays as it is until then.
            Some(_) => queue.state.staging.put(src)?,
            // From pageable memory the driver has copied `src` when the call returns.
            None => src.as_ptr().cast(),
        };
        // SAFETY: `from` points to `src.len()` bytes, live as argued above; `dst` is the caller's allocation.
        check("cuMemcpyHtoDAsync", unsafe { sys::cuMemcpyHtoDAsync_v2(dst, from, src.len(), queue.stream) })
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
        let stream = queue.stream;
        queue.state.uploads.copy(stream, dst, n_bytes, unit, fill)
    }

    pub fn read(&self, src: DevicePtr, dst: &mut [u8]) -> Result<(), CudaError> {
        let queue = self.queue()?;
        queue.check_not_recording("read")?;
        // SAFETY: `dst` is live and exclusive until the stream is synchronised below; `src` is the caller's allocation.
        check("cuMemcpyDtoHAsync", unsafe {
            sys::cuMemcpyDtoHAsync_v2(dst.as_mut_ptr().cast(), src, dst.len(), queue.stream)
        })?;
        queue.wait()
    }

    /// Waits for what is queued.
    pub fn finish(&self) -> Result<(), CudaError> {
        self.queue()?.wait()
    }

    pub fn free(&self, ptr: DevicePtr) {
        // There is nothing to do about a failure: the context is lost then, and its memory with it.
        let Ok(mut queue) = self.queue() else { return };
        match &mut queue.state.recording {
            Some(recording) => recording.freed.push(ptr),
            None => free_now(ptr),
        }
    }

    /// Queues what `ops` does, waits for it and returns the seconds the device took, by its own clock.
    pub fn timed(&self, ops: &mut dyn FnMut() -> Result<(), CudaError>) -> Result<f64, CudaError> {
        bind(self.context)?;
        let (started, ended) = (Event::new()?, Event::new()?);
        started.record(self.queue()?.stream)?;
        ops()?;
        ended.record(self.queue()?.stream)?;
        ended.wait()?;
        let mut milliseconds = 0.0;
        // SAFETY: both events are live and have been recorded and reached; `milliseconds` is live.
        let status = unsafe { sys::cuEventElapsedTime_v2(&mut milliseconds, started.0, ended.0) };
        check("cuEventElapsedTime", status)?;
        Ok(f64::from(milliseconds) / 1e3)
    }

    /// Starts to record what this thread queues.
    pub fn begin(&self) -> Result<(), CudaError> {
        let mut queue = self.queue()?;
        if queue.state.staging.used() {
            // The last recording may still be reading it.
            self.synchronize()?;
            queue.state.staging.clear();
        }
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream is live and nothing is being captured on it: a recording ends before the next begins.
        check("cuStreamBeginCapture", unsafe { sys::cuStreamBeginCapture_v2(queue.stream, mode) })?;
        queue.state.recording = Some(Recording { thread: thread::current().id(), freed: Vec::new() });
        Ok(())
    }

    /// Ends the recording, and runs it if `run`.
    pub fn end(&self, run: bool) -> Result<(), CudaError> {
        let mut queue = self.queue()?;
        let recording = queue.state.recording.take();
        let mut graph = ptr::null_mut();
        // SAFETY: the stream is live; `graph` too.
        let ended = check("cuStreamEndCapture", unsafe { sys::cuStreamEndCapture(queue.stream, &mut graph) });
        let result = ended.and_then(|()| match run {
            true => queue.state.make_runnable(graph).and_then(|()| {
                // SAFETY: `make_runnable` left a live executable graph; the stream is live.
                check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(queue.state.graph, queue.stream) })
            }),
            false => Ok(()),
        });
        if !graph.is_null() {
            // SAFETY: the graph is ours, and the executable one made from it does not need it.
            let _ = unsafe { sys::cuGraphDestroy(graph) };
        }
        recording.into_iter().flat_map(|recording| recording.freed).for_each(free_now);
        self.ended.notify_all();
        result
    }

    fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: the stream is live.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.stream) })
    }

    /// Destroys what the driver holds for this queue; it is not used again. The context is current.
    pub fn destroy(&mut self) {
        let _ = self.synchronize();
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        state.staging.destroy();
        state.uploads.destroy();
        state.drop_graph();
        // SAFETY: made in `new`, destroyed once, and idle.
        let _ = unsafe { sys::cuStreamDestroy_v2(self.stream) };
    }
}

/// Frees memory once the device is done with what is queued: the driver waits.
fn free_now(ptr: DevicePtr) {
    // SAFETY: allocated by `cuMemAlloc`, freed once (see `Gpu::free`).
    let _ = unsafe { sys::cuMemFree_v2(ptr) };
}

impl State {
    /// Makes the executable graph one that does what `graph` says.
    fn make_runnable(&mut self, graph: sys::CUgraph) -> Result<(), CudaError> {
        if !self.graph.is_null() {
            let mut info = MaybeUninit::uninit();
            // SAFETY: both graphs are live, and so is `info`.
            let status = unsafe { sys::cuGraphExecUpdate_v2(self.graph, graph, info.as_mut_ptr()) };
            if status != CUresult::CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE {
                return check("cuGraphExecUpdate", status);
            }
            // Other kernels than last time, not an error.
            self.drop_graph();
        }
        // SAFETY: `graph` is live; the field is.
        check("cuGraphInstantiate", unsafe { sys::cuGraphInstantiateWithFlags(&mut self.graph, graph, 0) })
    }

    fn drop_graph(&mut self) {
        let graph = std::mem::replace(&mut self.graph, ptr::null_mut());
        if !graph.is_null() {
            // SAFETY: the executable graph is ours; the driver waits where it still runs.
            let _ = unsafe { sys::cuGraphExecDestroy(graph) };
        }
    }
}
