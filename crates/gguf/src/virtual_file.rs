//! Virtual GGUF files: metadata and records in memory, tensor data elsewhere.

use std::borrow::Cow;
use std::path::PathBuf;
use std::time::SystemTime;

/// Source of tensor data outside of GGUF files.
pub trait TensorSource: Send + Sync {
    /// Returns the data of the tensor `name`, with the length of its shape and type in the virtual
    /// file.
    fn data(&self, name: &str) -> Cow<'_, [u8]>;

    /// Returns the number of parts of whole rows that the tensor `name` consists of.
    fn n_parts(&self, _name: &str) -> usize {
        1
    }

    /// Returns one of these parts, without the others. All of them are the data.
    fn part(&self, name: &str, _index: usize) -> Cow<'_, [u8]> {
        self.data(name)
    }

    /// Releases memory that can be read again.
    fn release(&self);
}

/// A file behind a virtual GGUF file, as it was opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceFile {
    /// Its path.
    pub path: PathBuf,
    /// Its size in bytes.
    pub n_bytes: u64,
    /// Time of the last modification, if the system reports it.
    pub modified: Option<SystemTime>,
}

/// Replaces the files of a model.
pub(crate) struct VirtualFile {
    pub files: Vec<SourceFile>,
    pub source: Box<dyn TensorSource>,
}
