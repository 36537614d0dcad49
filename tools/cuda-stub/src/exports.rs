//! The driver's functions (<https://docs.nvidia.com/cuda/cuda-driver-api/>).
//!
//! Handles are addresses of boxes, freed by the function that destroys them. The caller upholds the
//! driver's own contract: pointers are live, and handles come from here.

use std::cell::Cell;
use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};
use std::ptr;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent, CUfunction, CUfunction_attribute, CUgraph,
    CUgraphExec, CUgraphExecUpdateResultInfo, CUjit_option, CUlaunchConfig, CUmodule, CUresult, CUstream,
    CUstreamCaptureMode,
};

use crate::counts::{self, Kind, add_bytes, add_time, counted};
use crate::memory::Memory;
use crate::settings::SETTINGS;

/// Dynamic shared memory of a kernel that has not been allowed more.
const DEFAULT_SHARED: c_int = 48 << 10;
/// Threads that a block may have.
const MAX_THREADS: u64 = 1024;

static MEMORY: LazyLock<Mutex<Memory>> = LazyLock::new(|| Mutex::new(Memory::new(SETTINGS.memory_bytes)));

thread_local! {
    static HAS_CONTEXT: Cell<bool> = const { Cell::new(false) };
}

/// A stream: the work recorded while it captures.
#[derive(Default)]
struct Stream {
    capture: Mutex<Option<Vec<Kind>>>,
}

/// A recorded graph, or one made executable: the kinds of its nodes in order.
struct Nodes(Vec<Kind>);

/// A kernel: the dynamic shared memory that it is allowed.
struct Function {
    shared_bytes: AtomicI32,
}

/// The moment at which an event was recorded.
#[derive(Default)]
struct Event(Mutex<Option<Instant>>);

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Stores the address of a new box in `*to`.
///
/// # Safety
/// `to` is live.
unsafe fn hand_out<T, H>(to: *mut *mut H, value: T) -> CUresult {
    // SAFETY: the caller's.
    unsafe { *to = Box::into_raw(Box::new(value)).cast() };
    CUresult::CUDA_SUCCESS
}

/// Frees a box that [`hand_out`] made.
///
/// # Safety
/// `handle` comes from `hand_out::<T, _>`, and is not used again.
unsafe fn take_back<T, H>(handle: *mut H) -> CUresult {
    // SAFETY: the caller's.
    drop(unsafe { Box::from_raw(handle.cast::<T>()) });
    CUresult::CUDA_SUCCESS
}

/// Returns what a handle stands for.
///
/// # Safety
/// `handle` comes from `hand_out::<T, _>` and is live for `'a`.
unsafe fn of<'a, T, H>(handle: *mut H) -> &'a T {
    // SAFETY: the caller's.
    unsafe { &*handle.cast::<T>() }
}

/// Runs `call` where this thread has a context.
fn in_context(call: impl FnOnce() -> CUresult) -> CUresult {
    if HAS_CONTEXT.get() { call() } else { CUresult::CUDA_ERROR_INVALID_CONTEXT }
}

/// Queues work: adds it to the stream's recording, if there is one.
///
/// # Safety
/// `stream` is live.
unsafe fn queue(stream: CUstream, kind: Kind) -> CUresult {
    // SAFETY: the caller's.
    let stream: &Stream = unsafe { of(stream) };
    if let Some(nodes) = &mut *locked(&stream.capture) {
        nodes.push(kind);
    }
    CUresult::CUDA_SUCCESS
}

/// Queues a copy or a memset of device memory, of which `ranges` are addresses.
///
/// # Safety
/// `stream` is live.
unsafe fn queue_copy(stream: CUstream, kind: Kind, ranges: &[CUdeviceptr], bytes: usize) -> CUresult {
    counted(kind, || {
        in_context(|| {
            add_bytes(kind, bytes);
            let memory = locked(&MEMORY);
            if !ranges.iter().all(|&address| memory.contains(address, bytes as u64)) {
                return CUresult::CUDA_ERROR_INVALID_VALUE;
            }
            // SAFETY: the caller's.
            unsafe { queue(stream, kind) }
        })
    })
}

