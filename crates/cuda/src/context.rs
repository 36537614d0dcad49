//! The state that every op needs: the device, its compiled kernels and its memory.

use std::hash::{Hash, Hasher};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::thread;

use bytemuck::NoUninit;
use hashbrown::{Equivalent, HashMap};

use crate::append::Writes;
use crate::attend::Splits;
use crate::matmul::GemmPlans;
use crate::memory::{Arena, Block};
use crate::module::{Build, Compiler};
use crate::plans::Plans;
use crate::rehearsal::Rehearsal;
use crate::turns::{Recording, Turns};
use crate::{CudaError, Define, DevicePtr, Gpu, KernelId, Launch, ModuleId, Source};

/// Number of counters that [`Context::counters`] returns.
pub(crate) const MAX_COUNTERS: usize = 1024;

/// A device, its compiled kernels and its memory.
pub(crate) struct Context {
    gpu: Arc<dyn Gpu>,
    /// `None` in a rehearsal, which loads nothing.
    compiler: Option<Compiler>,
    kernels: RwLock<HashMap<KernelKey, KernelId>>,
    modules: Mutex<HashMap<ModuleKey, LoadedModule>>,
    turns: Turns,
    arena: Arc<Arena>,
    counters: Mutex<Option<Block>>,
    attend_plans: Plans<Splits>,
    append_plans: Plans<Writes>,
    gemm_plans: GemmPlans,
}

/// A module, once it is loaded. A thread that loads it holds its lock, and no other.
type LoadedModule = Arc<Mutex<Option<ModuleId>>>;

/// A source and the macros it was compiled with.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct ModuleKey {
    source: SourceKey,
    defines: Vec<Define>,
}

/// A source, of which there is one of its name.
#[derive(Debug, Clone, Copy)]
struct SourceKey(&'static Source);

impl PartialEq for SourceKey {
    fn eq(&self, other: &Self) -> bool {
        self.0.name == other.0.name
    }
}

impl Eq for SourceKey {}

impl Hash for SourceKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.name.hash(state);
    }
}

/// A kernel of a module.
#[derive(Debug, PartialEq, Eq, Hash)]
struct KernelKey {
    module: ModuleKey,
    name: &'static str,
}

/// A [`KernelKey`] that owns nothing, with the same hash.
#[derive(Hash)]
struct KernelRef<'a> {
    source: SourceKey,
    defines: &'a [Define],
    name: &'static str,
}

impl Equivalent<KernelKey> for KernelRef<'_> {
    fn equivalent(&self, KernelKey { module, name }: &KernelKey) -> bool {
        (self.source, self.defines, self.name) == (module.source, &module.defines, name)
    }
}

impl Context {
    /// Creates a context on `gpu`, without compiling anything.
    pub fn new(gpu: Arc<dyn Gpu>) -> Self {
        let compiler = Compiler::new(gpu.properties());
        let arena = Arena::new(Arc::clone(&gpu));
        Self::with(gpu, Some(compiler), arena)
    }

    /// Creates a context that only notes the kernels that a device like this one would load.
    pub fn rehearsal(&self) -> Self {
        let gpu: Arc<dyn Gpu> = Arc::new(Rehearsal::new(self.gpu.properties().clone()));
        let arena = Arena::new(Arc::clone(&gpu));
        Self::with(gpu, None, arena)
    }

    fn with(gpu: Arc<dyn Gpu>, compiler: Option<Compiler>, arena: Arc<Arena>) -> Self {
        Self {
            gpu,
            compiler,
            kernels: RwLock::default(),
            modules: Mutex::default(),
            turns: Turns::default(),
            arena,
            counters: Mutex::default(),
            attend_plans: Plans::default(),
            append_plans: Plans::default(),
            gemm_plans: GemmPlans::default(),
        }
    }

    /// Creates a context on an emulator: without slabs, so that the emulator detects out-of-bounds
    /// accesses, and with its own PTX cache.
    ///
    /// # Errors
    /// [`CudaError::NoNvrtc`], as tests run kernels that the binary does not have.
    #[cfg(test)]
    pub(crate) fn emulated(gpu: Arc<dyn Gpu>) -> Result<Self, CudaError> {
        let kernel = || "test kernels".to_owned();
        crate::nvrtc::Nvrtc::find().ok_or_else(|| CudaError::NoNvrtc { kernel: kernel() })?;
        let folder = std::env::temp_dir().join("kvant-cuda-tests");
        let compiler = Compiler::with_cache(gpu.properties(), Some(folder));
        let arena = Arena::without_slabs(Arc::clone(&gpu));
        Ok(Self::with(gpu, Some(compiler), arena))
    }

    /// Returns the device.
    pub fn gpu(&self) -> &dyn Gpu {
        &*self.gpu
    }

    /// Compiles a source for this device, unless its PTX is at hand, without loading it.
    pub(crate) fn compile(&self, build: &Build) -> Result<(), CudaError> {
        self.compiler.as_ref().map_or(Ok(()), |compiler| compiler.prepare(build.source, &build.defines))
    }

