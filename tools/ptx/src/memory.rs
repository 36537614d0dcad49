//! Memory that tracks allocations, initialization, and the accesses of blocks and threads.

mod mbarrier;

use std::collections::BTreeMap;
use std::ops::Range;

use mbarrier::Mbarrier;
pub(crate) use mbarrier::check_bulk;

/// Bases of the memory spaces among generic addresses. Only global memory lies above 4 GiB, so
/// shared addresses fit 32 bits, and an address is the same in its own space and in the generic
/// one.
pub(crate) const SHARED_BASE: u64 = 0x1000_0000;
pub(crate) const LOCAL_BASE: u64 = 0x2000_0000;
pub(crate) const PARAM_BASE: u64 = 0x3000_0000;
const GLOBAL_BASE: u64 = 0x7f00_0000_0000;
/// Alignment of allocations, and the minimum distance between them.
const GUARD: u64 = 256;

/// An allocation in global memory.
#[derive(Debug)]
struct Allocation {
    bytes: Vec<u8>,
    /// The last writer of each byte: the number of a block, counted over all launches, or
    /// [`NO_WRITER`].
    writers: Vec<u32>,
}

/// Writer of uninitialized bytes.
const NO_WRITER: u32 = 0;
/// Writer of constants: bytes that no kernel writes.
const CONSTANT: u32 = 1;

impl Allocation {
    /// Checks that these bytes are written, and not by a block that may run concurrently with
    /// `block`, in a launch whose first block is `first`.
    fn check_read(
        &self,
        bytes: Range<usize>,
        [block, first]: [u32; 2],
        access: Access,
        acquired: &[u32],
    ) -> Result<(), String> {
        for (at, &writer) in bytes.clone().zip(&self.writers[bytes]) {
            if writer == NO_WRITER {
                return Err(format!("byte {at} of an allocation of {} was never written", self.bytes.len()));
            }
            // Blocks run in any order, and concurrently.
            let is_race = match access {
                Access::Plain => writer != block,
                Access::Constant => true,
                Access::Coherent => writer != block && !acquired.contains(&writer),
                Access::Atomic => false,
            };
            if writer >= first && is_race {
                return Err(race_fault(at, writer - first));
            }
        }
        Ok(())
    }

    /// Checks that none of these bytes is of a writer in `running`, which may not have ended.
    fn check_ended(&self, bytes: Range<usize>, running: &Range<u32>) -> Result<(), String> {
        match bytes.clone().find(|&at| running.contains(&self.writers[at])) {
            None => Ok(()),
            Some(at) => Err(format!(
                "a read before griddepcontrol.wait: byte {at} of an allocation of {} may be written by a kernel \
                 before this one",
                self.bytes.len()
            )),
        }
    }
}

/// Global memory.
#[derive(Debug)]
pub(crate) struct Global {
    allocations: BTreeMap<u64, Allocation>,
    next: u64,
    /// The current block; between launches, host writes count as those of the last block.
    block: u32,
    /// The first block of the launch.
    first: u32,
    /// Blocks of the launch whose writes were fenced before they changed the number at an address
    /// atomically.
    released: BTreeMap<u64, Vec<u32>>,
    /// Blocks whose release the current block has observed.
    acquired: Vec<u32>,
    /// Whether the current block has written since its last fence.
    is_unfenced: bool,
    /// The first writer that may still run when a kernel begins that waits for those before it only
    /// later (programmatic dependent launch).
    unsettled: u32,
    /// Whether the current thread has waited for the kernels before its own to end.
    has_waited: bool,
}

/// Kind of access.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    Plain,
    /// Through a cache that is not coherent within the launch.
    Constant,
    /// Bypasses such caches: sees the writes of blocks whose release the reader has observed.
    Coherent,
    /// Atomic with respect to the accesses of others.
    Atomic,
}

impl Global {
    pub fn new() -> Self {
        Self {
            allocations: BTreeMap::new(),
            next: GLOBAL_BASE,
            block: CONSTANT + 1,
            first: u32::MAX,
            released: BTreeMap::new(),
            acquired: Vec::new(),
            is_unfenced: false,
            unsettled: CONSTANT + 1,
            has_waited: true,
        }
    }