/// Returns an error where `stream` records: it cannot be waited for.
///
/// # Safety
/// `stream` is live.
unsafe fn idle(stream: CUstream) -> CUresult {
    // SAFETY: the caller's.
    let stream: &Stream = unsafe { of(stream) };
    match *locked(&stream.capture) {
        Some(_) => CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
        None => CUresult::CUDA_SUCCESS,
    }
}

/// Writes counts and memory to the file that the environment names.
extern "C" fn report() {
    let Some(path) = &SETTINGS.report else { return };
    let (calls, step, memory) = (counts::json(), counts::steps_json(), locked(&MEMORY).json());
    let text = format!("{{\"calls\": {calls},\n\"step\": {step},\n\"memory\": {memory}}}\n");
    if let Err(error) = std::fs::write(path, text) {
        eprintln!("KVANT_STUB_REPORT: {path}: {error}");
    }
}

/// Defines functions of the driver. What their pointers and handles must be is stated above.
macro_rules! functions {
    ($(fn $name:ident($($arg:ident: $type:ty),* $(,)?) $body:block)*) => {
        /// The names of all functions.
        #[cfg(test)]
        pub(crate) const NAMES: &[&str] = &[$(stringify!($name)),*];
        $(
            /// See the driver's manual.
            ///
            /// # Safety
            /// Pointers are live, and handles come from this library and have not been destroyed.
            #[unsafe(no_mangle)]
            #[allow(unused_unsafe, reason = "not every function needs it")]
            pub unsafe extern "C" fn $name($($arg: $type),*) -> CUresult {
                // SAFETY: the caller upholds the driver's contract, which is this function's.
                unsafe { $body }
            }
        )*
    };
}

