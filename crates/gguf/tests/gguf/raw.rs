//! Hand-built files, byte by byte, which no correct writer would produce.

use std::path::PathBuf;

/// The bytes of the file so far.
pub struct Raw(pub Vec<u8>);

/// A version 3 header; 24 bytes.
pub fn header(n_tensors: u64, n_entries: u64) -> Raw {
    Raw(b"GGUF".to_vec()).u32(3).u64(n_tensors).u64(n_entries)
}

impl Raw {
    pub fn bytes(mut self, bytes: &[u8]) -> Self {
        self.0.extend(bytes);
        self
    }

    pub fn u32(self, v: u32) -> Self {
        self.bytes(&v.to_le_bytes())
    }

    pub fn u64(self, v: u64) -> Self {
        self.bytes(&v.to_le_bytes())
    }

    pub fn string(self, v: impl AsRef<[u8]>) -> Self {
        self.u64(v.as_ref().len() as u64).bytes(v.as_ref())
    }

    /// Appends key and value type.
    pub fn key(self, key: impl AsRef<[u8]>, value_type: u32) -> Self {
        self.string(key).u32(value_type)
    }

    /// Appends array element type and count.
    pub fn array(self, element: u32, count: u64) -> Self {
        self.u32(element).u64(count)
    }

    /// Appends a tensor record; `29 + name + 8 * dims` bytes less one dimension of 8.
    pub fn tensor(self, name: &str, shape: &[u64], type_id: u32, data: u64) -> Self {
        let dims = self.string(name).u32(shape.len() as u32);
        shape.iter().fold(dims, |raw, d| raw.u64(*d)).u32(type_id).u64(data)
    }

    /// Appends zeros up to a multiple of `alignment`, and `n` more.
    pub fn data(mut self, alignment: usize, n: usize) -> Self {
        self.0.resize(self.0.len().next_multiple_of(alignment) + n, 0);
        self
    }
}

/// Creates an empty folder for one test.
pub fn folder(name: &str) -> PathBuf {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("gguf-{name}"));
    let _ = std::fs::remove_dir_all(&path);
    std::fs::create_dir_all(&path).unwrap();
    path
}
