//! The arena on a device that only records allocations.

use super::*;
use crate::{CudaVersion, GpuProperties, KernelId, Launch, ModuleId};

/// Allocates addresses, and records the live allocations and how often bytes were zeroed.
struct FakeGpu {
    properties: GpuProperties,
    live: Mutex<BTreeMap<DevicePtr, usize>>,
    zeroed: Mutex<Vec<(DevicePtr, usize)>>,
}

impl FakeGpu {
    fn new(total_bytes: usize) -> Arc<Self> {
        let driver = CudaVersion { major: 13, minor: 0 };
        let (name, arch, n_sms, shared_per_block) = ("books".to_owned(), 80, 1, 0);
        let properties = GpuProperties { name, arch, n_sms, shared_per_block, total_bytes, driver };
        Arc::new(Self { properties, live: Mutex::default(), zeroed: Mutex::default() })
    }

    /// Returns the bytes that the device has lost: the driver rounds each allocation up.
    fn used(&self) -> usize {
        locked(&self.live).values().map(|bytes| bytes.next_multiple_of(DRIVER_UNIT)).sum()
    }
}

impl Gpu for FakeGpu {
    fn properties(&self) -> &GpuProperties {
        &self.properties
    }

    fn free_bytes(&self) -> Result<usize, CudaError> {
        Ok(self.properties.total_bytes - self.used())
    }

    fn alloc(&self, bytes: usize) -> Result<DevicePtr, CudaError> {
        let free = self.free_bytes()?;
        if bytes.next_multiple_of(DRIVER_UNIT) > free {
            return Err(CudaError::OutOfMemory { bytes, free });
        }
        let mut live = locked(&self.live);
        let end = live.last_key_value().map_or(1 << 20, |(ptr, bytes)| ptr + *bytes as u64);
        let ptr = end.next_multiple_of(256) + 4096;
        live.insert(ptr, bytes);
        Ok(ptr)
    }

    fn free(&self, ptr: DevicePtr) {
        locked(&self.live).remove(&ptr).expect("freed once");
    }

    fn zero(&self, dst: DevicePtr, bytes: usize) -> Result<(), CudaError> {
        locked(&self.zeroed).push((dst, bytes));
        Ok(())
    }

    fn write(&self, _: DevicePtr, _: &[u8]) -> Result<(), CudaError> {
        unimplemented!()
    }

    fn finish(&self) -> Result<(), CudaError> {
        Ok(())
    }

    fn upload(
        &self,
        _: DevicePtr,
        _: usize,
        _: usize,
        _: &mut dyn FnMut(usize, &mut [u8]),
    ) -> Result<(), CudaError> {
        unimplemented!()
    }

    fn read(&self, _: DevicePtr, _: &mut [u8]) -> Result<(), CudaError> {
        unimplemented!()
    }

    fn copy(&self, _: DevicePtr, _: DevicePtr, _: usize) -> Result<(), CudaError> {
        Ok(())
    }

    fn timed(&self, _: &mut dyn FnMut() -> Result<(), CudaError>) -> Result<f64, CudaError> {
        unimplemented!()
    }

    fn load(&self, _: &str) -> Result<ModuleId, CudaError> {
        unimplemented!()
    }

    fn kernel(&self, _: ModuleId, _: &str) -> Result<KernelId, CudaError> {
        unimplemented!()
    }

    fn launch(&self, _: KernelId, _: Launch, _: &[u8]) -> Result<(), CudaError> {
        unimplemented!()
    }
}

fn arena(total_bytes: usize) -> (Arc<FakeGpu>, Arc<Arena>) {
    let gpu = FakeGpu::new(total_bytes);
    let arena = Arena::new(Arc::clone(&gpu) as Arc<dyn Gpu>);
    (gpu, arena)
}

fn assert_disjoint(blocks: &[Block]) {
    let mut ranges: Vec<_> = blocks.iter().map(|b| b.ptr..b.ptr + b.bytes as u64).collect();
    ranges.sort_by_key(|range| range.start);
    assert!(ranges.windows(2).all(|pair| pair[0].end <= pair[1].start), "{ranges:x?}");
    assert!(blocks.iter().all(|block| block.ptr % UNIT as u64 == 0));
}