    /// Begins a launch of a kernel that `waits` for those before it, or that begins after their
    /// end.
    pub fn begin_launch(&mut self, waits: bool) {
        self.first = self.block + 1;
        self.released.clear();
        if !waits {
            self.unsettled = self.first;
        }
    }

    /// Waits for all kernels so far.
    pub fn settle(&mut self) {
        self.block += 1;
        self.unsettled = self.block;
    }

    /// Begins or resumes a thread, which may or may not have waited for the kernels before its own.
    pub fn begin_thread(&mut self, has_waited: bool) {
        self.has_waited = has_waited;
    }

    /// Begins the next block of the launch.
    pub fn begin_block(&mut self) {
        self.block += 1;
        self.acquired.clear();
        self.is_unfenced = false;
    }

    /// Orders all earlier writes of the block before its later accesses.
    pub fn fence(&mut self) {
        self.is_unfenced = false;
    }

    /// Records that the block changes the number at `address` atomically: it acquires the releases
    /// of earlier blocks there, and releases its own writes to later ones.
    pub fn synchronize_with(&mut self, address: u64) {
        let released = self.released.entry(address).or_default();
        self.acquired.extend_from_slice(released);
        if !self.is_unfenced {
            released.push(self.block);
        }
    }

    /// Ends the launch: its writes are visible to all later accesses.
    pub fn end_launch(&mut self) {
        self.first = u32::MAX;
        self.has_waited = true;
    }

    pub fn alloc(&mut self, bytes: usize) -> u64 {
        let address = self.next;
        self.next += (bytes as u64).next_multiple_of(GUARD) + GUARD;
        self.allocations
            .insert(address, Allocation { bytes: vec![0xcd; bytes], writers: vec![NO_WRITER; bytes] });
        address
    }

    pub fn free(&mut self, address: u64) -> Result<(), String> {
        let freed = self.allocations.remove(&address);
        freed.map(drop).ok_or_else(|| format!("{address:#x} was never allocated"))
    }

    /// Returns the bytes of all allocations.
    pub fn used(&self) -> usize {
        self.allocations.values().map(|allocation| allocation.bytes.len()).sum()
    }

    fn find(&mut self, address: u64, len: usize) -> Result<(&mut Allocation, usize), String> {
        let near = self.allocations.range_mut(..=address).next_back();
        let Some((&start, allocation)) = near else {
            return Err(format!("{len} bytes at {address:#x}: no allocation there"));
        };
        let (at, size) = ((address - start) as usize, allocation.bytes.len());
        if at.checked_add(len).is_none_or(|end| end > size) {
            return Err(format!(
                "{len} bytes at {address:#x}: byte {at} of the nearest allocation, which has {size}"
            ));
        }
        Ok((allocation, at))
    }

    pub fn load(&mut self, address: u64, out: &mut [u8], access: Access) -> Result<(), String> {
        let (block, first) = (self.block, self.first);
        let running = if self.has_waited { first..first } else { self.unsettled..first };
        let acquired = std::mem::take(&mut self.acquired);
        let found = self.find(address, out.len()).and_then(|(allocation, at)| {
            allocation.check_ended(at..at + out.len(), &running)?;
            allocation.check_read(at..at + out.len(), [block, first], access, &acquired)?;
            out.copy_from_slice(&allocation.bytes[at..at + out.len()]);
            Ok(())
        });
        self.acquired = acquired;
        found
    }

    /// Writes bytes that no kernel writes.
    pub fn store_constant(&mut self, address: u64, bytes: &[u8]) -> Result<(), String> {
        let (allocation, at) = self.find(address, bytes.len())?;
        allocation.bytes[at..at + bytes.len()].copy_from_slice(bytes);
        allocation.writers[at..at + bytes.len()].fill(CONSTANT);
        Ok(())
    }

