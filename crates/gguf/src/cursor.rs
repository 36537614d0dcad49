//! Reading forward through untrusted bytes.

use crate::Problem;
use crate::error::Fault;

/// A position in a file's bytes. Nothing is read, or promised to be there, before it was bounds-checked.
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

    /// The same position as an index into the bytes.
    pub fn index(&self) -> usize {
        self.at
    }

    pub fn left(&self) -> u64 {
        (self.bytes.len() - self.at) as u64
    }

    /// The next `n` bytes.
    pub fn take(&mut self, n: u64) -> Result<&'a [u8], Fault> {
        let left = self.left();
        if n > left {
            return Err(self.fault(Problem::Truncated { need: n, left }));
        }
        // n <= left <= usize::MAX, so the cast keeps it.
        let (start, end) = (self.at, self.at + n as usize);
        self.at = end;
        Ok(&self.bytes[start..end])
    }

    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], Fault> {
        let bytes = self.take(N as u64)?;
        Ok(bytes.try_into().expect("take returns as many bytes as asked for"))
    }

    pub fn u32(&mut self) -> Result<u32, Fault> {
        self.array().map(u32::from_le_bytes)
    }

    pub fn u64(&mut self) -> Result<u64, Fault> {
        self.array().map(u64::from_le_bytes)
    }

    /// A string: length (u64), then that many bytes of any kind.
    pub fn string(&mut self) -> Result<&'a [u8], Fault> {
        let n = self.u64()?;
        self.take(n)
    }

    /// A key or tensor name: a string of 1 to `max` bytes of UTF-8.
    pub fn name(&mut self, max: u64) -> Result<&'a str, Fault> {
        let start = *self;
        let n = self.u64()?;
        if n == 0 || n > max {
            return Err(start.fault(Problem::NameLength { got: n, max }));
        }
        let bytes = self.take(n)?;
        std::str::from_utf8(bytes).map_err(|e| start.fault(Problem::Utf8 { valid: e.valid_up_to() }))
    }

    /// A count (u64) of things that take at least `min_size` bytes each from `after` bytes behind it on.
    pub fn count(&mut self, what: &'static str, min_size: u64, after: u64) -> Result<u64, Fault> {
        let start = *self;
        let count = self.u64()?;
        let at_most = self.left().saturating_sub(after) / min_size;
        if count > at_most {
            return Err(start.fault(Problem::Count { what, count, at_most }));
        }
        Ok(count)
    }

    /// `problem`, here.
    pub fn fault(&self, problem: Problem) -> Fault {
        Fault { offset: self.offset(), problem }
    }
}
