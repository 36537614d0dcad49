//! The NVIDIA driver as a [`Gpu`] (<https://docs.nvidia.com/cuda/cuda-driver-api/>).
//!
//! The library is loaded at run time. A [`Driver`] holds the device's primary context and a CUDA
//! stream of its own and no global state, so several devices, and several models on one, coexist.

use std::ffi::{CStr, CString, c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{PoisonError, RwLock};

use cudarc::driver::result::DriverError;
use cudarc::driver::sys::{self, CUdevice_attribute as Attribute, CUresult};

use crate::entry::Entry;
use crate::recorder::{Node, Recorder};
use crate::transfers::Transfers;
use crate::{CudaError, CudaVersion, DevicePtr, Gpu, GpuProperties, KernelId, Launch, ModuleId};

mod stream;

use stream::DriverStream;

/// Oldest driver with every function called here, except the clock.
pub(crate) const OLDEST: CudaVersion = CudaVersion { major: 12, minor: 0 };
/// Oldest driver with the function that reads the device clock.
const OLDEST_TIMER: CudaVersion = CudaVersion { major: 12, minor: 8 };
/// Oldest driver in which kernels that wait for their predecessor's memory themselves (programmatic
/// dependent launch) may begin before it ends, also in recorded graphs.
const OLDEST_EARLY: CudaVersion = CudaVersion { major: 12, minor: 3 };
/// The kernels use asynchronous copies and integer tensor cores.
const OLDEST_ARCH: u32 = 80;
/// The maximum dynamic shared memory of a kernel.
const DYNAMIC_SHARED: sys::CUfunction_attribute =
    sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;

/// Proof that the libraries are loaded.
#[derive(Debug, Clone, Copy)]
struct Library {
    version: CudaVersion,
}

/// A device of the NVIDIA driver. Fields are dropped in this order: the streams, which wait for
/// their work, the modules, the context.
pub(crate) struct Driver {
    properties: GpuProperties,
    transfers: Transfers<DriverStream>,
    recorder: Recorder<DriverStream>,
    modules: RwLock<Vec<Module>>,
    kernels: RwLock<Vec<Kernel>>,
    primary: Primary,
}

/// The retained primary context of a device.
struct Primary {
    device: sys::CUdevice,
    context: sys::CUcontext,
}

impl Primary {
    fn retain(device: sys::CUdevice) -> Result<Self, CudaError> {
        let mut context = ptr::null_mut();
        // SAFETY: `context` is live; `drop` releases what is retained here.
        check("cuDevicePrimaryCtxRetain", unsafe { sys::cuDevicePrimaryCtxRetain(&mut context, device) })?;
        Ok(Self { device, context })
    }
}

impl Drop for Primary {
    fn drop(&mut self) {
        // SAFETY: retained once, released once. A failure cannot be handled.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

struct Module {
    handle: sys::CUmodule,
    ptx: String,
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: loaded once, unloaded once; the queue, dropped before, has left its stream idle
        // and the context current.
        let _ = unsafe { sys::cuModuleUnload(self.handle) };
    }
}

struct Kernel {
    function: sys::CUfunction,
    name: String,
    entry: Entry,
    /// Dynamic shared memory allowed so far.
    shared_bytes: AtomicU32,
}

// SAFETY: the handles are opaque pointers that the driver allows any thread to use, as long as the
// context is current in it, which `bind` ensures before every call.
unsafe impl Send for Driver {}
// SAFETY: as above; the driver's functions may be called at the same time.
unsafe impl Sync for Driver {}

impl Library {
    fn find() -> Result<Self, CudaError> {
        // SAFETY: opening the driver's library has no precondition.
        if !unsafe { sys::is_culib_present() } {
            return Err(CudaError::NoDriver { needed: OLDEST });
        }
        // SAFETY: the library is loaded, and `cuInit` is the first call.
        check("cuInit", unsafe { sys::cuInit(0) })
            .map_err(|error| CudaError::DriverInit { problem: error.to_string() })?;
        let mut version = 0;
        // SAFETY: `version` is live.
        check("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&mut version) })?;
        let version = version.unsigned_abs();
        let version = CudaVersion { major: version / 1000, minor: version % 1000 / 10 };
        if version < OLDEST {
            return Err(CudaError::OldDriver {
                found: version,
                needed: OLDEST,
                why: "for the driver functions in use",
            });
        }
        Ok(Self { version })
    }

    fn count(self) -> Result<usize, CudaError> {
        let mut count = 0;
        // SAFETY: `count` is live.
        check("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&mut count) })?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    fn properties(self, device: sys::CUdevice) -> Result<GpuProperties, CudaError> {
        let mut name = [0; 256];
        // SAFETY: the driver writes at most the given 256 bytes, ending in NUL.
        check("cuDeviceGetName", unsafe { sys::cuDeviceGetName(name.as_mut_ptr().cast(), 256, device) })?;
        let name = CStr::from_bytes_until_nul(&name).unwrap_or_default().to_string_lossy().into_owned();
        let mut total_bytes = 0;
        // SAFETY: `total_bytes` is live.
        check("cuDeviceTotalMem", unsafe { sys::cuDeviceTotalMem_v2(&mut total_bytes, device) })?;
        let attribute = |which| {
            let mut value: c_int = 0;
            // SAFETY: `value` is live.
            check("cuDeviceGetAttribute", unsafe { sys::cuDeviceGetAttribute(&mut value, which, device) })?;
            Ok::<_, CudaError>(value.unsigned_abs())
        };
        let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        Ok(GpuProperties {
            name,
            arch: major * 10 + minor,
            n_sms: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            shared_per_block: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
            total_bytes,
            driver: self.version,
        })
    }
}

impl Driver {
    /// Returns the number of devices.
    ///
    /// # Errors
    /// A missing or outdated driver.
    pub fn count() -> Result<usize, CudaError> {
        Library::find()?.count()
    }

    /// Opens device `index`.
    ///
    /// # Errors
    /// A missing or outdated driver, an index beyond the last device, or an outdated device.
    pub fn open(index: usize) -> Result<Self, CudaError> {
        let library = Library::find()?;
        let count = library.count()?;
        let ordinal = c_int::try_from(index).ok().filter(|_| index < count);
        let ordinal = ordinal.ok_or(CudaError::NoDevice { index, count })?;
        let mut device = 0;
        // SAFETY: `device` is live; the ordinal is below the count.
        check("cuDeviceGet", unsafe { sys::cuDeviceGet(&mut device, ordinal) })?;
        let properties = library.properties(device)?;
        if properties.arch < OLDEST_ARCH {
            return Err(CudaError::OldDevice { name: properties.name, arch: properties.arch });
        }
        let primary = Primary::retain(device)?;
        let recorder = Recorder::new(DriverStream::new(primary.context)?);
        let transfers = Transfers::new(DriverStream::new(primary.context)?);
        let (modules, kernels) = (RwLock::default(), RwLock::default());
        Ok(Self { properties, transfers, recorder, modules, kernels, primary })
    }

    /// Returns the kind of node that a launch of `kernel` is.
    fn node(&self, kernel: KernelId) -> Node {
        let kernels = self.kernels.read().unwrap_or_else(PoisonError::into_inner);
        let begins_early = kernels[kernel.0].entry.waits && self.properties.driver >= OLDEST_EARLY;
        if begins_early { Node::EarlyKernel } else { Node::Kernel }
    }

    /// Makes the context current in this thread.
    fn bind(&self) -> Result<(), CudaError> {
        bind(self.primary.context)
    }
}

impl Gpu for Driver {
    fn properties(&self) -> &GpuProperties {
        &self.properties
    }

    fn free_bytes(&self) -> Result<usize, CudaError> {
        self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: both are live; the context is current.
        check("cuMemGetInfo", unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) })?;
        Ok(free)
    }

    fn alloc(&self, bytes: usize) -> Result<DevicePtr, CudaError> {
        self.bind()?;
        let mut address = 0;
        // SAFETY: `address` is live; the context is current.
        match unsafe { sys::cuMemAlloc_v2(&mut address, bytes) } {
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                Err(CudaError::OutOfMemory { bytes, free: self.free_bytes()? })
            }
            status => check("cuMemAlloc", status).map(|()| address),
        }
    }

    fn free(&self, ptr: DevicePtr) {
        self.recorder.free(ptr);
    }

    fn write(&self, dst: DevicePtr, src: &[u8]) -> Result<(), CudaError> {
        self.recorder.write(dst, src)
    }

    fn upload(
        &self,
        dst: DevicePtr,
        n_bytes: usize,
        unit: usize,
        fill: &mut dyn FnMut(usize, &mut [u8]),
    ) -> Result<(), CudaError> {
        self.recorder.upload(dst, n_bytes, unit, fill)
    }

    fn read(&self, src: DevicePtr, dst: &mut [u8]) -> Result<(), CudaError> {
        self.recorder.read(src, dst)
    }

    fn read_page(&self, src: DevicePtr, dst: &mut [u8]) -> Result<(), CudaError> {
        self.transfers.read(&self.recorder, src, dst)
    }

    fn write_page(&self, dst: DevicePtr, src: &[u8]) -> Result<(), CudaError> {
        self.transfers.write(&self.recorder, dst, src)
    }

    fn finish(&self) -> Result<(), CudaError> {
        self.recorder.finish()
    }

    fn copy(&self, dst: DevicePtr, src: DevicePtr, bytes: usize) -> Result<(), CudaError> {
        let queue = self.recorder.queue(Node::Copy)?;
        // SAFETY: both ranges lie in memory of this device (the caller's allocations); the stream
        // is live.
        check("cuMemcpyDtoDAsync", unsafe {
            sys::cuMemcpyDtoDAsync_v2(dst, src, bytes, queue.calls.handle())
        })
    }

    fn zero(&self, dst: DevicePtr, bytes: usize) -> Result<(), CudaError> {
        let queue = self.recorder.queue(Node::Zero)?;
        // SAFETY: the range lies in memory of this device (the caller's allocation); the stream is
        // live.
        check("cuMemsetD8Async", unsafe { sys::cuMemsetD8Async(dst, 0, bytes, queue.calls.handle()) })
    }

    fn load(&self, ptx: &str) -> Result<ModuleId, CudaError> {
        self.bind()?;
        let text =
            CString::new(ptx).map_err(|_| CudaError::call("cuModuleLoadDataEx", "the PTX has a NUL"))?;
        let mut log = [0u8; 4096];
        let mut options = [
            sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER,
            sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
        ];
        let mut values = [log.as_mut_ptr().cast::<c_void>(), ptr::without_provenance_mut(log.len() - 1)];
        let mut handle = ptr::null_mut();
        // SAFETY: the text ends in NUL; both arrays have the two entries named; the log's size is
        // passed by value in place of a pointer, as the API requires, and leaves a final NUL; the
        // context is current.
        let status = unsafe {
            sys::cuModuleLoadDataEx(
                &mut handle,
                text.as_ptr().cast(),
                2,
                options.as_mut_ptr(),
                values.as_mut_ptr(),
            )
        };
        check("cuModuleLoadDataEx", status).map_err(|error| {
            let log = CStr::from_bytes_until_nul(&log).unwrap_or_default().to_string_lossy();
            CudaError::call("loading a module", format!("{error}: {}", log.trim()))
        })?;
        let mut modules = self.modules.write().unwrap_or_else(PoisonError::into_inner);
        modules.push(Module { handle, ptx: ptx.to_owned() });
        Ok(ModuleId(modules.len() - 1))
    }

    fn kernel(&self, module: ModuleId, name: &str) -> Result<KernelId, CudaError> {
        self.bind()?;
        let modules = self.modules.read().unwrap_or_else(PoisonError::into_inner);
        let module = &modules[module.0];
        let entry = Entry::of(&module.ptx, name).ok_or_else(|| {
            CudaError::call("finding a kernel", format!("no {name} with one struct parameter"))
        })?;
        let c_name =
            CString::new(name).map_err(|_| CudaError::call("finding a kernel", "its name has a NUL"))?;
        let mut function = ptr::null_mut();
        // SAFETY: the module stays loaded until `self` is dropped; the name ends in NUL.
        let status = unsafe { sys::cuModuleGetFunction(&mut function, module.handle, c_name.as_ptr()) };
        check("cuModuleGetFunction", status)?;
        let mut shared_bytes: c_int = 0;
        // SAFETY: `shared_bytes` is live; the function belongs to a loaded module.
        let status = unsafe { sys::cuFuncGetAttribute(&mut shared_bytes, DYNAMIC_SHARED, function) };
        check("cuFuncGetAttribute", status)?;
        let shared_bytes = AtomicU32::new(shared_bytes.unsigned_abs());
        let mut kernels = self.kernels.write().unwrap_or_else(PoisonError::into_inner);
        kernels.push(Kernel { function, name: name.to_owned(), entry, shared_bytes });
        Ok(KernelId(kernels.len() - 1))
    }

    fn launch(&self, kernel: KernelId, launch: Launch, params: &[u8]) -> Result<(), CudaError> {
        let node = self.node(kernel);
        let queue = self.recorder.queue(node)?;
        let kernels = self.kernels.read().unwrap_or_else(PoisonError::into_inner);
        let kernel = &kernels[kernel.0];
        if params.len() != kernel.entry.param_bytes {
            let problem =
                format!("expected {} bytes of parameters, got {}", kernel.entry.param_bytes, params.len());
            return Err(CudaError::call(&kernel.name, problem));
        }
        kernel.allow_shared(launch.shared_bytes)?;
        let mut early = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]) = (launch.grid, launch.block);
        let config = sys::CUlaunchConfig {
            gridDimX: grid_x,
            gridDimY: grid_y,
            gridDimZ: grid_z,
            blockDimX: block_x,
            blockDimY: block_y,
            blockDimZ: block_z,
            sharedMemBytes: launch.shared_bytes,
            hStream: queue.calls.handle(),
            attrs: &mut early,
            numAttrs: (node == Node::EarlyKernel).into(),
        };
        let mut arguments = [params.as_ptr().cast_mut().cast::<c_void>()];
        // SAFETY: the function belongs to a loaded module; it has one parameter of `params.len()`
        // bytes (checked above), which the driver copies before it returns, as it does the
        // attribute; the stream is live and the context current.
        let status = unsafe {
            sys::cuLaunchKernelEx(&config, kernel.function, arguments.as_mut_ptr(), ptr::null_mut())
        };
        check("cuLaunchKernelEx", status)
            .map_err(|error| CudaError::call(&kernel.name, format!("{error} ({launch:?})")))
    }

    fn timed(&self, ops: &mut dyn FnMut() -> Result<(), CudaError>) -> Result<f64, CudaError> {
        if self.properties.driver < OLDEST_TIMER {
            let (found, why) = (self.properties.driver, "for the device clock");
            return Err(CudaError::OldDriver { found, needed: OLDEST_TIMER, why });
        }
        self.recorder.timed(ops)
    }

    fn begin(&self) -> Result<(), CudaError> {
        self.recorder.begin()
    }

    fn end(&self) -> Result<(), CudaError> {
        self.recorder.end()
    }
}