    pub fn store(&mut self, address: u64, bytes: &[u8], access: Access) -> Result<(), String> {
        if !self.has_waited {
            return Err(
                "a write before griddepcontrol.wait: a kernel before this may still use the bytes".to_owned()
            );
        }
        let (block, first) = (self.block, self.first);
        self.is_unfenced |= access != Access::Atomic;
        let (allocation, at) = self.find(address, bytes.len())?;
        let (before, writers) = (&mut allocation.bytes[at..], &mut allocation.writers[at..]);
        for (i, &byte) in bytes.iter().enumerate() {
            // Two blocks may write the same value.
            if writers[i] >= first && writers[i] != block && before[i] != byte && access != Access::Atomic {
                return Err(race_fault(at + i, writers[i] - first));
            }
        }
        before[..bytes.len()].copy_from_slice(bytes);
        writers[..bytes.len()].fill(block);
        Ok(())
    }

    /// Copies bytes with their state, as a device does.
    pub fn copy(&mut self, to: u64, from: u64, len: usize) -> Result<(), String> {
        let (source, at) = self.find(from, len)?;
        let (bytes, writers) = (source.bytes[at..at + len].to_vec(), source.writers[at..at + len].to_vec());
        let (target, at) = self.find(to, len)?;
        target.bytes[at..at + len].copy_from_slice(&bytes);
        target.writers[at..at + len].copy_from_slice(&writers);
        Ok(())
    }
}

fn race_fault(byte: usize, other: u32) -> String {
    format!("a race: byte {byte} of an allocation was written in this launch, by its block {other}")
}

/// The time of a thread between barriers of the block and of its warp.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Time {
    pub thread: u32,
    /// Barriers of the block, and `mbarrier`s, at which the warp has arrived.
    pub block: u32,
    /// Barriers of the warp or the block passed so far.
    pub warp: u32,
    /// Whether other threads of the warp accessed at the same time.
    pub others: bool,
}

impl Time {
    fn warp(self) -> usize {
        self.thread as usize / 32
    }
}

/// Vector clock of each warp: for each other warp, how many of its barriers are known to precede;
/// and for each `mbarrier`, how many of its phases.
#[derive(Debug)]
pub(crate) struct Clocks {
    known: Vec<Vec<u32>>,
}

impl Clocks {
    fn new(warps: usize) -> Self {
        Self { known: vec![vec![0; warps]; warps] }
    }

    /// Returns the clock that a waiting warp acquires from a warp that arrives at a barrier at
    /// `now`.
    pub fn before(&self, now: Time) -> Vec<u32> {
        let mut known = self.known[now.warp()].clone();
        known[now.warp()] = now.block + 1;
        known
    }

    /// Adds a component, of an `mbarrier`; returns its number.
    fn add_component(&mut self) -> usize {
        self.known.iter_mut().for_each(|known| known.push(0));
        self.known[0].len() - 1
    }

    /// Names the thread of an access, or the copy.
    fn name(&self, access: Time) -> String {
        match access.warp() < self.known.len() {
            true => format!("thread {}", access.thread),
            false => "a bulk copy".to_owned(),
        }
    }

    /// Merges the clock `before` into that of a warp.
    pub fn merge(&mut self, warp: usize, before: &[u32]) {
        self.known[warp].iter_mut().zip(before).for_each(|(known, &before)| *known = before.max(*known));
    }

    /// Returns whether an earlier access at `then` and one at `now` are unordered.
    fn is_race(&self, then: Time, now: Time) -> bool {
        match then.warp() == now.warp() {
            true => (then.thread != now.thread || then.others) && then.warp == now.warp,
            false => self.known[now.warp()][then.warp()] <= then.block,
        }
    }
}

/// Access state of a byte of shared memory.
#[derive(Debug, Clone, Copy, Default)]
struct AccessState {
    written: Option<Time>,
    read: Option<Time>,
    /// A reader of another warp in the same interval as `read`.
    also_read: Option<Time>,
    /// Whether the last write was atomic.
    atomic: bool,
    /// The thread whose copy to this byte is pending.
    copying: Option<u32>,
    /// Fences for `wgmma` that the writer had passed.
    fences: u32,
    /// Pending `wgmma` that read the byte.
    wgmma_reads: u32,
    is_mbarrier: bool,
}

