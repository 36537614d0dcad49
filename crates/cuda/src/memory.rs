//! Device memory: an arena for the many small pages of a cache, and the buffers and pages allocated
//! from it.
//!
//! A page of the cache has a few KB to a few MB, of which a long context has thousands, while the
//! driver takes microseconds for an allocation and rounds it up to 2 MiB. So pages, and all other
//! blocks up to 1 MiB, come from *slabs* of equal slots, of a size that the driver's rounding costs
//! little; larger blocks come from the driver. An unused slab returns to the driver, except one per
//! size. Scratch memory is cached for the next op, large blocks until the device runs out.
//!
//! All work on a device runs in order, so a block can be reused while kernels that use it are still
//! queued.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvant_backend::{BackendError, Buffer, Page, PageTable};

use crate::{Context, CudaError, DevicePtr, Gpu};

/// Size unit and alignment of blocks: a memory transaction.
const UNIT: usize = 128;
/// Maximum block size from slabs, except of pages; larger blocks come from the driver one by one.
const MAX_SLOT: usize = 1 << 20;
/// The driver rounds allocations up to multiples of this.
const DRIVER_UNIT: usize = 2 << 20;
/// Maximum size of a slab of several slots.
const MAX_SLAB: usize = 64 << 20;
/// Slots that a slab has at least where that size allows them, so that driver calls are rare.
const MIN_SLOTS: usize = 16;
/// Reciprocal of the fraction of a slab that may be lost.
const MAX_LOSS: usize = 64;
/// Minimum capacity of a list of page addresses.
const MIN_ADDRESSES: usize = 16;
const NO_SCRATCH: [Vec<DevicePtr>; usize::BITS as usize] = [const { Vec::new() }; usize::BITS as usize];

/// The allocator of device memory.
pub(crate) struct Arena {
    gpu: Arc<dyn Gpu>,
    classes: Mutex<HashMap<usize, SlabClass>>,
    /// Unused scratch blocks, by the logarithm of their size. Those of up to `max_slot` are slots.
    cached_scratch: Mutex<[Vec<DevicePtr>; usize::BITS as usize]>,
    /// Size unit of blocks.
    unit: usize,
    /// Maximum block size from slabs, except of pages.
    max_slot: usize,
    /// Maximum size of pages from slabs.
    max_page_slot: usize,
}

/// The slabs of one slot size, by address.
#[derive(Default)]
struct SlabClass {
    slabs: BTreeMap<DevicePtr, Slab>,
    /// Slabs with a free slot. The first one is used next, so that the others become empty.
    open: BTreeSet<DevicePtr>,
    /// The slab that was emptied last.
    spare: Option<DevicePtr>,
}

/// Contiguous slots of equal size.
struct Slab {
    n_slots: u32,
    /// Slots that were used once and returned.
    free: Vec<u32>,
    /// Slots from here on are unused, and zero.
    fresh: u32,
    used: u32,
}

impl Arena {
    pub fn new(gpu: Arc<dyn Gpu>) -> Arc<Self> {
        Arc::new(Self {
            gpu,
            classes: Mutex::default(),
            cached_scratch: Mutex::new(NO_SCRATCH),
            unit: UNIT,
            max_slot: MAX_SLOT,
            max_page_slot: usize::MAX,
        })
    }

    /// Creates an arena that requests each block from the device, so that an emulator detects
    /// out-of-bounds accesses and uninitialized reads.
    #[cfg(test)]
    pub fn without_slabs(gpu: Arc<dyn Gpu>) -> Arc<Self> {
        // 16 bytes: the longest load of a thread.
        Arc::new(Self {
            gpu,
            classes: Mutex::default(),
            cached_scratch: Mutex::new(NO_SCRATCH),
            unit: 16,
            max_slot: 0,
            max_page_slot: 0,
        })
    }

    /// Allocates at least `bytes` of uninitialized memory.
    pub fn take(self: &Arc<Self>, bytes: usize) -> Result<Block, CudaError> {
        Ok(self.allocate(bytes, self.max_slot)?.block)
    }

    /// Allocates at least `bytes` of zeros.
    pub fn take_zeroed(self: &Arc<Self>, bytes: usize) -> Result<Block, CudaError> {
        self.allocate(bytes, self.max_slot)?.zeroed()
    }

