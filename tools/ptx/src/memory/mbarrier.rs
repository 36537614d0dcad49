//! `mbarrier` objects in shared memory, and the bulk copies whose bytes they count.
//!
//! A phase of an object ends when as many threads have arrived as it counts, and all bytes that it
//! expects are there. A copy completes as late as it can: when no thread can go on without it.
//! Until then accesses to its bytes are faults, and after it for threads that have not waited for
//! the phase: the copy has a component of its own in the clocks, as if it were a warp.

use super::{AccessState, Shared, Time};

/// Maximum of the arrivals of a phase, and of the bytes that it expects.
const MAX_COUNT: u64 = (1 << 20) - 1;
/// Bytes of an object, and its alignment.
const BYTES: usize = 8;
/// Alignment of bulk copies, in bytes.
const UNIT: u64 = 16;

#[derive(Debug)]
pub(super) struct Mbarrier {
    /// Arrivals of each phase.
    count: u64,
    /// Arrivals that the phase lacks.
    pending: u64,
    /// Bytes that the phase still expects.
    expected: u64,
    /// Phases that have ended.
    phase: u32,
    /// Bulk copies in flight.
    copies: Vec<BulkCopy>,
    /// Clock of the arrivals of this phase and of those before it, and of those before it alone.
    arrived: Vec<u32>,
    completed: Vec<u32>,
    /// Component of its copies in the clocks.
    component: usize,
    initialized: Time,
    /// Fences that the initializing thread had passed.
    fences: u32,
}

#[derive(Debug)]
struct BulkCopy {
    to: u64,
    bytes: Vec<u8>,
}

impl Mbarrier {
    fn bytes_in_flight(&self) -> u64 {
        self.copies.iter().map(|copy| copy.bytes.len() as u64).sum()
    }

    /// Ends the phase if nothing is missing.
    fn end_phase(&mut self) -> Result<(), String> {
        let in_flight = self.bytes_in_flight();
        if self.pending > 0 {
            return Ok(());
        }
        if in_flight > self.expected {
            return Err(format!("an mbarrier expects {} bytes, and copies of {in_flight}", self.expected));
        }
        if self.expected > 0 {
            return Ok(());
        }
        self.phase += 1;
        self.pending = self.count;
        self.completed.clone_from(&self.arrived);
        merge(&mut self.completed, &[vec![0; self.component], vec![self.phase]].concat());
        Ok(())
    }
}

fn merge(known: &mut Vec<u32>, other: &[u32]) {
    known.resize(known.len().max(other.len()), 0);
    known.iter_mut().zip(other).for_each(|(known, &other)| *known = other.max(*known));
}

impl Shared {
    /// Initializes an object for `count` arrivals.
    pub fn init_mbarrier(&mut self, address: u64, count: u64, now: Time) -> Result<(), String> {
        if !address.is_multiple_of(BYTES as u64) || !(1..=MAX_COUNT).contains(&count) {
            return Err(format!("an mbarrier at {address:#x} of {count} arrivals"));
        }
        self.store(address, &[0; BYTES], now)?;
        let at = self.at(address, BYTES)?;
        self.touched[at..at + BYTES].iter_mut().for_each(|touched| touched.is_mbarrier = true);
        let mbarrier = Mbarrier {
            count,
            pending: count,
            expected: 0,
            phase: 0,
            copies: Vec::new(),
            arrived: Vec::new(),
            completed: Vec::new(),
            component: self.clocks.add_component(),
            initialized: now,
            fences: self.fences[now.thread as usize],
        };
        self.mbarriers.insert(address, mbarrier);
        Ok(())
    }

    /// Ends the use of an object: its bytes are memory again.
    pub fn invalidate_mbarrier(&mut self, address: u64, now: Time) -> Result<(), String> {
        if !self.mbarrier(address, now)?.copies.is_empty() {
            return Err("an mbarrier with copies in flight".to_owned());
        }
        self.mbarriers.remove(&address);
        let at = self.at(address, BYTES)?;
        let written = AccessState { written: Some(now), ..AccessState::default() };
        self.touched[at..at + BYTES].fill(written);
        Ok(())
    }

    fn mbarrier(&mut self, address: u64, now: Time) -> Result<&mut Mbarrier, String> {
        let Some(mbarrier) = self.mbarriers.get_mut(&address) else {
            return Err(format!("no mbarrier is initialized at {address:#x}"));
        };
        match self.clocks.is_race(mbarrier.initialized, now) {
            true => Err(format!(
                "a race: the mbarrier was initialized by thread {} with no barrier between",
                mbarrier.initialized.thread
            )),
            false => Ok(mbarrier),
        }
    }