impl AccessState {
    /// Rejects an access to the target of a pending copy.
    fn check_settled(&self, at: usize) -> Result<(), String> {
        match self.copying {
            None if self.is_mbarrier => Err(format!("byte {at} of shared memory is of an mbarrier")),
            None => Ok(()),
            Some(thread) => Err(format!(
                "byte {at} of shared memory is being copied by thread {thread}, which has not waited for it"
            )),
        }
    }

    /// Checks that an exclusive access `now` is ordered after all earlier ones.
    fn check_exclusive(&self, at: usize, now: Time, clocks: &Clocks) -> Result<(), String> {
        self.check_settled(at)?;
        if self.wgmma_reads > 0 {
            return Err(format!(
                "byte {at} of shared memory is read by a product that has not been waited for"
            ));
        }
        let before = [self.written, self.read, self.also_read];
        match before.into_iter().flatten().find(|&other| clocks.is_race(other, now)) {
            None => Ok(()),
            Some(other) => Err(format!(
                "a race: byte {at} of shared memory was touched by {} with no barrier between",
                clocks.name(other)
            )),
        }
    }

    /// Checks that the last write is ordered before a read `now`.
    fn readable(&self, at: usize, now: Time, clocks: &Clocks) -> Result<(), String> {
        self.check_settled(at)?;
        match self.written {
            None => Err(format!("byte {at} of shared memory was never written")),
            Some(writer) if clocks.is_race(writer, now) => Err(format!(
                "a race: byte {at} of shared memory was written by {} with no barrier between",
                clocks.name(writer)
            )),
            Some(_) => Ok(()),
        }
    }

    fn read_at(&mut self, now: Time, clocks: &Clocks) {
        match &mut self.read {
            Some(reader) if reader.warp() != now.warp() && clocks.is_race(*reader, now) => {
                self.also_read = Some(now);
            }
            Some(reader)
                if (reader.warp(), reader.block, reader.warp) == (now.warp(), now.block, now.warp) =>
            {
                reader.others |= reader.thread != now.thread;
            }
            _ => self.read = Some(now),
        }
    }
}

/// The shared memory of a block.
#[derive(Debug)]
pub(crate) struct Shared {
    bytes: Vec<u8>,
    touched: Vec<AccessState>,
    pub clocks: Clocks,
    /// Fences for `wgmma` and bulk copies that each thread has passed.
    fences: Vec<u32>,
    mbarriers: BTreeMap<u64, Mbarrier>,
}

impl Shared {
    /// Creates the shared memory of a block of `threads` threads.
    pub fn new(bytes: usize, threads: usize) -> Self {
        Self {
            bytes: vec![0xcd; bytes],
            touched: vec![AccessState::default(); bytes],
            clocks: Clocks::new(threads.div_ceil(32)),
            fences: vec![0; threads],
            mbarriers: BTreeMap::new(),
        }
    }

    /// Makes the stores of `thread` visible to `wgmma` and bulk copies.
    pub fn fence_proxy(&mut self, thread: u32) {
        self.fences[thread as usize] += 1;
    }

    /// Returns whether a thread has passed no fence since it had passed `fences`. Bulk copies need
    /// none.
    fn is_unfenced(&self, writer: Time, fences: u32) -> bool {
        self.fences.get(writer.thread as usize).is_some_and(|&passed| passed == fences)
    }

    fn at(&self, address: u64, len: usize) -> Result<usize, String> {
        let at = address.wrapping_sub(SHARED_BASE);
        match at.checked_add(len as u64) {
            Some(end) if end <= self.bytes.len() as u64 => Ok(at as usize),
            _ => Err(format!(
                "{len} bytes at byte {} of shared memory, which has {}",
                at as i64,
                self.bytes.len()
            )),
        }
    }

