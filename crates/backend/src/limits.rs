//! Limits on sizes that users and files request, checked before any allocation.
//!
//! [`check_size`] restricts a number to its range; the memory that follows from it is compared with
//! the memory available. Sums saturate, so that a size beyond `usize` also exceeds any memory.

use std::ops::RangeInclusive;

use crate::{BackendError, Result};

/// The maximum tokens of a context: positions are 32-bit numbers on every device.
pub const MAX_TOKENS: usize = i32::MAX as usize;

/// Returns `got` if it lies within `allowed`.
///
/// # Errors
/// [`BackendError::OutOfRange`] with the range.
pub fn check_size(name: &'static str, got: usize, allowed: RangeInclusive<usize>) -> Result<usize> {
    if allowed.contains(&got) {
        return Ok(got);
    }
    Err(BackendError::OutOfRange { name, min: *allowed.start(), max: *allowed.end(), got })
}

/// Returns the number of hardware threads, or 1 where the system does not report it.
pub fn n_cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Returns the maximum number of threads: eight per core, and at least 64. More would only contend.
pub fn max_threads() -> usize {
    n_cores().saturating_mul(8).max(64)
}

/// Returns the machine's memory in bytes, swap included; `None` where the system does not report
/// it.
pub fn machine_bytes() -> Option<usize> {
    memory_in(&std::fs::read_to_string("/proc/meminfo").ok()?)
}

/// Returns the bytes that programs can allocate now without swapping; `None` where the system does
/// not report it.
pub fn available_bytes() -> Option<usize> {
    bytes_in(&std::fs::read_to_string("/proc/meminfo").ok()?, "MemAvailable")
}

/// Returns the largest number up to `max` for which `holds` is true, by binary search; `holds` is
/// true up to some number and false beyond it.
pub fn largest(max: usize, holds: impl Fn(usize) -> bool) -> usize {
    let (mut low, mut high) = (0, max);
    while low < high {
        let middle = high - (high - low) / 2;
        if holds(middle) { low = middle } else { high = middle - 1 }
    }
    low
}

/// Returns memory and swap of `/proc/meminfo`.
fn memory_in(meminfo: &str) -> Option<usize> {
    Some(bytes_in(meminfo, "MemTotal")?.saturating_add(bytes_in(meminfo, "SwapTotal").unwrap_or(0)))
}

/// Returns the line `name` of `/proc/meminfo` in bytes.
fn bytes_in(meminfo: &str, name: &str) -> Option<usize> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    let kib: usize = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib.saturating_mul(1024))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_out_of_range_is_rejected_with_the_range() {
        assert_eq!(check_size("n", 1, 1..=8), Ok(1));
        assert_eq!(check_size("n", 8, 1..=8), Ok(8));
        for got in [0, 9, usize::MAX] {
            let error = check_size("n", got, 1..=8).unwrap_err();
            assert_eq!(error.to_string(), format!("n: expected 1 to 8, got {got}"));
        }
    }

    #[test]
    fn the_largest_number_that_holds_is_found() {
        for (max, limit) in [(0, 5), (1, 0), (1, 1), (100, 0), (100, 37), (100, 99), (100, 100), (100, 500)] {
            assert_eq!(largest(max, |n| n <= limit), max.min(limit));
        }
    }

    #[test]
    fn memory_is_parsed_from_meminfo() {
        let text = "MemTotal:       16384 kB\nMemFree:  12 kB\nSwapTotal:       1024 kB\n";
        assert_eq!(memory_in(text), Some(17408 * 1024));
        assert_eq!(memory_in("MemTotal: 4 kB\n"), Some(4096));
        for unreadable in ["", "MemTotal: many kB", "MemTotal: 4"] {
            assert_eq!(memory_in(unreadable), None, "{unreadable}");
        }
        assert!(machine_bytes().is_none_or(|bytes| bytes > 1 << 20));
    }
}
