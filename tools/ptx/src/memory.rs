//! Memory that knows what may be touched, what has been written, and who touched it.

use std::collections::BTreeMap;
use std::ops::Range;

/// Where the memory spaces lie among generic addresses. Nothing but global memory lies above 4 GiB, so shared
/// addresses fit 32 bits, and an address is the same in its own space and in the generic one.
pub(crate) const SHARED_BASE: u64 = 0x1000_0000;
pub(crate) const LOCAL_BASE: u64 = 0x2000_0000;
pub(crate) const PARAM_BASE: u64 = 0x3000_0000;
const GLOBAL_BASE: u64 = 0x7f00_0000_0000;
/// Alignment of allocations, and the least distance between them.
const GUARD: u64 = 256;

/// An allocation in global memory.
#[derive(Debug)]
struct Allocation {
    bytes: Vec<u8>,
    /// Who wrote each byte last: the number of a block, counted over all launches, or [`NOBODY`].
    writers: Vec<u32>,
}

/// Writer of what was never written.
const NOBODY: u32 = 0;

impl Allocation {
    /// That these bytes are written, and not by a block that `block` may run beside, in a launch whose first one is `first`.
    fn check_read(
        &self,
        bytes: Range<usize>,
        [block, first]: [u32; 2],
        access: Access,
        acquired: &[u32],
    ) -> Result<(), String> {
        for (at, &writer) in bytes.clone().zip(&self.writers[bytes]) {
            if writer == NOBODY {
                return Err(format!("byte {at} of an allocation of {} was never written", self.bytes.len()));
            }
            // Blocks run in any order, and side by side.
            let is_race = match access {
                Access::Plain => writer != block,
                Access::Constant => true,
                Access::Coherent => writer != block && !acquired.contains(&writer),
                Access::Atomic => false,
            };
            if writer >= first && is_race {
                return Err(race(at, writer - first));
            }
        }
        Ok(())
    }
}

/// Global memory.
#[derive(Debug)]
pub(crate) struct Global {
    allocations: BTreeMap<u64, Allocation>,
    next: u64,
    /// The block that runs; between launches, whoever writes counts as the last one.
    block: u32,
    /// The first block of the launch.
    first: u32,
    /// Blocks of the launch that were done writing when they changed the number at an address in one (an atomic after a fence).
    released: BTreeMap<u64, Vec<u32>>,
    /// Those of which the block that runs has learnt so.
    acquired: Vec<u32>,
    /// Whether it has written since its last fence.
    is_unfenced: bool,
}

/// How memory is touched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    Plain,
    /// By way of a cache that does not learn of writes of the same launch.
    Constant,
    /// Beside such caches: sees what the blocks have written of which the reader knows that they have.
    Coherent,
    /// In one with what others do.
    Atomic,
}

impl Global {
    pub fn new() -> Self {
        Self {
            allocations: BTreeMap::new(),
            next: GLOBAL_BASE,
            block: NOBODY + 1,
            first: u32::MAX,
            released: BTreeMap::new(),
            acquired: Vec::new(),
            is_unfenced: false,
        }
    }

    /// From here on a launch runs.
    pub fn begin_launch(&mut self) {
        self.first = self.block + 1;
        self.released.clear();
    }

    /// From here on the next block of the launch runs.
    pub fn begin_block(&mut self) {
        self.block += 1;
        self.acquired.clear();
        self.is_unfenced = false;
    }

    /// All that the block has written so far comes before what follows.
    pub fn fence(&mut self) {
        self.is_unfenced = false;
    }

    /// The block changes the number at `address` in one: it learns which others have done so, and tells those that come after it.
    pub fn meet(&mut self, address: u64) {
        let released = self.released.entry(address).or_default();
        self.acquired.extend_from_slice(released);
        if !self.is_unfenced {
            released.push(self.block);
        }
    }

    /// The launch has ended: everybody sees what it wrote.
    pub fn end_launch(&mut self) {
        self.first = u32::MAX;
    }

    pub fn alloc(&mut self, bytes: usize) -> u64 {
        let address = self.next;
        self.next += (bytes as u64).next_multiple_of(GUARD) + GUARD;
        self.allocations
            .insert(address, Allocation { bytes: vec![0xcd; bytes], writers: vec![NOBODY; bytes] });
        address
    }

    pub fn free(&mut self, address: u64) -> Result<(), String> {
        let freed = self.allocations.remove(&address);
        freed.map(drop).ok_or_else(|| format!("{address:#x} was never allocated"))
    }