    pub fn load(&mut self, address: u64, out: &mut [u8], now: Time) -> Result<(), String> {
        let at = self.at(address, out.len())?;
        for (i, touched) in self.touched[at..at + out.len()].iter_mut().enumerate() {
            touched.readable(at + i, now, &self.clocks)?;
            touched.read_at(now, &self.clocks);
        }
        out.copy_from_slice(&self.bytes[at..at + out.len()]);
        Ok(())
    }

    /// Begins the reads of a `wgmma` of warps that are at `now`: until it ends, writes there are
    /// faults.
    pub fn begin_wgmma_read(&mut self, address: u64, out: &mut [u8], now: [Time; 4]) -> Result<(), String> {
        let at = self.at(address, out.len())?;
        for (i, touched) in self.touched[at..at + out.len()].iter_mut().enumerate() {
            for now in now {
                touched.readable(at + i, now, &self.clocks)?;
                touched.read_at(now, &self.clocks);
            }
            if let Some(writer) = touched.written
                && self.fences.get(writer.thread as usize) == Some(&touched.fences)
            {
                let (at, thread) = (at + i, writer.thread);
                return Err(format!(
                    "byte {at} of shared memory: no fence.proxy.async of its writer, thread {thread}"
                ));
            }
            touched.wgmma_reads += 1;
        }
        out.copy_from_slice(&self.bytes[at..at + out.len()]);
        Ok(())
    }

    /// Ends the reads of a `wgmma`.
    pub fn end_wgmma_read(&mut self, address: u64, len: usize) {
        let at = (address - SHARED_BASE) as usize;
        self.touched[at..at + len].iter_mut().for_each(|touched| touched.wgmma_reads -= 1);
    }

    pub fn store(&mut self, address: u64, bytes: &[u8], now: Time) -> Result<(), String> {
        let at = self.at(address, bytes.len())?;
        for (i, touched) in self.touched[at..at + bytes.len()].iter_mut().enumerate() {
            touched.check_exclusive(at + i, now, &self.clocks)?;
            let fences = self.fences[now.thread as usize];
            *touched = AccessState { written: Some(now), fences, ..AccessState::default() };
        }
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    /// Begins a copy: until it ends, accesses to the bytes are faults.
    pub fn begin_copy(&mut self, address: u64, len: usize, now: Time) -> Result<(), String> {
        let at = self.at(address, len)?;
        for (i, touched) in self.touched[at..at + len].iter_mut().enumerate() {
            touched.check_exclusive(at + i, now, &self.clocks)?;
            *touched = AccessState { copying: Some(now.thread), ..AccessState::default() };
        }
        Ok(())
    }

    /// Ends a copy: the bytes are written `now`.
    pub fn end_copy(&mut self, address: u64, bytes: &[u8], now: Time) -> Result<(), String> {
        let at = self.at(address, bytes.len())?;
        self.touched[at..at + bytes.len()].fill(AccessState::default());
        self.store(address, bytes, now)
    }

    /// Reads and writes atomically, without races among atomics.
    pub fn update(
        &mut self,
        address: u64,
        len: usize,
        now: Time,
        change: impl FnOnce(u64) -> u64,
    ) -> Result<u64, String> {
        let at = self.at(address, len)?;
        for (i, touched) in self.touched[at..at + len].iter_mut().enumerate() {
            if touched.written.is_none() && touched.copying.is_none() {
                return Err(format!("byte {} of shared memory was never written", at + i));
            }
            let plain = AccessState { written: touched.written.filter(|_| !touched.atomic), ..*touched };
            plain.check_exclusive(at + i, now, &self.clocks)?;
            let fences = self.fences[now.thread as usize];
            *touched = AccessState { written: Some(now), atomic: true, fences, ..AccessState::default() };
        }
        let mut value = [0; 8];
        value[..len].copy_from_slice(&self.bytes[at..at + len]);
        let before = u64::from_le_bytes(value);
        self.bytes[at..at + len].copy_from_slice(&change(before).to_le_bytes()[..len]);
        Ok(before)
    }
}
