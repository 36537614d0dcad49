//! CUDA streams of the driver, with the events, pinned memory and graphs that their work needs.

use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::ptr;

use cudarc::driver::sys::{self, CUresult};

use super::{bind, check};
use crate::staging::Calls;
use crate::{CudaError, DevicePtr};

/// A CUDA stream of the driver.
pub(super) struct DriverStream {
    context: sys::CUcontext,
    stream: sys::CUstream,
}

impl DriverStream {
    /// Creates a CUDA stream of `context`, which stays retained for the lifetime of the result.
    pub fn new(context: sys::CUcontext) -> Result<Self, CudaError> {
        bind(context)?;
        let mut stream = ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: `stream` is live; the context is current. Destroyed in `drop`.
        check("cuStreamCreate", unsafe { sys::cuStreamCreate(&mut stream, flags) })?;
        Ok(Self { context, stream })
    }

    /// Returns the driver's handle.
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
pub(super) struct Event(sys::CUevent);

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made by `cuEventCreate`, destroyed once.
        let _ = unsafe { sys::cuEventDestroy_v2(self.0) };
    }
}

/// Pinned memory from `cuMemAllocHost`.
pub(super) struct Pinned {
    memory: *mut c_void,
    bytes: usize,
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: allocated by `cuMemAllocHost`, freed once; the owner has waited for the device
        // before dropping it.
        let _ = unsafe { sys::cuMemFreeHost(self.memory) };
    }
}

/// A CUDA graph of the driver.
pub(super) struct Graph(sys::CUgraph);

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: this value owns the graph, and an executable graph made from it does not need it.
        let _ = unsafe { sys::cuGraphDestroy(self.0) };
    }
}

/// An executable CUDA graph of the driver.
pub(super) struct Runnable(sys::CUgraphExec);

impl Drop for Runnable {
    fn drop(&mut self) {
        // SAFETY: this value owns the executable graph; the driver waits while it still runs.
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
        // SAFETY: `src` is live, and copied when the call returns, as it is pageable; `dst` is the
        // caller's allocation.
        check("cuMemcpyHtoDAsync", unsafe {
            sys::cuMemcpyHtoDAsync_v2(dst, src.as_ptr().cast(), src.len(), self.stream)
        })
    }

    unsafe fn read(&self, src: DevicePtr, dst: &mut [u8]) -> Result<(), CudaError> {
        // SAFETY: `dst` stays until the copy is done (the caller's promise); `src` is the caller's
        // allocation.
        check("cuMemcpyDtoHAsync", unsafe {
            sys::cuMemcpyDtoHAsync_v2(dst.as_mut_ptr().cast(), src, dst.len(), self.stream)
        })
    }

    fn free(&self, ptr: DevicePtr) {
        // SAFETY: allocated by `cuMemAlloc`, freed once (see `Gpu::free`); the driver waits for
        // queued work.
        let _ = unsafe { sys::cuMemFree_v2(ptr) };
    }

    fn pin(&self, bytes: usize) -> Result<Pinned, CudaError> {
        let mut memory = ptr::null_mut();
        // SAFETY: `memory` is live; the context is current.
        check("cuMemAllocHost", unsafe { sys::cuMemAllocHost_v2(&mut memory, bytes) })?;
        // SAFETY: as many bytes have just been allocated. From here on they count as initialized.
        unsafe { memory.cast::<u8>().write_bytes(0, bytes) };
        Ok(Pinned { memory, bytes })
    }

    unsafe fn fill(&self, memory: &mut Pinned, part: Range<usize>, fill: &mut dyn FnMut(&mut [u8])) {
        assert!(part.start <= part.end && part.end <= memory.bytes, "{part:?} of {}", memory.bytes);
        // SAFETY: the range lies within the memory (checked above), which is initialized, borrowed
        // for this call, and not read by the device meanwhile (the caller's promise).
        let bytes =
            unsafe { std::slice::from_raw_parts_mut(memory.memory.cast::<u8>().add(part.start), part.len()) };
        fill(bytes);
    }

    unsafe fn copy(&self, dst: DevicePtr, memory: &Pinned, part: Range<usize>) -> Result<(), CudaError> {
        assert!(part.start <= part.end && part.end <= memory.bytes, "{part:?} of {}", memory.bytes);
        // SAFETY: the range lies within the memory (checked above) and does not change until the
        // copy is done (the caller's promise); `dst` is the caller's allocation.
        check("cuMemcpyHtoDAsync", unsafe {
            sys::cuMemcpyHtoDAsync_v2(dst, memory.memory.byte_add(part.start), part.len(), self.stream)
        })
    }

    unsafe fn fetch(&self, memory: &Pinned, part: Range<usize>, src: DevicePtr) -> Result<(), CudaError> {
        assert!(part.start <= part.end && part.end <= memory.bytes, "{part:?} of {}", memory.bytes);
        // SAFETY: as in `copy`; `src` is the caller's allocation.
        check("cuMemcpyDtoHAsync", unsafe {
            sys::cuMemcpyDtoHAsync_v2(memory.memory.byte_add(part.start), src, part.len(), self.stream)
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

    fn wait_for(&self, event: &Event) -> Result<(), CudaError> {
        // SAFETY: the stream and the event are live and of one context.
        check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(self.stream, event.0, 0) })
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
        // SAFETY: the stream is live; the driver rejects the call if a capture is in progress on
        // it.
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