#[test]
fn small_pages_share_few_allocations_with_little_overhead() {
    let (gpu, arena) = arena(1 << 30);
    let pages: Vec<_> = (0..10_000).map(|_| arena.take_zeroed(6400).unwrap()).collect();
    assert_disjoint(&pages);
    assert!(locked(&gpu.live).len() <= 31);
    assert!(gpu.used() <= 10_000 * 6400 * 104 / 100);
    // A slab is zeroed as a whole.
    assert_eq!(locked(&gpu.zeroed).len(), locked(&gpu.live).len());
}

#[test]
fn blocks_of_any_size_lie_apart_and_a_used_one_is_zeroed_again() {
    let (gpu, arena) = arena(1 << 30);
    let sizes = [0, 1, 127, 128, 129, 4352, 6400, 1 << 20, (1 << 20) + 1, 3 << 20];
    let blocks: Vec<_> = sizes.iter().flat_map(|&n| (0..3).map(move |_| n)).collect();
    let blocks: Vec<_> = blocks.into_iter().map(|n| arena.take(n).unwrap()).collect();
    assert!(blocks.iter().zip(sizes.iter().flat_map(|n| [n; 3])).all(|(block, &n)| block.bytes >= n));
    assert_disjoint(&blocks);
    drop(blocks);
    // All fresh slots of a slab, then a returned one.
    let slots = slots_per_slab(1 << 20);
    let blocks: Vec<_> = (0..slots).map(|_| arena.take_zeroed(1 << 20).unwrap()).collect();
    let (ptr, before) = (blocks[0].ptr, locked(&gpu.zeroed).len());
    drop(blocks);
    let again: Vec<_> = (0..slots).map(|_| arena.take_zeroed(1 << 20).unwrap()).collect();
    assert!(again.iter().any(|block| block.ptr == ptr));
    assert_eq!(locked(&gpu.zeroed).len(), before + slots);
}

#[test]
fn memory_goes_back_to_the_device() {
    let (gpu, arena) = arena(1 << 30);
    for size in [6400, 17_408, 32_768] {
        let pages: Vec<_> = (0..2000).map(|_| arena.take(size).unwrap()).collect();
        let peak = gpu.used();
        assert!(peak >= 2000 * size);
        drop(pages);
    }
    // One slab of each size stays for later allocations.
    assert!(gpu.used() <= 3 * DRIVER_UNIT, "{}", gpu.used());
    let scratch = arena.take_scratch(5 << 20).unwrap();
    let ptr = scratch.ptr;
    drop(scratch);
    assert_eq!(arena.take_scratch(6 << 20).unwrap().ptr, ptr, "scratch is cached");
    drop(arena);
    assert_eq!(gpu.used(), 0);
}

/// Returns the bytes of a page of Llama-3-8B: 128 tokens of 32 layers with 8 KV heads of 128, keys
/// and values of so many bits per 32, and the centres of coded keys.
fn page_of_llama(bits: usize) -> usize {
    let n_values = 128 * 32 * 8 * 128 * 2;
    let centres = if bits < 512 { 32 * 8 * 128 * size_of::<u16>() } else { 0 };
    n_values / 32 * bits / 8 + centres
}

#[test]
fn pages_of_megabytes_cost_the_device_what_they_count() {
    // Bits of 32 values of turbo2, turbo3, turbo4, q8_0 and f16.
    for bits in [68, 100, 132, 272, 512] {
        let (gpu, arena) = arena(80 << 30);
        let pages: Vec<_> = (0..2000).map(|_| arena.take_zeroed_page(page_of_llama(bits)).unwrap()).collect();
        assert_disjoint(&pages);
        let counted: usize = pages.iter().map(|page| page.bytes).sum();
        let lost = gpu.used();
        // 2 %, and a slab of which one page is used.
        let most = counted + counted / 50 + MAX_SLAB;
        assert!((counted..=most).contains(&lost), "{bits}: {counted} counted, {lost} lost");
        // Driver calls are rare.
        assert!(locked(&gpu.live).len() * 4 <= pages.len(), "{bits}: {}", locked(&gpu.live).len());
        drop(pages);
        assert!(gpu.used() <= MAX_SLAB, "one slab stays");
    }
}