    /// Allocates a page of at least `bytes` of uninitialized memory.
    pub fn take_page(self: &Arc<Self>, bytes: usize) -> Result<Block, CudaError> {
        Ok(self.allocate(bytes, self.max_page_slot)?.block)
    }

    /// Allocates a page of at least `bytes` of zeros.
    pub fn take_zeroed_page(self: &Arc<Self>, bytes: usize) -> Result<Block, CudaError> {
        self.allocate(bytes, self.max_page_slot)?.zeroed()
    }

    /// Allocates at least `bytes` of scratch memory. Sizes are few, so that the next request reuses
    /// the memory of the last one.
    pub fn take_scratch(self: &Arc<Self>, bytes: usize) -> Result<Block, CudaError> {
        if self.max_slot == 0 {
            return self.take(bytes);
        }
        let bytes = bytes.max(UNIT).next_power_of_two();
        let cached = locked(&self.cached_scratch)[bytes.ilog2() as usize].pop();
        let ptr = match cached {
            Some(ptr) => ptr,
            None if bytes > self.max_slot => self.alloc(bytes)?,
            None => self.take_slot(bytes)?.0,
        };
        Ok(self.block(ptr, bytes, Origin::Scratch))
    }

    /// Allocates at least `bytes`, from a slab up to `max_slot`.
    fn allocate(self: &Arc<Self>, bytes: usize, max_slot: usize) -> Result<Allocated, CudaError> {
        let bytes = bytes.max(1).next_multiple_of(self.unit);
        if bytes > max_slot {
            let block = self.block(self.alloc(bytes)?, bytes, Origin::Driver);
            return Ok(Allocated { block, is_zero: false });
        }
        let (ptr, is_zero) = self.take_slot(bytes)?;
        Ok(Allocated { block: self.block(ptr, bytes, Origin::Slab), is_zero })
    }

    /// Takes a slot; returns whether it is zero too.
    fn take_slot(&self, bytes: usize) -> Result<(DevicePtr, bool), CudaError> {
        locked(&self.classes).entry(bytes).or_default().take(self, bytes)
    }

    fn block(self: &Arc<Self>, ptr: DevicePtr, bytes: usize, origin: Origin) -> Block {
        Block { arena: Arc::clone(self), ptr, bytes, origin }
    }

    /// Allocates from the driver; frees the cached scratch blocks before it fails.
    fn alloc(&self, bytes: usize) -> Result<DevicePtr, CudaError> {
        self.gpu
            .alloc(bytes)
            .or_else(|error| if self.free_scratch() { self.gpu.alloc(bytes) } else { Err(error) })
    }

    /// Frees the cached scratch blocks that are no slots; returns whether there are any.
    fn free_scratch(&self) -> bool {
        let mut cached = locked(&self.cached_scratch);
        let slot_sizes = (usize::BITS - self.max_slot.leading_zeros()) as usize;
        let blocks: Vec<_> = cached[slot_sizes..].iter_mut().flat_map(std::mem::take).collect();
        drop(cached);
        blocks.iter().for_each(|&ptr| self.gpu.free(ptr));
        !blocks.is_empty()
    }