impl Kernel {
    /// Allows the kernel `bytes` of dynamic shared memory; together with static memory beyond 48
    /// KB, this must be set before the launch.
    fn allow_shared(&self, bytes: u32) -> Result<(), CudaError> {
        if bytes <= self.shared_bytes.load(Ordering::Relaxed) {
            return Ok(());
        }
        let value = c_int::try_from(bytes).unwrap_or(c_int::MAX);
        // SAFETY: the function belongs to a loaded module.
        let status = unsafe { sys::cuFuncSetAttribute(self.function, DYNAMIC_SHARED, value) };
        check("cuFuncSetAttribute", status).map_err(|error| {
            CudaError::call(&self.name, format!("{bytes} bytes of shared memory: {error}"))
        })?;
        self.shared_bytes.fetch_max(bytes, Ordering::Relaxed);
        Ok(())
    }
}

/// Makes a context current in this thread, as every other call requires.
fn bind(context: sys::CUcontext) -> Result<(), CudaError> {
    // SAFETY: the caller's context is retained until it is dropped.
    check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(context) })
}

/// Converts a driver status to a result; the error holds the driver's own message.
fn check(call: &str, status: CUresult) -> Result<(), CudaError> {
    status.result().map_err(|error| CudaError::call(call, describe(error)))
}

fn describe(error: DriverError) -> String {
    let text = |text: Result<&CStr, DriverError>| {
        text.map_or_else(|_| "unknown".to_owned(), |text| text.to_string_lossy().into_owned())
    };
    format!("{} ({})", text(error.error_string()), text(error.error_name()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_driver_or_device_is_an_error() {
        // No machine has this many devices.
        match Driver::open(1 << 20).map(|_| ()) {
            Err(error @ CudaError::NoDriver { .. }) => {
                assert!(error.to_string().starts_with("no NVIDIA driver: libcuda was not found; needed: "));
            }
            Err(CudaError::NoDevice { index, count }) => assert!(count < index),
            Err(CudaError::DriverInit { .. } | CudaError::OldDriver { .. }) => {}
            other => panic!("{other:?}"),
        }
    }
}
