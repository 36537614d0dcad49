//! Models that are described as a GGUF file would be, while their tensors lie elsewhere.

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::{Gguf, GgufError, GgufWriter, Shard, Source, parse};

/// Where the data of tensors comes from that are in no GGUF file.
pub trait TensorSource: Send + Sync {
    /// The data of the tensor of this name, as many bytes as its shape and type in the description take.
    fn data(&self, name: &str) -> Cow<'_, [u8]>;

    /// Gives memory back to the system that can be read again.
    fn release(&self);
}

/// A file that a described model is read from, as it was opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceFile {
    /// Its path.
    pub path: PathBuf,
    /// Its size in bytes.
    pub n_bytes: u64,
    /// When it was changed last, where the system tells.
    pub modified: Option<SystemTime>,
}

/// What takes the place of files.
pub(crate) struct Described {
    pub files: Vec<SourceFile>,
    pub source: Box<dyn TensorSource>,
}

impl Gguf {
    /// A model that `writer` describes, with tensors from `source`: everything that reads a model reads this one. `place` stands
    /// for it in messages, `files` are all that it is read from.
    ///
    /// # Errors
    /// What would be wrong with such a file.
    pub fn described(
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
        Ok(Self { described: Some(Described { files, source }), ..gguf })
    }
}