    /// Adds to the bytes that the phase expects.
    pub fn expect_bytes(&mut self, address: u64, bytes: u64, now: Time) -> Result<(), String> {
        let mbarrier = self.mbarrier(address, now)?;
        mbarrier.expected += bytes;
        match mbarrier.expected <= MAX_COUNT {
            true => Ok(()),
            false => Err(format!("an mbarrier that expects {} bytes", mbarrier.expected)),
        }
    }

    /// Arrives `count` times, releasing what the warp has done; returns the number of the phase.
    pub fn arrive(&mut self, address: u64, count: u64, now: Time) -> Result<u64, String> {
        let clock = self.clocks.before(now);
        let mbarrier = self.mbarrier(address, now)?;
        let (phase, pending) = (mbarrier.phase.into(), mbarrier.pending);
        if pending < count {
            return Err(format!("{count} arrivals at an mbarrier whose phase lacks {pending}"));
        }
        merge(&mut mbarrier.arrived, &clock);
        mbarrier.pending -= count;
        mbarrier.end_phase()?;
        Ok(phase)
    }

    /// Returns whether the phase of this parity has ended; then the warp knows what precedes it.
    pub fn has_completed(&mut self, address: u64, parity: u64, now: Time) -> Result<bool, String> {
        let mbarrier = self.mbarrier(address, now)?;
        let is_over = u64::from(mbarrier.phase) & 1 != parity & 1;
        if is_over {
            let completed = mbarrier.completed.clone();
            self.clocks.merge(now.warp(), &completed);
        }
        Ok(is_over)
    }

    /// Begins a bulk copy of `bytes` that `mbarrier` counts.
    pub fn begin_bulk_copy(
        &mut self,
        to: u64,
        bytes: Vec<u8>,
        mbarrier: u64,
        now: Time,
    ) -> Result<(), String> {
        let at = self.at(to, bytes.len())?;
        let Mbarrier { initialized, fences, .. } = *self.mbarrier(mbarrier, now)?;
        if self.is_unfenced(initialized, fences) {
            return Err("a bulk copy without a fence since mbarrier.init".to_owned());
        }
        for i in at..at + bytes.len() {
            let touched = self.touched[i];
            touched.check_exclusive(i, now, &self.clocks)?;
            if touched.written.is_some_and(|writer| self.is_unfenced(writer, touched.fences)) {
                return Err(format!("byte {i} of shared memory: no fence.proxy.async of its writer"));
            }
            self.touched[i] = AccessState { copying: Some(now.thread), ..AccessState::default() };
        }
        let mbarrier = self.mbarrier(mbarrier, now)?;
        mbarrier.copies.push(BulkCopy { to, bytes });
        mbarrier.end_phase()
    }

    /// Completes the copies that some phase lacks; returns whether there are any.
    pub fn complete_bulk_copies(&mut self) -> Result<bool, String> {
        let lacks_copies = |mbarrier: &&mut Mbarrier| {
            mbarrier.pending == 0 && mbarrier.expected == mbarrier.bytes_in_flight()
        };
        let Some(mbarrier) = self.mbarriers.values_mut().find(lacks_copies) else { return Ok(false) };
        let copies = std::mem::take(&mut mbarrier.copies);
        let now = Time { thread: 32 * mbarrier.component as u32, block: mbarrier.phase, ..Time::default() };
        mbarrier.expected = 0;
        mbarrier.end_phase()?;
        for BulkCopy { to, bytes } in copies {
            let at = self.at(to, bytes.len())?;
            let state = AccessState { written: Some(now), ..AccessState::default() };
            self.touched[at..at + bytes.len()].fill(state);
            self.bytes[at..at + bytes.len()].copy_from_slice(&bytes);
        }
        Ok(true)
    }

    /// Checks that no bulk copy is in flight.
    pub fn check_end(&self) -> Result<(), String> {
        match self.mbarriers.values().map(Mbarrier::bytes_in_flight).sum::<u64>() {
            0 => Ok(()),
            bytes => Err(format!("the block ends while {bytes} bytes are copied to its shared memory")),
        }
    }

    /// Describes what the phase of an object lacks.
    pub fn missing(&self, address: u64) -> String {
        let mbarrier = self.mbarriers.get(&address);
        mbarrier.map_or_else(String::new, |Mbarrier { phase, pending, expected, .. }| {
            format!("; its mbarrier lacks {pending} arrivals and {expected} bytes in phase {phase}")
        })
    }
}

/// Rejects a bulk copy whose addresses or size are not whole units.
pub(crate) fn check_bulk(addresses: [u64; 2], bytes: u64) -> Result<(), String> {
    let is_whole = |n: u64| n.is_multiple_of(UNIT);
    match bytes > 0 && is_whole(bytes) && addresses.into_iter().all(is_whole) {
        true => Ok(()),
        false => {
            let [to, from] = addresses;
            Err(format!("a bulk copy of {bytes} bytes from {from:#x} to {to:#x}: not multiples of {UNIT}"))
        }
    }
}
