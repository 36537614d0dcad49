//! Buffers, and how the host reads them.

use std::num::NonZeroU64;
use std::ops::{BitOr, Deref, RangeTo};
use std::sync::Arc;

use crate::imports::{self, Object};

/// Allowed uses of a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BufferUsages(pub(crate) u32);

impl BufferUsages {
    /// The host reads it.
    pub const MAP_READ: Self = Self(1);
    /// Source of copies.
    pub const COPY_SRC: Self = Self(4);
    /// Destination of copies and writes.
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

/// Describes a buffer to create.
#[derive(Debug)]
pub struct BufferDescriptor<'a> {
    /// Its name; unused.
    pub label: Option<&'a str>,
    /// Its size in bytes.
    pub size: u64,
    /// Its allowed uses.
    pub usage: BufferUsages,
    /// Whether it is created mapped; unsupported here.
    pub mapped_at_creation: bool,
}

/// Memory of the device, which lives until the last clone and all commands that use it are dropped.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Buffer {
    pub(crate) object: Arc<Object>,
    size: u64,
}

/// Size of a buffer in bytes, at least one.
pub type BufferSize = NonZeroU64;

/// A range of a buffer, bound to a kernel.
#[derive(Debug, Clone)]
pub struct BufferBinding<'a> {
    /// The buffer.
    pub buffer: &'a Buffer,
    /// Start of the range in bytes.
    pub offset: u64,
    /// Its size in bytes; `None` for the rest of the buffer.
    pub size: Option<BufferSize>,
}

impl Buffer {
    pub(crate) fn new(object: u32, size: u64) -> Self {
        Self { object: Arc::new(Object(object)), size }
    }

    /// Returns the size in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Returns a binding of the whole buffer.
    pub fn as_entire_binding(&self) -> crate::BindingResource<'_> {
        crate::BindingResource::Buffer(BufferBinding { buffer: self, offset: 0, size: None })
    }

    /// Returns the first bytes of the buffer.
    pub fn slice(&self, bytes: RangeTo<u64>) -> BufferSlice<'_> {
        BufferSlice { buffer: self, len: bytes.end }
    }

    /// Ends the mapping that [`BufferSlice::map_async`] began.
    pub fn unmap(&self) {
        imports::unmap(self.object.0);
    }
}

/// Purpose of a mapping.
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
    /// Starts copying the bytes to the host; [`Device::poll`](crate::Device::poll) waits for the
    /// copy. `done` is not called: [`BufferSlice::get_mapped_range`] reports a failure.
    pub fn map_async(&self, MapMode::Read: MapMode, _done: impl FnOnce(())) {
        imports::map(self.buffer.object.0, 0.0, self.len as f64);
    }

    /// Returns the bytes.
    ///
    /// # Errors
    /// If they have not arrived.
    pub fn get_mapped_range(&self) -> Result<BufferView, MapRangeError> {
        let mut bytes = vec![0; self.len as usize];
        let is_mapped = imports::mapped(&self.buffer.object, 0.0, &mut bytes);
        if is_mapped { Ok(BufferView(bytes)) } else { Err(MapRangeError) }
    }
}

/// Bytes read from a buffer.
#[derive(Debug)]
pub struct BufferView(Vec<u8>);

impl Deref for BufferView {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

/// The bytes have not arrived.
#[derive(Debug, Clone, Copy)]
pub struct MapRangeError;

impl std::fmt::Display for MapRangeError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the bytes have not arrived from the GPU")
    }
}
