//! Where a file's bytes live.

use std::borrow::Cow;
use std::io;
use std::ops::Deref;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use memmap2::Mmap;

use crate::{GgufError, Problem};

/// The bytes of one file: mapped, embedded in the program, shared or owned.
pub struct Source(Bytes);

enum Bytes {
    Mapped(Mmap),
    Static(&'static [u8]),
    Shared(Arc<[u8]>),
    Owned(Vec<u8>),
    /// The first bytes; the others are read when they are asked for.
    Stored(Vec<u8>, Box<dyn Store>),
}

/// What brings parts of a file that is not in memory, and cannot be mapped.
pub trait Store: Send + Sync {
    /// Size of the file in bytes.
    fn n_bytes(&self) -> u64;

    /// The `len` bytes from byte `at` on, which lie in the file.
    ///
    /// # Panics
    /// When the file has them no more, as a mapped file would end the process.
    fn read(&self, at: u64, len: usize) -> Vec<u8>;
}

impl Source {
    /// Maps the file at `path` into memory. Also gives the time at which it was changed last.
    ///
    /// The file must not be overwritten or truncated by another program while it is mapped.
    ///
    /// # Errors
    /// A file that cannot be opened, or that is empty.
    pub fn map(path: &Path) -> Result<(Self, Option<SystemTime>), GgufError> {
        let fail = |e: io::Error| GgufError::of_file(path, e);
        let file = kvant_files::open(path).map_err(fail)?;
        let info = file.metadata().map_err(fail)?;
        if info.len() == 0 {
            return Err(GgufError::of_file(path, Problem::Empty));
        }
        // SAFETY: the mapping is private and read-only, this process never writes to a file in place (`GgufWriter`
        // renames a new file over the old one, which leaves the mapped one whole), and `Mmap` keeps the pages mapped
        // for as long as the slices borrowed from it. What remains is another program that truncates or overwrites
        // the file while it is open; `Gguf::open` and `Source::map` document that as the caller's duty, as every mmap reader has to.
        let map = unsafe { Mmap::map(&file) }.map_err(fail)?;
        Ok((Self(Bytes::Mapped(map)), info.modified().ok()))
    }
}

impl Source {
    /// The first `n` bytes of what `store` has, and it for the others.
    pub(crate) fn stored(store: Box<dyn Store>, n: usize) -> Self {
        Self(Bytes::Stored(store.read(0, n), store))
    }

    /// The same with at least twice as many bytes in memory, as far as there are any.
    pub(crate) fn grown(self) -> Self {
        match self.0 {
            Bytes::Stored(head, store) => {
                let n = store.n_bytes().min(2 * head.len() as u64);
                drop(head);
                Self::stored(store, n as usize)
            }
            all => Self(all),
        }
    }

    /// Size of the file in bytes.
    pub(crate) fn n_bytes(&self) -> u64 {
        if let Bytes::Stored(_, store) = &self.0 { store.n_bytes() } else { self.len() as u64 }
    }

    /// The `len` bytes from byte `at` on, which lie in the file.
    pub(crate) fn range(&self, at: u64, len: usize) -> Cow<'_, [u8]> {
        match &self.0 {
            Bytes::Stored(_, store) => Cow::Owned(store.read(at, len)),
            // They lie in memory, so that their place fits usize.
            _ => Cow::Borrowed(&self[at as usize..][..len]),
        }
    }

    /// Gives the memory of a mapped file back; its bytes are read from the file again when they are next looked at.
    pub fn release(&self) {
        #[cfg(unix)]
        if let Bytes::Mapped(map) = &self.0 {
            // SAFETY: the mapping is private, read-only and backed by the file, and nothing ever writes to it, so what a
            // later read brings back are the same bytes.
            // A system that cannot give memory back keeps it: slower for others, wrong for nobody.
            let _ = unsafe { map.unchecked_advise(memmap2::UncheckedAdvice::DontNeed) };
        }
    }
}

/// What is in memory: the first bytes of what is stored, else all.
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
