//! The state that every op needs: the device, its compiled kernels and its memory.

use std::sync::{Arc, Mutex, PoisonError};

use bytemuck::NoUninit;

use crate::memory::{Arena, Block};
use crate::module::{Build, Compiler};
use crate::{CudaError, CudaVersion, Define, DevicePtr, Gpu, KernelId, Launch, ModuleId, Source};

/// Number of counters that [`Context::counters`] returns.
pub(crate) const MAX_COUNTERS: usize = 512;

/// Number of lists that are kept for the next layers: those of a step, for some groups of layers.
const MAX_LISTS: usize = 16;

/// A device, its compiled kernels and its memory.
pub(crate) struct Context {
    gpu: Arc<dyn Gpu>,
    compiler: Compiler,
    loaded: Mutex<Loaded>,
    arena: Arc<Arena>,
    counters: Mutex<Option<Block>>,
    lists: Mutex<Vec<List>>,
}

/// Parameters that are too long to travel with a launch.
struct List {
    bytes: Vec<u8>,
    on_device: Block,
}

#[derive(Default)]
struct Loaded {
    modules: Vec<(ModuleKey, ModuleId)>,
    kernels: Vec<(usize, &'static str, KernelId)>,
}

/// A source and the macros it was compiled with.
#[derive(PartialEq, Eq)]
struct ModuleKey {
    source: &'static str,
    defines: Vec<Define>,
}

impl ModuleKey {
    fn is(&self, source: &Source, defines: &[Define]) -> bool {
        self.source == source.name && self.defines == defines
    }
}

impl Context {
    /// Creates a context on `gpu`, without compiling anything.
    ///
    /// # Errors
    /// [`CudaError::NoNvrtc`], or [`CudaError::OldDriver`] when the driver cannot load the
    /// compiler's output.
    pub fn new(gpu: Arc<dyn Gpu>) -> Result<Self, CudaError> {
        let compiler = Compiler::find()?;
        let (found, needed) = (gpu.properties().driver, compiler.version());
        if found < needed {
            let why = "the version of NVRTC here (update the driver, or install an older nvidia-cuda-nvrtc)";
            return Err(CudaError::OldDriver { found, needed, why });
        }
        let arena = Arena::new(Arc::clone(&gpu));
        Ok(Self {
            gpu,
            compiler,
            loaded: Mutex::default(),
            arena,
            counters: Mutex::default(),
            lists: Mutex::default(),
        })
    }

    /// Creates a context on an emulator: without slabs, so that the emulator detects out-of-bounds
    /// accesses, and with its own PTX cache.
    #[cfg(test)]
    pub(crate) fn emulated(gpu: Arc<dyn Gpu>) -> Result<Self, CudaError> {
        let compiler = Compiler::with_cache(Some(std::env::temp_dir().join("kvant-cuda-tests")))?;
        let arena = Arena::without_slabs(Arc::clone(&gpu));
        Ok(Self {
            gpu,
            compiler,
            loaded: Mutex::default(),
            arena,
            counters: Mutex::default(),
            lists: Mutex::default(),
        })
    }

    /// Returns the device.
    pub fn gpu(&self) -> &dyn Gpu {
        &*self.gpu
    }

    /// Returns the version of the compiler.
    pub fn nvrtc(&self) -> CudaVersion {
        self.compiler.version()
    }

    /// Compiles a source for this device without loading it.
    pub(crate) fn compile(&self, build: &Build) -> Result<(), CudaError> {
        self.compiler.ptx(build.source, &build.defines, self.gpu.properties().arch).map(drop)
    }

    /// Returns the memory arena.
    pub(crate) fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    /// Allocates at least `bytes` of uninitialized scratch memory, aligned to 128 bytes.
    ///
    /// When the block is dropped, later work may reuse it; queued work is not affected, as all work
    /// runs in order.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`].
    pub fn scratch(&self, bytes: usize) -> Result<Block, CudaError> {
        self.arena.take_scratch(bytes)
    }

    /// Returns [`MAX_COUNTERS`] counters of four bytes that are 0 between launches.
    ///
    /// The blocks of a launch count there how many of them are done, and the last one resets its
    /// counter. Every launch uses the same counters, as launches run in order.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`].
    pub fn counters(&self) -> Result<DevicePtr, CudaError> {
        let mut counters = self.counters.lock().unwrap_or_else(PoisonError::into_inner);
        match &*counters {
            Some(block) => Ok(block.ptr()),
            None => Ok(counters.insert(self.arena.take_zeroed(MAX_COUNTERS * size_of::<u32>())?).ptr()),
        }
    }

    /// Writes parameters that are too long to travel with a launch, and returns their address.
    ///
    /// The layers of a step have the same list or one of a few, which is written once.
    ///
    /// # Errors
    /// When memory runs out or the device cannot be written.
    pub fn list(&self, bytes: &[u8]) -> Result<DevicePtr, CudaError> {
        let mut lists = self.lists.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = lists.iter().find(|list| list.bytes == bytes) {
            return Ok(known.on_device.ptr());
        }
        if lists.len() == MAX_LISTS {
            lists.remove(0);
        }
        let on_device = self.arena.take(bytes.len())?;
        self.gpu.write(on_device.ptr(), bytes)?;
        let ptr = on_device.ptr();
        lists.push(List { bytes: bytes.to_vec(), on_device });
        Ok(ptr)
    }

    /// Forgets the lists, as a step begins: what a failed step should have written is unknown.
    pub fn forget_lists(&self) {
        self.lists.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Returns the kernel `name` of `source`, compiled at the first call.
    ///
    /// # Errors
    /// [`CudaError::Compile`]; never another kernel in its place.
    pub fn kernel(&self, source: &Source, name: &'static str) -> Result<KernelId, CudaError> {
        self.kernel_with(source, &[], name)
    }

    /// Returns the kernel `name` of `source` compiled with macros.
    ///
    /// # Errors
    /// As [`Context::kernel`].
    pub fn kernel_with(
        &self,
        source: &Source,
        defines: &[Define],
        name: &'static str,
    ) -> Result<KernelId, CudaError> {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        let module = match loaded.modules.iter().position(|(key, _)| key.is(source, defines)) {
            Some(index) => index,
            None => {
                let ptx = self.compiler.ptx(source, defines, self.gpu.properties().arch)?;
                let key = ModuleKey { source: source.name, defines: defines.to_vec() };
                loaded.modules.push((key, self.gpu.load(&ptx)?));
                loaded.modules.len() - 1
            }
        };
        let known = loaded.kernels.iter().find(|(index, known, _)| *index == module && *known == name);
        if let Some(&(_, _, kernel)) = known {
            return Ok(kernel);
        }
        let kernel = self.gpu.kernel(loaded.modules[module].1, name)?;
        loaded.kernels.push((module, name, kernel));
        Ok(kernel)
    }

    /// Queues a kernel; `params` is its one parameter.
    ///
    /// # Errors
    /// When the device rejects the launch.
    pub fn launch<P: NoUninit>(&self, kernel: KernelId, launch: Launch, params: &P) -> Result<(), CudaError> {
        self.gpu.launch(kernel, launch, bytemuck::bytes_of(params))
    }
}