functions! {
    fn cuInit(_flags: c_uint) {
        static REGISTERED: LazyLock<c_int> = LazyLock::new(|| {
            // SAFETY: `report` can be called at exit: it uses statics alone.
            unsafe { libc::atexit(report) }
        });
        let _ = *REGISTERED;
        CUresult::CUDA_SUCCESS
    }

    fn cuDriverGetVersion(version: *mut c_int) {
        *version = SETTINGS.version as c_int;
        CUresult::CUDA_SUCCESS
    }

    fn cuGetErrorName(error: CUresult, text: *mut *const c_char) {
        *text = match error {
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => c"CUDA_ERROR_OUT_OF_MEMORY",
            CUresult::CUDA_ERROR_INVALID_CONTEXT => c"CUDA_ERROR_INVALID_CONTEXT",
            CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED => c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
            _ => c"CUDA_ERROR_INVALID_VALUE",
        }
        .as_ptr();
        CUresult::CUDA_SUCCESS
    }

    fn cuGetErrorString(_error: CUresult, text: *mut *const c_char) {
        *text = c"refused by the stub driver".as_ptr();
        CUresult::CUDA_SUCCESS
    }

    fn cuDeviceGetCount(count: *mut c_int) {
        *count = 1;
        CUresult::CUDA_SUCCESS
    }

    fn cuDeviceGet(device: *mut CUdevice, ordinal: c_int) {
        *device = ordinal;
        if ordinal == 0 { CUresult::CUDA_SUCCESS } else { CUresult::CUDA_ERROR_INVALID_VALUE }
    }

    fn cuDeviceGetName(name: *mut c_char, len: c_int, _device: CUdevice) {
        let room = usize::try_from(len).unwrap_or(0).saturating_sub(1);
        let bytes = SETTINGS.name.as_bytes();
        let n = bytes.len().min(room);
        ptr::copy_nonoverlapping(bytes.as_ptr().cast(), name, n);
        *name.add(n) = 0;
        CUresult::CUDA_SUCCESS
    }

    fn cuDeviceTotalMem_v2(bytes: *mut usize, _device: CUdevice) {
        *bytes = locked(&MEMORY).total() as usize;
        CUresult::CUDA_SUCCESS
    }

    fn cuDeviceGetAttribute(value: *mut c_int, attribute: CUdevice_attribute, _device: CUdevice) {
        use CUdevice_attribute as Attribute;
        *value = match attribute {
            Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR => SETTINGS.arch / 10,
            Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR => SETTINGS.arch % 10,
            Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT => SETTINGS.n_sms,
            Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN => SETTINGS.shared_bytes,
            _ => return CUresult::CUDA_ERROR_INVALID_VALUE,
        } as c_int;
        CUresult::CUDA_SUCCESS
    }

    fn cuDevicePrimaryCtxRetain(context: *mut CUcontext, _device: CUdevice) {
        *context = ptr::dangling_mut();
        CUresult::CUDA_SUCCESS
    }

    fn cuDevicePrimaryCtxRelease_v2(_device: CUdevice) {
        CUresult::CUDA_SUCCESS
    }

    fn cuCtxSetCurrent(context: CUcontext) {
        counted(Kind::Bind, || {
            HAS_CONTEXT.set(!context.is_null());
            CUresult::CUDA_SUCCESS
        })
    }

    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        in_context(|| {
            let memory = locked(&MEMORY);
            (*free, *total) = (memory.free_bytes() as usize, memory.total() as usize);
            CUresult::CUDA_SUCCESS
        })
    }

    fn cuMemAlloc_v2(address: *mut CUdeviceptr, bytes: usize) {
        counted(Kind::Alloc, || {
            in_context(|| match locked(&MEMORY).alloc(bytes as u64) {
                _ if bytes == 0 => CUresult::CUDA_ERROR_INVALID_VALUE,
                Some(at) => {
                    *address = at;
                    CUresult::CUDA_SUCCESS
                }
                None => CUresult::CUDA_ERROR_OUT_OF_MEMORY,
            })
        })
    }

    fn cuMemFree_v2(address: CUdeviceptr) {
        counted(Kind::Free, || {
            in_context(|| match locked(&MEMORY).free(address) {
                true => CUresult::CUDA_SUCCESS,
                false => CUresult::CUDA_ERROR_INVALID_VALUE,
            })
        })
    }

    fn cuMemAllocHost_v2(memory: *mut *mut c_void, bytes: usize) {
        counted(Kind::Pin, || {
            in_context(|| {
                add_bytes(Kind::Pin, bytes);
                *memory = libc::malloc(bytes);
                if (*memory).is_null() { CUresult::CUDA_ERROR_OUT_OF_MEMORY } else { CUresult::CUDA_SUCCESS }
            })
        })
    }

    fn cuMemFreeHost(memory: *mut c_void) {
        libc::free(memory);
        CUresult::CUDA_SUCCESS
    }

    fn cuMemcpyHtoDAsync_v2(to: CUdeviceptr, _from: *const c_void, bytes: usize, stream: CUstream) {
        queue_copy(stream, Kind::Write, &[to], bytes)
    }

    fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: CUdeviceptr, bytes: usize, stream: CUstream) {
        let started = Instant::now();
        ptr::write_bytes(to.cast::<u8>(), 0, bytes);
        add_time(Kind::Read, started);
        queue_copy(stream, Kind::Read, &[from], bytes)
    }

    fn cuMemcpyDtoDAsync_v2(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream) {
        queue_copy(stream, Kind::Copy, &[to, from], bytes)
    }

    fn cuMemsetD8Async(to: CUdeviceptr, _value: u8, bytes: usize, stream: CUstream) {
        queue_copy(stream, Kind::Zero, &[to], bytes)
    }

    fn cuModuleLoadDataEx(
        module: *mut CUmodule,
        _image: *const c_void,
        _n_options: c_uint,
        _options: *mut CUjit_option,
        _values: *mut *mut c_void,
    ) {
        counted(Kind::Module, || in_context(|| hand_out(module, 0u8)))
    }

    fn cuModuleUnload(module: CUmodule) {
        take_back::<u8, _>(module)
    }

    fn cuModuleGetFunction(function: *mut CUfunction, _module: CUmodule, _name: *const c_char) {
        // Like the module's, its handle lives until the process ends.
        counted(Kind::Module, || hand_out(function, Function { shared_bytes: AtomicI32::new(DEFAULT_SHARED) }))
    }

    fn cuFuncGetAttribute(value: *mut c_int, _attribute: CUfunction_attribute, function: CUfunction) {
        counted(Kind::Module, || {
            *value = of::<Function, _>(function).shared_bytes.load(Ordering::Relaxed);
            CUresult::CUDA_SUCCESS
        })
    }

    fn cuFuncSetAttribute(function: CUfunction, _attribute: CUfunction_attribute, value: c_int) {
        counted(Kind::Module, || {
            if u64::try_from(value).is_ok_and(|bytes| bytes <= SETTINGS.shared_bytes) {
                of::<Function, _>(function).shared_bytes.store(value, Ordering::Relaxed);
                return CUresult::CUDA_SUCCESS;
            }
            CUresult::CUDA_ERROR_INVALID_VALUE
        })
    }

    fn cuLaunchKernelEx(
        config: *const CUlaunchConfig,
        function: CUfunction,
        _params: *mut *mut c_void,
        _extra: *mut *mut c_void,
    ) {
        counted(Kind::Launch, || {
            let config = &*config;
            let threads = [config.blockDimX, config.blockDimY, config.blockDimZ].map(u64::from);
            let allowed = of::<Function, _>(function).shared_bytes.load(Ordering::Relaxed);
            let is_valid = (1..=MAX_THREADS).contains(&threads.iter().product())
                && [config.gridDimX, config.gridDimY, config.gridDimZ].iter().all(|&blocks| blocks > 0)
                && c_int::try_from(config.sharedMemBytes).is_ok_and(|bytes| bytes <= allowed);
            if !is_valid {
                return CUresult::CUDA_ERROR_INVALID_VALUE;
            }
            in_context(|| queue(config.hStream, Kind::Launch))
        })
    }

    fn cuStreamCreate(stream: *mut CUstream, _flags: c_uint) {
        in_context(|| hand_out(stream, Stream::default()))
    }

    fn cuStreamDestroy_v2(stream: CUstream) {
        take_back::<Stream, _>(stream)
    }

    fn cuStreamSynchronize(stream: CUstream) {
        counted(Kind::Wait, || in_context(|| idle(stream)))
    }

    fn cuStreamBeginCapture_v2(stream: CUstream, _mode: CUstreamCaptureMode) {
        counted(Kind::Capture, || {
            in_context(|| {
                let is_idle = idle(stream);
                if is_idle == CUresult::CUDA_SUCCESS {
                    *locked(&of::<Stream, _>(stream).capture) = Some(Vec::new());
                }
                is_idle
            })
        })
    }

    fn cuStreamEndCapture(stream: CUstream, graph: *mut CUgraph) {
        counted(Kind::Capture, || {
            let nodes = locked(&of::<Stream, _>(stream).capture).take();
            match nodes {
                Some(nodes) => hand_out(graph, Nodes(nodes)),
                None => CUresult::CUDA_ERROR_INVALID_VALUE,
            }
        })
    }

    fn cuGraphDestroy(graph: CUgraph) {
        take_back::<Nodes, _>(graph)
    }

    fn cuGraphInstantiateWithFlags(made: *mut CUgraphExec, graph: CUgraph, _flags: c_ulonglong) {
        let nodes = of::<Nodes, _>(graph).0.clone();
        counted(Kind::GraphInstantiate, || in_context(|| hand_out(made, Nodes(nodes))))
    }

    fn cuGraphExecDestroy(made: CUgraphExec) {
        take_back::<Nodes, _>(made)
    }

    fn cuGraphExecUpdate_v2(made: CUgraphExec, graph: CUgraph, _info: *mut CUgraphExecUpdateResultInfo) {
        counted(Kind::GraphUpdate, || {
            in_context(|| {
                // A kernel can be replaced by another, a node not by one of another kind.
                if of::<Nodes, _>(made).0 == of::<Nodes, _>(graph).0 {
                    return CUresult::CUDA_SUCCESS;
                }
                CUresult::CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE
            })
        })
    }

    fn cuGraphLaunch(_made: CUgraphExec, stream: CUstream) {
        counted(Kind::GraphLaunch, || in_context(|| idle(stream)))
    }

    fn cuEventCreate(event: *mut CUevent, _flags: c_uint) {
        counted(Kind::Event, || in_context(|| hand_out(event, Event::default())))
    }

    fn cuEventDestroy_v2(event: CUevent) {
        counted(Kind::Event, || take_back::<Event, _>(event))
    }

    fn cuEventRecord(event: CUevent, stream: CUstream) {
        counted(Kind::Event, || {
            *locked(&of::<Event, _>(event).0) = Some(Instant::now());
            queue(stream, Kind::Event)
        })
    }

    fn cuStreamWaitEvent(stream: CUstream, _event: CUevent, _flags: c_uint) {
        counted(Kind::Event, || queue(stream, Kind::Event))
    }

    fn cuEventSynchronize(_event: CUevent) {
        counts::end_step();
        counted(Kind::Wait, || in_context(|| CUresult::CUDA_SUCCESS))
    }

    fn cuEventElapsedTime_v2(milliseconds: *mut f32, start: CUevent, end: CUevent) {
        let at = |event| *locked(&of::<Event, _>(event).0);
        let (Some(start), Some(end)) = (at(start), at(end)) else {
            return CUresult::CUDA_ERROR_INVALID_VALUE;
        };
        *milliseconds = end.saturating_duration_since(start).as_secs_f32() * 1e3;
        CUresult::CUDA_SUCCESS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_function_that_the_device_calls_is_there() {
        let driver = include_str!("../../../crates/cuda/src/driver.rs");
        let stream = include_str!("../../../crates/cuda/src/driver/stream.rs");
        let calls = [driver, stream].into_iter().flat_map(|source| source.split("sys::cu").skip(1));
        let called = calls.filter_map(|rest| rest.split('(').next());
        let called: Vec<_> = called.map(|rest| format!("cu{rest}")).collect();
        assert!(called.len() > 30, "{called:?}");
        for name in called {
            assert!(NAMES.contains(&&*name), "{name} is missing");
        }
    }

    #[test]
    fn captures_cannot_be_waited_for_and_update_graphs_of_a_kind() {
        let (mut stream, mut graphs, mut made) = (ptr::null_mut(), [ptr::null_mut(); 3], ptr::null_mut());
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        let ok = |status| assert_eq!(status, CUresult::CUDA_SUCCESS);
        // SAFETY: pointers are to live locals, and handles come from calls before.
        unsafe {
            assert_eq!(cuStreamCreate(&mut stream, 0), CUresult::CUDA_ERROR_INVALID_CONTEXT);
            ok(cuCtxSetCurrent(ptr::dangling_mut()));
            ok(cuStreamCreate(&mut stream, 0));
            let mut address = 0;
            ok(cuMemAlloc_v2(&mut address, 64));
            for (bytes, graph) in [64, 32].into_iter().zip(&mut graphs) {
                ok(cuStreamBeginCapture_v2(stream, mode));
                ok(cuMemsetD8Async(address, 0, bytes, stream));
                assert_eq!(cuMemsetD8Async(address, 0, 65, stream), CUresult::CUDA_ERROR_INVALID_VALUE);
                assert_ne!(cuStreamSynchronize(stream), CUresult::CUDA_SUCCESS);
                ok(cuStreamEndCapture(stream, graph));
            }
            ok(cuStreamBeginCapture_v2(stream, mode));
            ok(cuMemcpyDtoDAsync_v2(address, address + 32, 32, stream));
            ok(cuStreamEndCapture(stream, &mut graphs[2]));
            ok(cuStreamSynchronize(stream));
            ok(cuGraphInstantiateWithFlags(&mut made, graphs[0], 0));
            ok(cuGraphExecUpdate_v2(made, graphs[1], ptr::null_mut()));
            let update = cuGraphExecUpdate_v2(made, graphs[2], ptr::null_mut());
            assert_eq!(update, CUresult::CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE);
            ok(cuGraphLaunch(made, stream));
            ok(cuMemFree_v2(address));
            ok(cuGraphExecDestroy(made));
            graphs.into_iter().for_each(|graph| ok(cuGraphDestroy(graph)));
            ok(cuStreamDestroy_v2(stream));
        }
    }
}
