//! The PTX interpreter as a [`Gpu`], for tests: it runs the PTX that a driver would load.

use std::collections::hash_map::DefaultHasher;
use std::fmt::{Display, Write as _};
use std::fs::{self, File};
use std::hash::{Hash, Hasher};
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvant_ptx::{Grid, Machine, Module};

use crate::{
    Context, CudaBuffer, CudaDevice, CudaError, CudaVersion, DevicePtr, Gpu, GpuProperties, KernelId, Launch,
    ModuleId,
};

/// An emulated device that runs each launch before it returns.
pub(crate) struct Emulator {
    properties: GpuProperties,
    state: Mutex<State>,
}

struct State {
    machine: Machine,
    modules: Vec<Module>,
    kernels: Vec<(ModuleId, String)>,
    recording: Recording,
    trace: Option<Trace>,
}

/// Environment variable with a folder for the PTX that runs and the path of each launch through it,
/// which `tools/gpu-report/waits.py` reads.
const TRACE: &str = "KVANT_PTX_TRACE";

/// The folder, and the names of the modules' PTX in it.
struct Trace {
    folder: PathBuf,
    modules: Vec<String>,
}

impl Trace {
    /// Writes the PTX of the next module.
    fn load(&mut self, ptx: &str) {
        let mut hasher = DefaultHasher::new();
        ptx.hash(&mut hasher);
        let name = format!("{:016x}.ptx", hasher.finish());
        fs::write(self.folder.join(&name), ptx).expect("a folder that can be written");
        self.modules.push(name);
    }

    /// Adds a launch: kernel and PTX, and the lines that its first thread has executed.
    fn launch(&self, module: ModuleId, kernel: &str, path: &[usize]) {
        let mut text = format!("{kernel} {}", self.modules[module.0]);
        path.iter().for_each(|line| write!(text, " {line}").expect("a string grows"));
        let file = File::options().append(true).create(true).open(self.folder.join("paths.txt"));
        file.and_then(|mut file| writeln!(file, "{text}")).expect("a folder that can be written");
    }
}

/// What a thread records: it runs at once, but what a driver refuses meanwhile is refused.
#[derive(Debug, Default)]
struct Recording {
    is_on: bool,
    /// Launches of recorded steps so far.
    launches: usize,
}

impl Recording {
    fn check_off(&self, call: &str) -> Result<(), CudaError> {
        if self.is_on { Err(failed(call, "a step is being recorded")) } else { Ok(()) }
    }
}

impl Emulator {
    /// Creates an emulated device of compute capability `arch / 10`: 80, 89 or 90.
    pub fn new(arch: u32) -> Arc<Self> {
        let trace =
            std::env::var_os(TRACE).map(|folder| Trace { folder: folder.into(), modules: Vec::new() });
        let mut machine = Machine::new();
        if trace.is_some() {
            machine.follow_paths();
        }
        let (modules, kernels) = (Vec::new(), Vec::new());
        let state = State { machine, modules, kernels, recording: Recording::default(), trace };
        let properties = properties(arch);
        Arc::new(Self { properties, state: Mutex::new(state) })
    }

    /// Returns the number of modules loaded so far.
    pub fn n_modules(&self) -> usize {
        self.state().modules.len()
    }

