//! The driver's calls behind a queue of work, and the words of its errors.
//!
//! [`Calls`] is what [`Recorder`](crate::recorder::Recorder) and its staging memory ask of the driver. The driver answers
//! by [`DriverStream`]; in tests a fake does, which runs nothing before it must.

use std::ffi::{CStr, c_void};
use std::mem::MaybeUninit;
use std::ops::Range;
use std::ptr;

use cudarc::driver::result::DriverError;
use cudarc::driver::sys::{self, CUresult};

use crate::{CudaError, DevicePtr};

/// One stream of work and what belongs to it. Everything queued is done in its order; nothing here waits unless it says
/// so. All but [`Calls::bind`] need the context to be current in this thread.
pub(crate) trait Calls {
    /// A moment in the work of the stream.
    type Event;
    /// Host memory that the device copies from by itself.
    type Pinned;
    /// Work as it was recorded.
    type Graph;
    /// Recorded work, ready to run.
    type Runnable;

    /// Makes the context current in this thread.
    fn bind(&self) -> Result<(), CudaError>;

    /// Queues a copy to the device; `src` may be changed as soon as this returns.
    fn write(&self, dst: DevicePtr, src: &[u8]) -> Result<(), CudaError>;
    /// Queues a copy from the device.
    ///
    /// # Safety
    /// `dst` stays, untouched, until the stream has come this far.
    unsafe fn read(&self, src: DevicePtr, dst: &mut [u8]) -> Result<(), CudaError>;
    /// Frees memory of the device once what is queued is done.
    fn free(&self, ptr: DevicePtr);

    /// Host memory of `bytes`.
    fn pin(&self, bytes: usize) -> Result<Self::Pinned, CudaError>;
    /// Lets `fill` write a part of host memory.
    ///
    /// # Safety
    /// No copy from that part is queued that the stream has not come past.
    unsafe fn fill(&self, memory: &mut Self::Pinned, part: Range<usize>, fill: &mut dyn FnMut(&mut [u8]));
    /// Queues a copy of a part of host memory to the device.
    ///
    /// # Safety
    /// The memory stays, and that part of it as it is, until the stream has come this far.
    unsafe fn copy(&self, dst: DevicePtr, memory: &Self::Pinned, part: Range<usize>)
    -> Result<(), CudaError>;

    /// A moment that is still to be recorded.
    fn event(&self) -> Result<Self::Event, CudaError>;
    /// Makes `event` the moment that the stream has come this far.
    fn record(&self, event: &Self::Event) -> Result<(), CudaError>;
    /// Waits for an event; not at all when it never was recorded.
    fn wait(&self, event: &Self::Event) -> Result<(), CudaError>;
    /// Seconds between two events that have been reached.
    fn seconds(&self, from: &Self::Event, to: &Self::Event) -> Result<f64, CudaError>;
    /// Waits for everything queued.
    fn synchronize(&self) -> Result<(), CudaError>;

    /// From here on what is queued is recorded and not done. Nothing is being recorded yet.
    fn begin(&self) -> Result<(), CudaError>;
    /// Ends what [`Calls::begin`] began.
    fn end(&self) -> Result<Self::Graph, CudaError>;
    /// Makes recorded work ready to run.
    fn make(&self, graph: &Self::Graph) -> Result<Self::Runnable, CudaError>;
    /// Makes `runnable` do what `graph` says; false where that takes other kernels, and so a new one.
    fn update(&self, runnable: &mut Self::Runnable, graph: &Self::Graph) -> Result<bool, CudaError>;
    /// Queues recorded work.
    fn run(&self, runnable: &Self::Runnable) -> Result<(), CudaError>;
}

/// A stream of the driver.
pub(crate) struct DriverStream {
    context: sys::CUcontext,
    stream: sys::CUstream,
}

impl DriverStream {
    /// A new stream of `context`, which is retained for as long as this lives.
    pub fn new(context: sys::CUcontext) -> Result<Self, CudaError> {
        bind(context)?;
        let mut stream = ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: `stream` is live; the context is current. Destroyed in `drop`.
        check("cuStreamCreate", unsafe { sys::cuStreamCreate(&mut stream, flags) })?;
        Ok(Self { context, stream })
    }

