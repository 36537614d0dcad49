//! Forward reading of untrusted bytes.

use crate::error::{Fault, Problem};

/// A position in a file's bytes. Every read is bounds-checked.
#[derive(Clone, Copy)]
pub(crate) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    pub fn offset(&self) -> u64 {
        self.at as u64
    }

    /// Returns the position as an index into the bytes.
    pub fn index(&self) -> usize {
        self.at
    }

    pub fn left(&self) -> u64 {
        (self.bytes.len() - self.at) as u64
    }

    /// Returns the next `n` bytes.
    pub fn take(&mut self, n: u64) -> Result<&'a [u8], Fault> {
        let left = self.left();
        if n > left {
            return Err(self.fault(Problem::Truncated { need: n, left }));
        }
        // n <= left <= usize::MAX, so the cast is lossless.
        let (start, end) = (self.at, self.at + n as usize);
        self.at = end;
        Ok(&self.bytes[start..end])
    }

    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], Fault> {
        let bytes = self.take(N as u64)?;
        Ok(bytes.try_into().expect("take returns the requested bytes"))
    }

    pub fn u32(&mut self) -> Result<u32, Fault> {
        self.array().map(u32::from_le_bytes)
    }

    pub fn u64(&mut self) -> Result<u64, Fault> {
        self.array().map(u64::from_le_bytes)
    }

    /// Reads a string: length (u64), then that many arbitrary bytes.
    pub fn string(&mut self) -> Result<&'a [u8], Fault> {
        let n = self.u64()?;
        self.take(n)
    }

    /// Reads a key or tensor name: a string of 1 to `max` bytes of UTF-8.
    pub fn name(&mut self, max: u64) -> Result<&'a str, Fault> {
        let start = *self;
        let n = self.u64()?;
        if n == 0 || n > max {
            return Err(start.fault(Problem::NameLength { got: n, max }));
        }
        let bytes = self.take(n)?;
        std::str::from_utf8(bytes).map_err(|e| start.fault(Problem::Utf8 { valid: e.valid_up_to() }))
    }

    /// Reads a count (u64) of items of at least `min_size` bytes each, which start `after` bytes
    /// behind it.
    pub fn count(&mut self, what: &'static str, min_size: u64, after: u64) -> Result<u64, Fault> {
        let start = *self;
        let count = self.u64()?;
        let at_most = self.left().saturating_sub(after) / min_size;
        if count > at_most {
            return Err(start.fault(Problem::Count { what, count, at_most }));
        }
        Ok(count)
    }

    /// Returns `problem` at this position.
    pub fn fault(&self, problem: Problem) -> Fault {
        Fault { offset: self.offset(), problem }
    }
}