    /// Returns the launches of recorded steps so far.
    pub fn recorded_launches(&self) -> usize {
        self.state().recording.launches
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the properties of an emulated device of compute capability `arch / 10`.
pub(crate) fn properties(arch: u32) -> GpuProperties {
    // From the table of compute capabilities in the CUDA C++ programming guide.
    let shared_kib = match arch {
        80 => 163,
        89 => 99,
        90 => 227,
        _ => panic!("no emulated device of compute capability {arch}"),
    };
    GpuProperties {
        name: "emulator".to_owned(),
        arch,
        // Few, so that small tests split work over blocks too.
        n_sms: 4,
        shared_per_block: shared_kib * 1024,
        total_bytes: 1 << 30,
        // Loads any PTX version of the compiler.
        driver: CudaVersion { major: u32::MAX, minor: 0 },
    }
}

/// Environment variable that, with the value 1, makes a test fail that would be skipped without
/// NVRTC.
const REQUIRE_NVRTC: &str = "KVANT_REQUIRE_NVRTC";

/// Returns `found`, or `None` without NVRTC.
///
/// Prints `skipped: ..`, or fails where `KVANT_REQUIRE_NVRTC=1`. Every test that compiles calls
/// this function.
pub(crate) fn or_skip<T>(found: Result<T, CudaError>) -> Option<T> {
    let is_required = std::env::var(REQUIRE_NVRTC).is_ok_and(|value| value == "1");
    match found {
        Ok(found) => Some(found),
        Err(error @ CudaError::NoNvrtc { .. }) if !is_required => {
            skipped(&error);
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// Prints `skipped: ..`: this test, or a part of it, does not run because of `reason`.
pub(crate) fn skipped(reason: &dyn Display) {
    let test = std::thread::current().name().unwrap_or("a test").to_owned();
    // Not a macro: the test harness captures the output of macros in passing tests.
    let _ = io::stderr().write_all(format!("skipped: {test}: {reason}\n").as_bytes());
}

/// Returns a context on a new emulated device, or [`or_skip`].
pub(crate) fn context(arch: u32) -> Option<Context> {
    or_skip(Context::emulated(Emulator::new(arch)))
}

/// Returns a device on a new emulated device, or [`or_skip`].
pub(crate) fn device(arch: u32) -> Option<CudaDevice> {
    Some(CudaDevice::on(context(arch)?, "emulator".to_owned(), true))
}

/// Returns a buffer that holds `values`.
pub(crate) fn upload(cx: &Context, values: &[f32]) -> CudaBuffer {
    let buffer = uninitialized(cx, values.len());
    cx.gpu().write(buffer.ptr(), bytemuck::cast_slice(values)).unwrap();
    buffer
}

/// Returns a buffer of `len` values that counts as never written: a kernel that reads an unwritten
/// value fails.
pub(crate) fn uninitialized(cx: &Context, len: usize) -> CudaBuffer {
    CudaBuffer::uninitialized(cx.arena(), len).unwrap()
}

/// Returns the values of a buffer, all of which have been written.
pub(crate) fn download(cx: &Context, buffer: &CudaBuffer) -> Vec<f32> {
    let mut values = vec![0.0; buffer.len()];
    cx.gpu().read(buffer.ptr(), bytemuck::cast_slice_mut(&mut values)).unwrap();
    values
}

fn failed(call: &str, problem: impl std::fmt::Display) -> CudaError {
    CudaError::call(call, problem.to_string())
}

impl Gpu for Emulator {
    fn properties(&self) -> &GpuProperties {
        &self.properties
    }

    fn free_bytes(&self) -> Result<usize, CudaError> {
        Ok(self.properties.total_bytes - self.state().machine.used())
    }

    fn alloc(&self, bytes: usize) -> Result<DevicePtr, CudaError> {
        let free = self.free_bytes()?;
        if bytes > free {
            return Err(CudaError::OutOfMemory { bytes, free });
        }
        Ok(self.state().machine.alloc(bytes))
    }

    fn free(&self, ptr: DevicePtr) {
        self.state().machine.free(ptr).expect("memory is freed once");
    }

    fn write(&self, dst: DevicePtr, src: &[u8]) -> Result<(), CudaError> {
        self.state().machine.write(dst, src).map_err(|error| failed("write", error))
    }

    fn upload(
        &self,
        dst: DevicePtr,
        n_bytes: usize,
        unit: usize,
        fill: &mut dyn FnMut(usize, &mut [u8]),
    ) -> Result<(), CudaError> {
        self.state().recording.check_off("upload")?;
        // Pieces of one unit: the `fill` closure cannot rely on larger ones.
        let mut piece = vec![0xa5; unit];
        for offset in (0..n_bytes).step_by(unit.max(1)) {
            fill(offset, &mut piece);
            // Weights: kernels may load them before those before have ended.
            let written = self.state().machine.write_constant(dst + offset as u64, &piece);
            written.map_err(|error| failed("upload", error))?;
        }
        Ok(())
    }

    fn read(&self, src: DevicePtr, dst: &mut [u8]) -> Result<(), CudaError> {
        self.state().recording.check_off("read")?;
        self.state().machine.read(src, dst).map_err(|error| failed("read", error))
    }

    fn finish(&self) -> Result<(), CudaError> {
        let mut state = self.state();
        state.machine.finish();
        state.recording.check_off("finish")
    }

    fn copy(&self, dst: DevicePtr, src: DevicePtr, bytes: usize) -> Result<(), CudaError> {
        self.state().machine.copy(dst, src, bytes).map_err(|error| failed("copy", error))
    }

    fn zero(&self, dst: DevicePtr, bytes: usize) -> Result<(), CudaError> {
        self.state().machine.zero(dst, bytes).map_err(|error| failed("zero", error))
    }

    fn load(&self, ptx: &str) -> Result<ModuleId, CudaError> {
        let mut state = self.state();
        state.recording.check_off("load")?;
        let module = state.machine.load(ptx).map_err(|error| failed("load", error))?;
        state.modules.push(module);
        if let Some(trace) = &mut state.trace {
            trace.load(ptx);
        }
        Ok(ModuleId(state.modules.len() - 1))
    }

    fn kernel(&self, module: ModuleId, name: &str) -> Result<KernelId, CudaError> {
        let mut state = self.state();
        if !state.modules[module.0].has(name) {
            return Err(failed("kernel", format!("no kernel {name}")));
        }
        state.kernels.push((module, name.to_owned()));
        Ok(KernelId(state.kernels.len() - 1))
    }

    fn launch(&self, kernel: KernelId, launch: Launch, params: &[u8]) -> Result<(), CudaError> {
        let State { machine, modules, kernels, recording, trace } = &mut *self.state();
        recording.launches += usize::from(recording.is_on);
        let (module, name) = &kernels[kernel.0];
        let shared_bytes = launch.shared_bytes as usize;
        let all_bytes = modules[module.0].shared_bytes(name, shared_bytes).unwrap_or(0);
        if all_bytes > self.properties.shared_per_block as usize {
            return Err(failed("launch", format!("{all_bytes} bytes of shared memory")));
        }
        let grid = Grid { blocks: launch.grid, threads: launch.block, shared_bytes };
        let ran = machine.launch(&modules[module.0], name, grid, params);
        if let Some(trace) = trace {
            trace.launch(*module, name, machine.path());
        }
        ran.map_err(|fault| failed("launch", fault))
    }

    fn timed(&self, _: &mut dyn FnMut() -> Result<(), CudaError>) -> Result<f64, CudaError> {
        Err(failed("timed", "an emulator has no clock"))
    }

    fn begin(&self) -> Result<(), CudaError> {
        let mut state = self.state();
        state.recording.check_off("begin")?;
        state.recording.is_on = true;
        Ok(())
    }

    fn end(&self) -> Result<(), CudaError> {
        self.state().recording.is_on = false;
        Ok(())
    }
}