    fn release(&self, block: &Block) {
        let Block { ptr, bytes, origin, .. } = *block;
        match origin {
            Origin::Scratch => locked(&self.cached_scratch)[bytes.ilog2() as usize].push(ptr),
            Origin::Driver => self.gpu.free(ptr),
            Origin::Slab => locked(&self.classes)
                .get_mut(&bytes)
                .expect("the class of a block")
                .release(&*self.gpu, ptr, bytes),
        }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for Arena {
    fn drop(&mut self) {
        // Every block holds the arena, so no slot is in use.
        let slabs =
            locked(&self.classes).values().flat_map(|class| class.slabs.keys().copied()).collect::<Vec<_>>();
        slabs.into_iter().for_each(|ptr| self.gpu.free(ptr));
        self.free_scratch();
    }
}

impl SlabClass {
    /// Returns a slot, and whether it is zero.
    fn take(&mut self, arena: &Arena, slot_bytes: usize) -> Result<(DevicePtr, bool), CudaError> {
        let base = match self.open.first() {
            Some(&base) => base,
            None => self.add_slab(arena, slot_bytes)?,
        };
        let slab = self.slabs.get_mut(&base).expect("an open slab exists");
        // Fresh slots first: they need no zeroing.
        let is_fresh = slab.fresh < slab.n_slots;
        let slot = if is_fresh {
            slab.fresh += 1;
            slab.fresh - 1
        } else {
            slab.free.pop().expect("an open slab has a free slot")
        };
        slab.used += 1;
        if slab.used == slab.n_slots {
            self.open.remove(&base);
        }
        Ok((base + u64::from(slot) * slot_bytes as u64, is_fresh))
    }

    /// Allocates a slab, of one slot where the device has no room for more.
    fn add_slab(&mut self, arena: &Arena, slot_bytes: usize) -> Result<DevicePtr, CudaError> {
        let mut n_slots = slots_per_slab(slot_bytes);
        let base = arena.alloc(n_slots * slot_bytes).or_else(|_| {
            n_slots = 1;
            arena.alloc(slot_bytes)
        })?;
        arena.gpu.zero(base, n_slots * slot_bytes).inspect_err(|_| arena.gpu.free(base))?;
        let n_slots = u32::try_from(n_slots).expect("at most MAX_SLAB / UNIT");
        self.slabs.insert(base, Slab { n_slots, free: Vec::new(), fresh: 0, used: 0 });
        self.open.insert(base);
        Ok(base)
    }

    fn release(&mut self, gpu: &dyn Gpu, ptr: DevicePtr, slot_bytes: usize) {
        let (&base, slab) = self.slabs.range_mut(..=ptr).next_back().expect("the slab of a block");
        let slot = (ptr - base) / slot_bytes as u64;
        slab.free.push(u32::try_from(slot).expect("a slab has few slots"));
        slab.used -= 1;
        self.open.insert(base);
        if slab.used > 0 {
            return;
        }
        match self.spare.replace(base) {
            // It may have been used since it became the spare, or be the same one.
            Some(other) if other != base && self.slabs[&other].used == 0 => {
                self.slabs.remove(&other);
                self.open.remove(&other);
                gpu.free(other);
            }
            _ => {}
        }
    }
}

/// Returns the slots of a slab: the smallest multiple of [`DRIVER_UNIT`] with [`MIN_SLOTS`] of them
/// that they fill but for [`MAX_LOSS`], or that which they fill best.
fn slots_per_slab(slot_bytes: usize) -> usize {
    let least = (MIN_SLOTS * slot_bytes).min(MAX_SLAB);
    let sizes = (1..).map(|n| n * DRIVER_UNIT).take_while(|&size| size <= MAX_SLAB);
    let sizes = sizes.filter(|&size| size >= slot_bytes);
    let lost = |size: usize| size % slot_bytes;
    let enough = sizes.clone().find(|&size| size >= least && lost(size) <= size / MAX_LOSS);
    let best = || sizes.min_by(|&a, &b| (lost(a) * b).cmp(&(lost(b) * a)).then(b.cmp(&a)));
    enough.or_else(best).map_or(1, |size| size / slot_bytes)
}

/// A block of undefined contents.
struct Allocated {
    block: Block,
    /// Whether it is known to be zero.
    is_zero: bool,
}

impl Allocated {
    fn zeroed(self) -> Result<Block, CudaError> {
        let Self { block, is_zero } = self;
        if !is_zero {
            block.arena.gpu.zero(block.ptr, block.bytes)?;
        }
        Ok(block)
    }
}

/// Where a block returns to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Origin {
    /// The slabs of its size.
    Slab,
    Driver,
    /// Scratch memory, cached for the next op.
    Scratch,
}

/// A range of device memory, returned to the arena when dropped.
pub(crate) struct Block {
    arena: Arc<Arena>,
    ptr: DevicePtr,
    bytes: usize,
    origin: Origin,
}

impl Block {
    /// Returns its address.
    pub(crate) fn ptr(&self) -> DevicePtr {
        self.ptr
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        self.arena.release(self);
    }
}

impl std::fmt::Debug for Block {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Block({} bytes at {:#x})", self.bytes, self.ptr)
    }
}

/// f32 values on the device.
#[derive(Debug)]
pub struct CudaBuffer {
    block: Block,
    len: usize,
}

impl CudaBuffer {
    /// Creates a buffer of `len` zeros.
    pub(crate) fn zeroed(arena: &Arc<Arena>, len: usize) -> Result<Self, CudaError> {
        Ok(Self { block: arena.take_zeroed(len.saturating_mul(size_of::<f32>()))?, len })
    }

