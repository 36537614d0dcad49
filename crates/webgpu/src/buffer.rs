//! Buffers, and how the host reads them.

use std::num::NonZeroU64;
use std::ops::{BitOr, Deref, RangeTo};
use std::sync::Arc;

use crate::imports::{self, Object};

/// What a buffer is used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BufferUsages(pub(crate) u32);

impl BufferUsages {
    /// The host reads it.
    pub const MAP_READ: Self = Self(1);
    /// It is copied from.
    pub const COPY_SRC: Self = Self(4);
    /// It is copied or written to.
    pub const COPY_DST: Self = Self(8);
    /// Kernels read or write it.
    pub const STORAGE: Self = Self(128);
}

impl BitOr for BufferUsages {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// A buffer to be made.
#[derive(Debug)]
pub struct BufferDescriptor<'a> {
    /// Its name; not handed on.
    pub label: Option<&'a str>,
    /// Its bytes.
    pub size: u64,
    /// What it is used for.
    pub usage: BufferUsages,
    /// Whether it begins mapped; no buffer here does.
    pub mapped_at_creation: bool,
}

/// Memory of the device, which lives until the last clone and all commands with it are gone.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Buffer {
    pub(crate) object: Arc<Object>,
    size: u64,
}

/// Bytes of a buffer, at least one.
pub type BufferSize = NonZeroU64;

/// A part of a buffer, for a kernel.
#[derive(Debug, Clone)]
pub struct BufferBinding<'a> {
    /// The buffer.
    pub buffer: &'a Buffer,
    /// Where the part begins, in bytes.
    pub offset: u64,
    /// Its bytes; all that follow where nothing is said.
    pub size: Option<BufferSize>,
}

impl Buffer {
    pub(crate) fn new(object: u32, size: u64) -> Self {
        Self { object: Arc::new(Object(object)), size }
    }

    /// Its bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// All of it, for a kernel.
    pub fn as_entire_binding(&self) -> crate::BindingResource<'_> {
        crate::BindingResource::Buffer(BufferBinding { buffer: self, offset: 0, size: None })
    }

    /// Its first bytes.
    pub fn slice(&self, bytes: RangeTo<u64>) -> BufferSlice<'_> {
        BufferSlice { buffer: self, len: bytes.end }
    }

    /// Ends what [`BufferSlice::map_async`] began.
    pub fn unmap(&self) {
        imports::unmap(self.object.0);
    }
}

/// What mapping is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MapMode {
    /// The host reads.
    Read,
}

/// The first bytes of a buffer.
#[derive(Debug, Clone, Copy)]
pub struct BufferSlice<'a> {
    buffer: &'a Buffer,
    len: u64,
}

impl BufferSlice<'_> {
    /// Has the bytes come to the host, which [`Device::poll`](crate::Device::poll) waits for. Whether they did shows when they are
    /// asked for: `done` is not called.
    pub fn map_async(&self, MapMode::Read: MapMode, _done: impl FnOnce(())) {
        imports::map(self.buffer.object.0, 0.0, self.len as f64);
    }

    /// The bytes.
    ///
    /// # Errors
    /// Where they have not come.
    pub fn get_mapped_range(&self) -> Result<BufferView, MapRangeError> {
        let mut bytes = vec![0; self.len as usize];
        let is_there = imports::mapped(&self.buffer.object, 0.0, &mut bytes);
        if is_there { Ok(BufferView(bytes)) } else { Err(MapRangeError) }
    }
}

/// Bytes that came from a buffer.
#[derive(Debug)]
pub struct BufferView(Vec<u8>);

impl Deref for BufferView {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

/// Bytes that have not come.
#[derive(Debug, Clone, Copy)]
pub struct MapRangeError;

impl std::fmt::Display for MapRangeError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("what was to be read has not come from the GPU")
    }
}