#[test]
fn slabs_of_any_size_lose_little() {
    for slot in (1..=3000).map(|n| n * 11 * UNIT).chain([UNIT, MAX_SLAB / 3 + UNIT, MAX_SLAB, 2 * MAX_SLAB]) {
        let n = slots_per_slab(slot);
        let size = (n * slot).next_multiple_of(DRIVER_UNIT);
        assert!(n >= 1 && (size <= MAX_SLAB || n == 1), "{slot}: {n}");
        // As many slots as fit the largest slab leave less than the driver's unit.
        let full = slot.max(MAX_SLAB.saturating_sub(slot));
        assert!((size - n * slot) * full <= DRIVER_UNIT * size, "{slot}: {n} slots of {size}");
    }
}

#[test]
fn the_last_pages_of_a_device_come_one_by_one() {
    let page = 3 << 20;
    let (gpu, arena) = arena(20 << 20);
    let pages: Vec<_> = std::iter::from_fn(|| arena.take_page(page).ok()).collect();
    assert_disjoint(&pages);
    assert_eq!(pages.len(), 5, "{} used", gpu.used());
    drop(pages);
    assert!(gpu.used() <= 4 << 20);
}

#[test]
fn conversations_that_end_leave_whole_slabs() {
    let (gpu, arena) = arena(80 << 30);
    let size = page_of_llama(100);
    let mut pages: Vec<_> = (0..640).map(|_| arena.take_page(size).unwrap()).collect();
    let before = gpu.used();
    // Each second one ends; as many others begin, and end.
    let kept: Vec<_> =
        pages.drain(..).enumerate().filter(|(i, _)| i % 2 == 0).map(|(_, page)| page).collect();
    let others: Vec<_> = (0..320).map(|_| arena.take_page(size).unwrap()).collect();
    assert_eq!(gpu.used(), before, "free slots are used first");
    drop((kept, others));
    assert!(gpu.used() <= MAX_SLAB);
}

#[test]
fn cached_scratch_is_freed_before_memory_runs_out() {
    let (_, arena) = arena(20 << 20);
    drop(arena.take_scratch(16 << 20).unwrap());
    let block = arena.take(18 << 20).unwrap();
    let error = arena.take(4 << 20).unwrap_err();
    assert_eq!(error, CudaError::OutOfMemory { bytes: 4 << 20, free: 2 << 20 });
    drop(block);
    arena.take(4 << 20).unwrap();
}

#[test]
fn the_device_has_the_address_of_every_page_after_any_change() {
    let Some(cx) = crate::emulator::context(80) else { return };
    let page = || CudaPage::zeroed(cx.arena(), 256).unwrap();
    let check = |table: &PageAddresses, pages: &[CudaPage]| {
        let mut on_device = vec![0; pages.len()];
        let ptr = table.on_device(&cx).unwrap();
        cx.gpu().read(ptr, bytemuck::cast_slice_mut(&mut on_device)).unwrap();
        assert_eq!(on_device, pages.iter().map(CudaPage::ptr).collect::<Vec<_>>());
    };
    let (mut table, mut pages) = (PageAddresses::default(), Vec::new());
    for n in [1, 2, 16, 17, 100] {
        while pages.len() < n {
            pages.push(page());
            table.set(pages.len() - 1, pages.last().unwrap());
        }
        check(&table, &pages);
    }
    for index in [99, 0, 50] {
        pages[index] = page();
        table.set(index, &pages[index]);
    }
    check(&table, &pages);
    let fork = table.clone();
    pages.truncate(40);
    table.truncate(40);
    pages[39] = page();
    table.set(39, &pages[39]);
    check(&table, &pages);
    assert_ne!(fork.on_device(&cx).unwrap(), table.on_device(&cx).unwrap(), "a fork has a list of its own");
}

/// A sequence that continues a saved one lacks the blocks before its window.
#[test]
fn absent_blocks_do_not_shift_the_addresses_of_others() {
    let Some(cx) = crate::emulator::context(80) else { return };
    let (mut table, page) = (PageAddresses::default(), CudaPage::zeroed(cx.arena(), 256).unwrap());
    table.set(2, &page);
    let mut on_device = [DevicePtr::MAX; 3];
    cx.gpu().read(table.on_device(&cx).unwrap(), bytemuck::cast_slice_mut(&mut on_device)).unwrap();
    assert_eq!(on_device, [0, 0, page.ptr()]);
}