    /// Creates a buffer of `len` uninitialized values.
    #[cfg(test)]
    pub(crate) fn uninitialized(arena: &Arc<Arena>, len: usize) -> Result<Self, CudaError> {
        Ok(Self { block: arena.take(len.saturating_mul(size_of::<f32>()))?, len })
    }

    /// Returns the address of its first value.
    pub(crate) fn ptr(&self) -> DevicePtr {
        self.block.ptr
    }

    /// Returns the number of values.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the buffer is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Buffer for CudaBuffer {
    fn n_values(&self) -> usize {
        self.len
    }
}

/// A page of the KV cache on the device.
#[derive(Debug)]
pub struct CudaPage {
    block: Block,
}

impl CudaPage {
    /// Creates a zeroed page. Its size, as reported, is rounded up to whole memory transactions.
    pub(crate) fn zeroed(arena: &Arc<Arena>, n_bytes: usize) -> Result<Self, CudaError> {
        Ok(Self { block: arena.take_zeroed_page(n_bytes)? })
    }

    /// Returns its address.
    pub(crate) fn ptr(&self) -> DevicePtr {
        self.block.ptr
    }
}

/// The addresses of a sequence's blocks, cached on the device for the attention kernels.
#[derive(Debug, Default)]
pub struct PageAddresses {
    addresses: Vec<DevicePtr>,
    on_device: Mutex<OnDevice>,
}

/// A copy on the device.
#[derive(Debug, Default)]
struct OnDevice {
    block: Option<Block>,
    /// The first `valid` addresses are current.
    valid: usize,
}

impl PageAddresses {
    /// Returns the device address of the list, `[blocks]` of 8 bytes; writes the changed addresses.
    ///
    /// # Errors
    /// When memory runs out or the device cannot be written.
    pub(crate) fn on_device(&self, cx: &Context) -> Result<DevicePtr, CudaError> {
        let mut device = locked(&self.on_device);
        let bytes = |len: usize| len * size_of::<DevicePtr>();
        let len = self.addresses.len();
        if device.block.as_ref().is_none_or(|block| block.bytes < bytes(len)) {
            // Spare capacity makes reallocations rare.
            let block = cx.arena().take(bytes(len.next_power_of_two().max(MIN_ADDRESSES)))?;
            *device = OnDevice { block: Some(block), valid: 0 };
        }
        let ptr = device.block.as_ref().map_or(0, Block::ptr);
        if device.valid < len {
            let changed = bytemuck::cast_slice(&self.addresses[device.valid..]);
            cx.gpu().write(ptr + bytes(device.valid) as u64, changed)?;
            device.valid = len;
        }
        Ok(ptr)
    }
}

impl Clone for PageAddresses {
    fn clone(&self) -> Self {
        Self { addresses: self.addresses.clone(), on_device: Mutex::default() }
    }
}

impl PageTable<CudaPage> for PageAddresses {
    fn set(&mut self, index: usize, page: &CudaPage) {
        // Blocks that no query sees may be absent: no kernel reads their addresses.
        self.addresses.resize(self.addresses.len().max(index + 1), 0);
        self.addresses[index] = page.ptr();
        self.invalidate(index);
    }

    fn truncate(&mut self, len: usize) {
        self.addresses.truncate(len);
        self.invalidate(len);
    }
}

impl PageAddresses {
    /// Marks the addresses from `index` on as changed.
    fn invalidate(&mut self, index: usize) {
        let device = self.on_device.get_mut().unwrap_or_else(PoisonError::into_inner);
        device.valid = device.valid.min(index);
    }
}

impl Page for CudaPage {
    type Table = PageAddresses;

    fn n_bytes(&self) -> usize {
        self.block.bytes
    }

    fn duplicate(&self) -> Result<Self, BackendError> {
        let arena = &self.block.arena;
        let block = arena.take_page(self.block.bytes)?;
        arena.gpu.copy(block.ptr, self.block.ptr, block.bytes)?;
        Ok(Self { block })
    }
}

#[cfg(test)]
mod tests;