    /// The driver's name for it.
    pub fn handle(&self) -> sys::CUstream {
        self.stream
    }
}

impl Drop for DriverStream {
    fn drop(&mut self) {
        if self.bind().is_ok() {
            // SAFETY: made in `new`, destroyed once.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.stream) };
        }
    }
}

/// An event of the driver.
pub(crate) struct Event(sys::CUevent);

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made by `cuEventCreate`, destroyed once.
        let _ = unsafe { sys::cuEventDestroy_v2(self.0) };
    }
}

/// Memory from `cuMemAllocHost`.
pub(crate) struct Pinned {
    memory: *mut c_void,
    bytes: usize,
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: allocated by `cuMemAllocHost`, freed once; whoever drops it has waited for the device.
        let _ = unsafe { sys::cuMemFreeHost(self.memory) };
    }
}

/// A graph of the driver.
pub(crate) struct Graph(sys::CUgraph);

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: the graph is ours, and an executable one made from it does not need it.
        let _ = unsafe { sys::cuGraphDestroy(self.0) };
    }
}

/// An executable graph of the driver.
pub(crate) struct Runnable(sys::CUgraphExec);

impl Drop for Runnable {
    fn drop(&mut self) {
        // SAFETY: the executable graph is ours; the driver waits where it still runs.
        let _ = unsafe { sys::cuGraphExecDestroy(self.0) };
    }
}

impl Calls for DriverStream {
    type Event = Event;
    type Pinned = Pinned;
    type Graph = Graph;
    type Runnable = Runnable;

    fn bind(&self) -> Result<(), CudaError> {
        bind(self.context)
    }

    fn write(&self, dst: DevicePtr, src: &[u8]) -> Result<(), CudaError> {
        // SAFETY: `src` is live, and copied when the call returns, as it is pageable; `dst` is the caller's allocation.
        check("cuMemcpyHtoDAsync", unsafe {
            sys::cuMemcpyHtoDAsync_v2(dst, src.as_ptr().cast(), src.len(), self.stream)
        })
    }

    unsafe fn read(&self, src: DevicePtr, dst: &mut [u8]) -> Result<(), CudaError> {
        // SAFETY: `dst` stays until the copy is done (the caller's promise); `src` is the caller's allocation.
        check("cuMemcpyDtoHAsync", unsafe {
            sys::cuMemcpyDtoHAsync_v2(dst.as_mut_ptr().cast(), src, dst.len(), self.stream)
        })
    }

    fn free(&self, ptr: DevicePtr) {
        // SAFETY: allocated by `cuMemAlloc`, freed once (see `Gpu::free`); the driver waits for what is queued.
        let _ = unsafe { sys::cuMemFree_v2(ptr) };
    }

    fn pin(&self, bytes: usize) -> Result<Pinned, CudaError> {
        let mut memory = ptr::null_mut();
        // SAFETY: `memory` is live; the context is current.
        check("cuMemAllocHost", unsafe { sys::cuMemAllocHost_v2(&mut memory, bytes) })?;
        // SAFETY: as many bytes have just been allocated. From here on they count as initialised.
        unsafe { memory.cast::<u8>().write_bytes(0, bytes) };
        Ok(Pinned { memory, bytes })
    }

    unsafe fn fill(&self, memory: &mut Pinned, part: Range<usize>, fill: &mut dyn FnMut(&mut [u8])) {
        assert!(part.start <= part.end && part.end <= memory.bytes, "{part:?} of {}", memory.bytes);
        // SAFETY: the part lies within the memory (checked above), which is initialised, borrowed for this call, and not
        // read by the device meanwhile (the caller's promise).
        let bytes =
            unsafe { std::slice::from_raw_parts_mut(memory.memory.cast::<u8>().add(part.start), part.len()) };
        fill(bytes);
    }

