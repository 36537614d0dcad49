//! Sources of a file's bytes.

use std::borrow::Cow;
use std::io;
use std::ops::Deref;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use memmap2::Mmap;

use crate::error::{GgufError, Problem};

/// The bytes of one file: mapped, embedded in the program, shared or owned.
pub struct Source(Bytes);

enum Bytes {
    Mapped(Mmap),
    Static(&'static [u8]),
    Shared(Arc<[u8]>),
    Owned(Vec<u8>),
    /// The head; other bytes are read on request.
    Stored(Vec<u8>, Box<dyn RangeReader>),
}

/// Reads parts of a file that is not in memory and cannot be mapped.
pub trait RangeReader: Send + Sync {
    /// Returns the size of the file in bytes.
    fn n_bytes(&self) -> u64;

    /// Reads the `len` bytes from byte `at`, which are within the file.
    ///
    /// # Panics
    /// When the file no longer has them; a mapped file would end the process instead.
    fn read(&self, at: u64, len: usize) -> Vec<u8>;
}

impl Source {
    /// Maps the file at `path` into memory. Also returns the time of its last modification.
    ///
    /// No other program may overwrite or truncate the file while it is mapped.
    ///
    /// # Errors
    /// When the file cannot be opened or is empty.
    pub fn map(path: &Path) -> Result<(Self, Option<SystemTime>), GgufError> {
        let fail = |e: io::Error| GgufError::of_file(path, e);
        let file = kvant_files::open(path).map_err(fail)?;
        let info = file.metadata().map_err(fail)?;
        if info.len() == 0 {
            return Err(GgufError::of_file(path, Problem::Empty));
        }
        // SAFETY: the mapping is private and read-only, this process never writes to a file in
        // place (`GgufWriter` renames a new file over the old one, which leaves the mapped one
        // intact), and `Mmap` keeps the pages mapped for as long as the slices borrowed from it.
        // The remaining case is another program that truncates or overwrites the file while it is
        // open; `Gguf::open` and `Source::map` document that as the caller's duty, as every mmap
        // reader has to.
        let map = unsafe { Mmap::map(&file) }.map_err(fail)?;
        Ok((Self(Bytes::Mapped(map)), info.modified().ok()))
    }
}

impl Source {
    /// Reads the first `n` bytes of `store`; the rest is read on request.
    pub(crate) fn stored(store: Box<dyn RangeReader>, n: usize) -> Self {
        Self(Bytes::Stored(store.read(0, n), store))
    }

    /// Reads at least twice as many bytes into memory, up to the whole file.
    pub(crate) fn read_more(self) -> Self {
        match self.0 {
            Bytes::Stored(head, store) => {
                let n = store.n_bytes().min(2 * head.len() as u64);
                drop(head);
                Self::stored(store, n as usize)
            }
            all => Self(all),
        }
    }

    /// Returns the size of the file in bytes.
    pub(crate) fn n_bytes(&self) -> u64 {
        if let Bytes::Stored(_, store) = &self.0 { store.n_bytes() } else { self.len() as u64 }
    }

    /// Returns the `len` bytes from byte `at`, which are within the file.
    pub(crate) fn range(&self, at: u64, len: usize) -> Cow<'_, [u8]> {
        match &self.0 {
            Bytes::Stored(_, store) => Cow::Owned(store.read(at, len)),
            // They are in memory, so the offset fits usize.
            _ => Cow::Borrowed(&self[at as usize..][..len]),
        }
    }

    /// Returns the memory of a mapped file to the system; the next access reads its bytes from the
    /// file again.
    pub fn release(&self) {
        #[cfg(unix)]
        if let Bytes::Mapped(map) = &self.0 {
            // SAFETY: the mapping is private, read-only and backed by the file, and nothing ever
            // writes to it, so a later read returns the same bytes. If the system cannot release
            // the memory it keeps it, which is slower but correct.
            let _ = unsafe { map.unchecked_advise(memmap2::UncheckedAdvice::DontNeed) };
        }
    }
}

/// The bytes in memory: the head of a stored file, else all bytes.
impl Deref for Source {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.0 {
            Bytes::Mapped(map) => map,
            Bytes::Static(bytes) => bytes,
            Bytes::Shared(bytes) => bytes,
            Bytes::Owned(bytes) | Bytes::Stored(bytes, _) => bytes,
        }
    }
}

impl From<&'static [u8]> for Source {
    fn from(bytes: &'static [u8]) -> Self {
        Self(Bytes::Static(bytes))
    }
}

impl<const N: usize> From<&'static [u8; N]> for Source {
    fn from(bytes: &'static [u8; N]) -> Self {
        Self(Bytes::Static(bytes))
    }
}

impl From<Arc<[u8]>> for Source {
    fn from(bytes: Arc<[u8]>) -> Self {
        Self(Bytes::Shared(bytes))
    }
}

impl From<Vec<u8>> for Source {
    fn from(bytes: Vec<u8>) -> Self {
        Self(Bytes::Owned(bytes))
    }
}