    /// Bytes of all allocations.
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
        let acquired = std::mem::take(&mut self.acquired);
        let found = self.find(address, out.len()).and_then(|(allocation, at)| {
            allocation.check_read(at..at + out.len(), [block, first], access, &acquired)?;
            out.copy_from_slice(&allocation.bytes[at..at + out.len()]);
            Ok(())
        });
        self.acquired = acquired;
        found
    }

    pub fn store(&mut self, address: u64, bytes: &[u8], access: Access) -> Result<(), String> {
        let (block, first) = (self.block, self.first);
        self.is_unfenced |= access != Access::Atomic;
        let (allocation, at) = self.find(address, bytes.len())?;
        let (before, writers) = (&mut allocation.bytes[at..], &mut allocation.writers[at..]);
        for (i, &byte) in bytes.iter().enumerate() {
            // Two blocks may write the same.
            if writers[i] >= first && writers[i] != block && before[i] != byte && access != Access::Atomic {
                return Err(race(at + i, writers[i] - first));
            }
        }
        before[..bytes.len()].copy_from_slice(bytes);
        writers[..bytes.len()].fill(block);
        Ok(())
    }

    /// Copies with what is known of each byte, as a device does.
    pub fn copy(&mut self, to: u64, from: u64, len: usize) -> Result<(), String> {
        let (source, at) = self.find(from, len)?;
        let (bytes, writers) = (source.bytes[at..at + len].to_vec(), source.writers[at..at + len].to_vec());
        let (target, at) = self.find(to, len)?;
        target.bytes[at..at + len].copy_from_slice(&bytes);
        target.writers[at..at + len].copy_from_slice(&writers);
        Ok(())
    }
}

fn race(byte: usize, other: u32) -> String {
    format!("a race: byte {byte} of an allocation was written in this launch, by its block {other}")
}

/// A thread at a moment between barriers of the block and of its warp.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Moment {
    pub thread: u32,
    /// Barriers that the warp has come to so far.
    pub block: u32,
    /// Barriers of the warp passed so far.
    pub warp: u32,
    /// Other threads of the warp besides, at the same moment.
    pub others: bool,
}

impl Moment {
    fn warp(self) -> usize {
        self.thread as usize / 32
    }
}

/// What each warp knows to have come before, by barriers: of each other warp, how many barriers it had come to (a vector clock).
#[derive(Debug)]
pub(crate) struct Clocks {
    known: Vec<Vec<u32>>,
}

impl Clocks {
    fn new(warps: usize) -> Self {
        Self { known: vec![vec![0; warps]; warps] }
    }

    /// What whoever waits for a warp that comes to a barrier at `now` knows from then on.
    pub fn before(&self, now: Moment) -> Vec<u32> {
        let mut known = self.known[now.warp()].clone();
        known[now.warp()] = now.block + 1;
        known
    }

    /// Tells a warp what has come before.
    pub fn learn(&mut self, warp: usize, before: &[u32]) {
        self.known[warp].iter_mut().zip(before).for_each(|(known, &before)| *known = before.max(*known));
    }

    /// Whether nothing orders an access at `then`, of which we hear, and one at `now`.
    fn is_race(&self, then: Moment, now: Moment) -> bool {
        match then.warp() == now.warp() {
            true => {
                (then.thread != now.thread || then.others) && (then.block, then.warp) == (now.block, now.warp)
            }
            false => self.known[now.warp()][then.warp()] <= then.block,
        }
    }
}

/// What is known of a byte of shared memory.
#[derive(Debug, Clone, Copy, Default)]
struct Touched {
    written: Option<Moment>,
    read: Option<Moment>,
    /// A reader of another warp in the same interval as `read`.
    also_read: Option<Moment>,
    /// Whether the last write was atomic.
    atomic: bool,
    /// The thread whose copy to this byte is under way.
    copying: Option<u32>,
    /// Fences for `wgmma` that the writer had passed.
    fences: u32,
    /// Products under way that read the byte.
    products: u32,
}

impl Touched {
    /// Nobody may touch the target of a copy that is under way.
    fn settled(&self, at: usize) -> Result<(), String> {
        match self.copying {
            None => Ok(()),
            Some(thread) => Err(format!(
                "byte {at} of shared memory is being copied by thread {thread}, which has not waited for it"
            )),
        }
    }

    /// That an exclusive access `now` is ordered against all before.
    fn alone(&self, at: usize, now: Moment, clocks: &Clocks) -> Result<(), String> {
        self.settled(at)?;
        if self.products > 0 {
            return Err(format!(
                "byte {at} of shared memory is read by a product that has not been waited for"
            ));
        }
        let before = [self.written, self.read, self.also_read];
        match before.into_iter().flatten().find(|&other| clocks.is_race(other, now)) {
            None => Ok(()),
            Some(other) => Err(format!(
                "a race: byte {at} of shared memory was touched by thread {} with no barrier between",
                other.thread
            )),
        }
    }

    /// That what was written is ordered before a read `now`.
    fn readable(&self, at: usize, now: Moment, clocks: &Clocks) -> Result<(), String> {
        self.settled(at)?;
        match self.written {
            None => Err(format!("byte {at} of shared memory was never written")),
            Some(writer) if clocks.is_race(writer, now) => Err(format!(
                "a race: byte {at} of shared memory was written by thread {} with no barrier between",
                writer.thread
            )),
            Some(_) => Ok(()),
        }
    }

