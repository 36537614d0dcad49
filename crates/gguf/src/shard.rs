//! One file of a model.

use std::path::PathBuf;
use std::time::SystemTime;

use crate::error::GgufError;
use crate::parse::{self, Parsed};
use crate::source::Source;

/// One file of a model.
pub(crate) struct Shard {
    pub path: Option<PathBuf>,
    pub modified: Option<SystemTime>,
    pub bytes: Source,
    /// A copy of the file's head, as another program may change the file: see [`Shard::open`].
    pub head: Option<Vec<u8>>,
    pub parsed: Parsed,
}

impl Shard {
    pub fn new(path: Option<PathBuf>, bytes: Source) -> Result<Self, GgufError> {
        let parsed = parse::parse(&bytes).map_err(|e| e.in_file(path.as_deref()))?;
        Ok(Self { path, modified: None, bytes, head: None, parsed })
    }

    /// Maps a file and copies its metadata: metadata is read as long as the model is open, and a
    /// file that is truncated or overwritten meanwhile would end the process, or return unvalidated
    /// data.
    pub fn open(path: PathBuf) -> Result<Self, GgufError> {
        let (bytes, modified) = Source::map(&path)?;
        let copied = |bytes: &Source| {
            let head = bytes[..parse::parse(bytes)?.n_head].to_vec();
            let parsed = parse::parse_head(&head, bytes.n_bytes())?;
            Ok((head, parsed))
        };
        let (head, parsed) = copied(&bytes).map_err(|e: GgufError| e.in_file(Some(&path)))?;
        Ok(Self { path: Some(path), modified, bytes, head: Some(head), parsed })
    }

    /// Returns the bytes of the head, from the start of the file.
    pub fn head(&self) -> &[u8] {
        self.head.as_deref().unwrap_or(&self.bytes)
    }
}