    fn ptx(&self, source: &Source, defines: &[Define]) -> Result<String, CudaError> {
        self.compiler.as_ref().map_or_else(|| Ok(String::new()), |compiler| compiler.ptx(source, defines))
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

    /// Writes parameters that are too long to travel with a launch.
    ///
    /// # Errors
    /// When memory runs out or the device cannot be written.
    pub fn list(&self, bytes: &[u8]) -> Result<Block, CudaError> {
        let list = self.arena.take(bytes.len())?;
        self.gpu.write(list.ptr(), bytes)?;
        Ok(list)
    }

    /// Returns the plans of attention that the layers of this step share.
    pub fn attend_plans(&self) -> &Plans<Splits> {
        &self.attend_plans
    }

    /// Returns the plans of appends that the layers of this step share.
    pub fn append_plans(&self) -> &Plans<Writes> {
        &self.append_plans
    }

    /// Returns the plans of products by shape.
    pub fn gemm_plans(&self) -> &GemmPlans {
        &self.gemm_plans
    }

    /// Forgets the plans of the step before, as a step begins.
    pub fn forget_plans(&self) {
        self.attend_plans.forget();
        self.append_plans.forget();
    }

    /// Returns the kernel `name` of `source`, loaded at the first call.
    ///
    /// # Errors
    /// Those of [`Compiler::ptx`] and of [`Gpu::load`]; never another kernel in its place.
    pub fn kernel(&self, source: &'static Source, name: &'static str) -> Result<KernelId, CudaError> {
        self.kernel_with(source, &[], name)
    }

    /// Returns the kernel `name` of `source` compiled with macros.
    ///
    /// # Errors
    /// As [`Context::kernel`].
    pub fn kernel_with(
        &self,
        source: &'static Source,
        defines: &[Define],
        name: &'static str,
    ) -> Result<KernelId, CudaError> {
        let key = KernelRef { source: SourceKey(source), defines, name };
        let known = self.kernels.read().unwrap_or_else(PoisonError::into_inner).get(&key).copied();
        match known {
            Some(kernel) => Ok(kernel),
            None => self.load(ModuleKey { source: key.source, defines: defines.to_vec() }, name),
        }
    }

    /// Loads the module of a kernel, unless it is loaded. Other threads that need it wait; those
    /// that need another module do not. Nothing is loaded within a recorded step: a recording of
    /// this thread ends here.
    fn load(&self, key: ModuleKey, name: &'static str) -> Result<KernelId, CudaError> {
        let _turn = self.turns.load(&*self.gpu)?;
        let mut modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        let module = Arc::clone(modules.entry_ref(&key).or_default());
        drop(modules);
        let mut module = module.lock().unwrap_or_else(PoisonError::into_inner);
        let id = match *module {
            Some(id) => id,
            None => *module.insert(self.gpu.load(&self.ptx(key.source.0, &key.defines)?)?),
        };
        let kernel = self.gpu.kernel(id, name)?;
        let key = KernelKey { module: key, name };
        self.kernels.write().unwrap_or_else(PoisonError::into_inner).insert(key, kernel);
        Ok(kernel)
    }

    /// Loads the kernels that `rehearsal` has noted, on all cores. Returns how many they are.
    ///
    /// # Errors
    /// As [`Context::kernel`]: the first error.
    pub fn load_kernels(&self, rehearsal: &Self) -> Result<usize, CudaError> {
        let noted = rehearsal.kernels.read().unwrap_or_else(PoisonError::into_inner);
        let mut of_module = HashMap::<&ModuleKey, Vec<&'static str>>::new();
        noted.keys().for_each(|key| of_module.entry(&key.module).or_default().push(key.name));
        let modules: Vec<_> = of_module.into_iter().collect();
        on_all_cores(&modules, |(module, names)| {
            let load = |name: &&'static str| self.kernel_with(module.source.0, &module.defines, name);
            names.iter().try_for_each(|name| load(name).map(drop))
        })?;
        Ok(noted.len())
    }

    /// Begins to record what this thread queues, for graphs; `None` while a module is loaded.
    ///
    /// # Errors
    /// As [`Gpu::begin`].
    pub fn record(&self) -> Result<Option<Recording<'_>>, CudaError> {
        self.turns.record(&*self.gpu)
    }

    /// Queues a kernel; `params` is its one parameter.
    ///
    /// # Errors
    /// When the device rejects the launch.
    pub fn launch<P: NoUninit>(&self, kernel: KernelId, launch: Launch, params: &P) -> Result<(), CudaError> {
        self.gpu.launch(kernel, launch, bytemuck::bytes_of(params))
    }
}

/// Applies `work` to each item, on as many threads as there are cores: compiling a source and
/// loading a module take about a second of one core.
pub(crate) fn on_all_cores<T: Sync>(
    items: &[T],
    work: impl Fn(&T) -> Result<(), CudaError> + Sync,
) -> Result<(), CudaError> {
    let next = AtomicUsize::new(0);
    let take = || {
        let mut items = std::iter::from_fn(|| items.get(next.fetch_add(1, Ordering::Relaxed)));
        items.try_for_each(&work)
    };
    let n_threads = thread::available_parallelism().map_or(1, usize::from).min(items.len());
    thread::scope(|scope| {
        let threads: Vec<_> = (0..n_threads).map(|_| scope.spawn(take)).collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("the work does not panic"))
    })
}
