//! Device memory that exists only as addresses.

use std::collections::BTreeMap;

/// The driver rounds allocations up to multiples of this.
pub(crate) const UNIT: u64 = 2 << 20;
/// First address: none that host memory could have.
const BASE: u64 = 1 << 52;

/// Live allocations of a device.
#[derive(Debug)]
pub(crate) struct Memory {
    total: u64,
    /// Requested bytes by address.
    live: BTreeMap<u64, u64>,
    /// Address behind the last allocation; addresses are never reused.
    end: u64,
    /// Bytes that the allocations take, rounded, and the most of them so far.
    used: u64,
    peak: u64,
}

impl Memory {
    /// Creates `total` bytes of free memory.
    pub fn new(total: u64) -> Self {
        Self { total, live: BTreeMap::new(), end: BASE, used: 0, peak: 0 }
    }

    /// Returns the size of the memory in bytes.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Returns the free bytes.
    pub fn free_bytes(&self) -> u64 {
        self.total - self.used
    }

    /// Returns the address of `bytes` of memory; `None` where they do not fit.
    pub fn alloc(&mut self, bytes: u64) -> Option<u64> {
        let rounded = bytes.checked_next_multiple_of(UNIT)?;
        if rounded > self.free_bytes() {
            return None;
        }
        let address = self.end;
        // A gap, so that an access beyond the end is in no allocation.
        self.end += rounded + UNIT;
        self.live.insert(address, bytes);
        self.used += rounded;
        self.peak = self.peak.max(self.used);
        Some(address)
    }

    /// Frees an allocation; returns whether there was one.
    pub fn free(&mut self, address: u64) -> bool {
        let Some(bytes) = self.live.remove(&address) else { return false };
        self.used -= bytes.next_multiple_of(UNIT);
        true
    }

    /// Returns whether a range lies in one allocation.
    pub fn contains(&self, address: u64, bytes: u64) -> bool {
        let before = self.live.range(..=address).next_back();
        before
            .is_some_and(|(start, size)| (address - start).checked_add(bytes).is_some_and(|end| end <= *size))
    }

    /// Returns the account as a JSON object.
    pub fn json(&self) -> String {
        let Self { total, live, used, peak, .. } = self;
        let requested: u64 = live.values().sum();
        format!(r#"{{"total": {total}, "used": {used}, "peak": {peak}, "requested": {requested}}}"#)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allocations_take_whole_units() {
        let mut memory = Memory::new(4 * UNIT);
        let [first, second] = [1, UNIT + 1].map(|bytes| memory.alloc(bytes).unwrap());
        assert_eq!(memory.free_bytes(), UNIT);
        assert_eq!(memory.alloc(UNIT + 1), None);
        assert!(memory.free(first) && !memory.free(first));
        assert_eq!(memory.free_bytes(), 2 * UNIT);
        assert!(memory.free(second));
        assert_eq!(memory.json(), r#"{"total": 8388608, "used": 0, "peak": 6291456, "requested": 0}"#);
    }

    #[test]
    fn ranges_lie_in_one_allocation() {
        let mut memory = Memory::new(8 * UNIT);
        let [first, second] = [100, UNIT].map(|bytes| memory.alloc(bytes).unwrap());
        assert!(memory.contains(first, 100) && memory.contains(first + 60, 40));
        assert!(!memory.contains(first, 101) && !memory.contains(second - 1, 1) && !memory.contains(0, 1));
        assert!(!memory.contains(first + 1, u64::MAX));
        memory.free(first);
        assert!(!memory.contains(first, 1));
    }
}