    unsafe fn copy(&self, dst: DevicePtr, memory: &Pinned, part: Range<usize>) -> Result<(), CudaError> {
        assert!(part.start <= part.end && part.end <= memory.bytes, "{part:?} of {}", memory.bytes);
        // SAFETY: the part lies within the memory (checked above) and stays as it is until the copy is done (the caller's
        // promise); `dst` is the caller's allocation.
        check("cuMemcpyHtoDAsync", unsafe {
            sys::cuMemcpyHtoDAsync_v2(dst, memory.memory.byte_add(part.start), part.len(), self.stream)
        })
    }

    fn event(&self) -> Result<Event, CudaError> {
        let mut event = ptr::null_mut();
        // SAFETY: `event` is live; the context is current.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&mut event, 0) })?;
        Ok(Event(event))
    }

    fn record(&self, event: &Event) -> Result<(), CudaError> {
        // SAFETY: event and stream are live and of the same context.
        check("cuEventRecord", unsafe { sys::cuEventRecord(event.0, self.stream) })
    }

    fn wait(&self, event: &Event) -> Result<(), CudaError> {
        // SAFETY: the event is live.
        check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(event.0) })
    }

    fn seconds(&self, from: &Event, to: &Event) -> Result<f64, CudaError> {
        let mut milliseconds = 0.0;
        // SAFETY: both events are live; `milliseconds` is live.
        let status = unsafe { sys::cuEventElapsedTime_v2(&mut milliseconds, from.0, to.0) };
        check("cuEventElapsedTime", status)?;
        Ok(f64::from(milliseconds) / 1e3)
    }

    fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: the stream is live.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.stream) })
    }

    fn begin(&self) -> Result<(), CudaError> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream is live; were something being captured on it, the driver would refuse.
        check("cuStreamBeginCapture", unsafe { sys::cuStreamBeginCapture_v2(self.stream, mode) })
    }

    fn end(&self) -> Result<Graph, CudaError> {
        let mut graph = ptr::null_mut();
        // SAFETY: the stream is live; `graph` too.
        check("cuStreamEndCapture", unsafe { sys::cuStreamEndCapture(self.stream, &mut graph) })?;
        Ok(Graph(graph))
    }

    fn make(&self, graph: &Graph) -> Result<Runnable, CudaError> {
        let mut runnable = ptr::null_mut();
        // SAFETY: `graph` is live, and so is `runnable`.
        check("cuGraphInstantiate", unsafe { sys::cuGraphInstantiateWithFlags(&mut runnable, graph.0, 0) })?;
        Ok(Runnable(runnable))
    }

    fn update(&self, runnable: &mut Runnable, graph: &Graph) -> Result<bool, CudaError> {
        let mut info = MaybeUninit::uninit();
        // SAFETY: both graphs are live, and so is `info`.
        match unsafe { sys::cuGraphExecUpdate_v2(runnable.0, graph.0, info.as_mut_ptr()) } {
            CUresult::CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE => Ok(false),
            status => check("cuGraphExecUpdate", status).map(|()| true),
        }
    }

    fn run(&self, runnable: &Runnable) -> Result<(), CudaError> {
        // SAFETY: the executable graph is live; the stream is.
        check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(runnable.0, self.stream) })
    }
}

/// Makes a context current in this thread, as every other call needs.
pub(crate) fn bind(context: sys::CUcontext) -> Result<(), CudaError> {
    // SAFETY: the caller's context is retained until it is dropped.
    check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(context) })
}

/// `Ok`, or the driver's own words.
pub(crate) fn check(call: &str, status: CUresult) -> Result<(), CudaError> {
    status.result().map_err(|error| CudaError::call(call, describe(error)))
}

fn describe(error: DriverError) -> String {
    let text = |text: Result<&CStr, DriverError>| {
        text.map_or_else(|_| "unknown".to_owned(), |text| text.to_string_lossy().into_owned())
    };
    format!("{} ({})", text(error.error_string()), text(error.error_name()))
}

#[cfg(test)]
pub(crate) mod fake;