    fn read_at(&mut self, now: Moment, clocks: &Clocks) {
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
    touched: Vec<Touched>,
    pub clocks: Clocks,
    /// Fences for `wgmma` that each thread has passed.
    fences: Vec<u32>,
}

impl Shared {
    /// Of a block of so many threads.
    pub fn new(bytes: usize, threads: usize) -> Self {
        Self {
            bytes: vec![0xcd; bytes],
            touched: vec![Touched::default(); bytes],
            clocks: Clocks::new(threads.div_ceil(32)),
            fences: vec![0; threads],
        }
    }

    /// What `thread` has stored is known to `wgmma` from here on.
    pub fn fence_proxy(&mut self, thread: u32) {
        self.fences[thread as usize] += 1;
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

    pub fn load(&mut self, address: u64, out: &mut [u8], now: Moment) -> Result<(), String> {
        let at = self.at(address, out.len())?;
        for (i, touched) in self.touched[at..at + out.len()].iter_mut().enumerate() {
            touched.readable(at + i, now, &self.clocks)?;
            touched.read_at(now, &self.clocks);
        }
        out.copy_from_slice(&self.bytes[at..at + out.len()]);
        Ok(())
    }

    /// Begins to read for a product of warps that are at `now`: until it ends, nobody may write there.
    pub fn begin_product(&mut self, address: u64, out: &mut [u8], now: [Moment; 4]) -> Result<(), String> {
        let at = self.at(address, out.len())?;
        for (i, touched) in self.touched[at..at + out.len()].iter_mut().enumerate() {
            for now in now {
                touched.readable(at + i, now, &self.clocks)?;
                touched.read_at(now, &self.clocks);
            }
            if let Some(writer) = touched.written
                && self.fences[writer.thread as usize] == touched.fences
            {
                let (at, thread) = (at + i, writer.thread);
                return Err(format!(
                    "byte {at} of shared memory: no fence.proxy.async of its writer, thread {thread}"
                ));
            }
            touched.products += 1;
        }
        out.copy_from_slice(&self.bytes[at..at + out.len()]);
        Ok(())
    }

    /// Ends a product's reading.
    pub fn end_product(&mut self, address: u64, len: usize) {
        let at = (address - SHARED_BASE) as usize;
        self.touched[at..at + len].iter_mut().for_each(|touched| touched.products -= 1);
    }

    pub fn store(&mut self, address: u64, bytes: &[u8], now: Moment) -> Result<(), String> {
        let at = self.at(address, bytes.len())?;
        for (i, touched) in self.touched[at..at + bytes.len()].iter_mut().enumerate() {
            touched.alone(at + i, now, &self.clocks)?;
            let fences = self.fences[now.thread as usize];
            *touched = Touched { written: Some(now), fences, ..Touched::default() };
        }
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    /// Begins a copy: until it ends, the bytes are nobody's.
    pub fn begin_copy(&mut self, address: u64, len: usize, now: Moment) -> Result<(), String> {
        let at = self.at(address, len)?;
        for (i, touched) in self.touched[at..at + len].iter_mut().enumerate() {
            touched.alone(at + i, now, &self.clocks)?;
            *touched = Touched { copying: Some(now.thread), ..Touched::default() };
        }
        Ok(())
    }

    /// Ends a copy: the bytes are written `now`.
    pub fn end_copy(&mut self, address: u64, bytes: &[u8], now: Moment) -> Result<(), String> {
        let at = self.at(address, bytes.len())?;
        self.touched[at..at + bytes.len()].fill(Touched::default());
        self.store(address, bytes, now)
    }

    /// Reads and writes in one, which cannot race with others of its kind.
    pub fn update(
        &mut self,
        address: u64,
        len: usize,
        now: Moment,
        change: impl FnOnce(u64) -> u64,
    ) -> Result<u64, String> {
        let at = self.at(address, len)?;
        for (i, touched) in self.touched[at..at + len].iter_mut().enumerate() {
            if touched.written.is_none() && touched.copying.is_none() {
                return Err(format!("byte {} of shared memory was never written", at + i));
            }
            let plain = Touched { written: touched.written.filter(|_| !touched.atomic), ..*touched };
            plain.alone(at + i, now, &self.clocks)?;
            let fences = self.fences[now.thread as usize];
            *touched = Touched { written: Some(now), atomic: true, fences, ..Touched::default() };
        }
        let mut value = [0; 8];
        value[..len].copy_from_slice(&self.bytes[at..at + len]);
        let before = u64::from_le_bytes(value);
        self.bytes[at..at + len].copy_from_slice(&change(before).to_le_bytes()[..len]);
        Ok(before)
    }
}
