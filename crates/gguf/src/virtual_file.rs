//! Virtual GGUF files: metadata and records in memory, tensor data elsewhere.

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::{Gguf, GgufError, GgufWriter, Shard, Source, parse};

/// Source of tensor data outside of GGUF files.
pub trait TensorSource: Send + Sync {
    /// Returns the data of the tensor `name`, with the length of its shape and type in the virtual
    /// file.
    fn data(&self, name: &str) -> Cow<'_, [u8]>;

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

impl Gguf {
    /// Opens a virtual GGUF file: the head of `writer` with tensors from `source`. Everything that
    /// reads a model reads this one. `place` represents it in messages, `files` are all files
    /// behind it.
    ///
    /// # Errors
    /// The same as for a real file with this head.
    pub fn from_virtual(
        writer: &GgufWriter,
        place: &Path,
        files: Vec<SourceFile>,
        source: Box<dyn TensorSource>,
    ) -> Result<Self, GgufError> {
        let (head, file_len) = writer.layout()?;
        let parsed = parse::parse_head(&head, file_len).map_err(|error| error.in_file(Some(place)))?;
        let shard = Shard {
            path: Some(place.to_owned()),
            modified: None,
            bytes: Source::from(head),
            head: None,
            parsed,
        };
        let gguf = Self::from_shards(vec![shard])?;
        Ok(Self { described: Some(VirtualFile { files, source }), ..gguf })
    }
}
