//! A model in GGUF: its files, metadata and tensors.

use std::borrow::Cow;
use std::path::Path;
use std::time::SystemTime;

use crate::error::{GgufError, Item, Problem};
use crate::meta::Meta;
use crate::parse::{self, sorted};
use crate::shard::Shard;
use crate::source::{RangeReader, Source};
use crate::split;
use crate::tensor::{TensorInfo, TensorView};
use crate::virtual_file::{SourceFile, TensorSource, VirtualFile};
use crate::writer::GgufWriter;

/// Bytes of a stored file read first to find its head, and the maximum searched.
const INITIAL_HEAD_BYTES: u64 = 8 << 20;
const MAX_HEAD: u64 = 1 << 30;

/// A validated GGUF model: one file, all shards of a split one, or a
/// [virtual file](Gguf::from_virtual).
pub struct Gguf {
    /// At least one; the first holds the metadata.
    pub(crate) shards: Vec<Shard>,
    pub(crate) tensors: Vec<TensorInfo>,
    /// Indices of `tensors` in the order of their names.
    pub(crate) by_name: Vec<usize>,
    /// Source of the tensors' data, if not the shards.
    described: Option<VirtualFile>,
}

impl Gguf {
    /// Maps and validates the file at `path`; if it is a shard of a split model
    /// (`NAME-00001-of-0000N.gguf`), all of its shards.
    ///
    /// No other program may overwrite or truncate the files while the model is open.
    ///
    /// # Errors
    /// [`GgufError`] with the file, the key or tensor and the byte offset of the first problem.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, GgufError> {
        Ok(Self::from_shards(split::open_all(path.as_ref())?)?.with_scales())
    }

    /// Validates a file in memory: `Vec<u8>`, `Arc<[u8]>`, or `&'static [u8]` from
    /// `include_bytes!`, without a copy.
    ///
    /// # Errors
    /// As [`Gguf::open`], without a file name; also for a shard of a split model.
    pub fn from_bytes(bytes: impl Into<Source>) -> Result<Self, GgufError> {
        let shard = Shard::new(None, bytes.into())?;
        split::refuse_shard(&shard)?;
        Ok(Self::from_shards(vec![shard])?.with_scales())
    }

    /// Validates a file that `store` reads in parts. Its head is kept in memory; tensors are read
    /// on request.
    ///
    /// # Errors
    /// As [`Gguf::from_bytes`]. Metadata beyond 1 GiB is treated as truncated.
    pub fn from_reader(store: Box<dyn RangeReader>) -> Result<Self, GgufError> {
        let n = store.n_bytes().min(INITIAL_HEAD_BYTES);
        let mut source = Source::stored(store, n as usize);
        let is_cut =
            |error: &GgufError| matches!(error.problem(), Problem::Truncated { .. } | Problem::Count { .. });
        let parsed = loop {
            match parse::parse_head(&source, source.n_bytes()) {
                Err(error) if is_cut(&error) && (source.len() as u64) < source.n_bytes().min(MAX_HEAD) => {
                    source = source.read_more();
                }
                done => break done?,
            }
        };
        let shard = Shard { path: None, modified: None, bytes: source, head: None, parsed };
        split::refuse_shard(&shard)?;
        Ok(Self::from_shards(vec![shard])?.with_scales())
    }

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

    fn from_shards(mut shards: Vec<Shard>) -> Result<Self, GgufError> {
        let mut tensors = Vec::new();
        for (i, shard) in shards.iter_mut().enumerate() {
            let own = std::mem::take(&mut shard.parsed.tensors);
            tensors.extend(own.into_iter().map(|t| TensorInfo { shard: i, ..t }));
        }
        let by_name = sorted(&tensors, |t| &t.name).map_err(|(first, second)| {
            let (first, second) = (&tensors[first], &tensors[second]);
            let problem =
                Problem::Duplicate { first: first.record, first_file: shards[first.shard].path.clone() };
            GgufError::new(Item::Tensor(second.name.clone()), second.record, problem)
                .in_file(shards[second.shard].path.as_deref())
        })?;
        Ok(Self { shards, tensors, by_name, described: None })
    }

    /// Returns the metadata of the first shard.
    pub fn meta(&self) -> Meta<'_> {
        Meta::of(&self.shards[0])
    }

    /// Returns the tensors of all shards, in the order of the files.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// Returns the record of the tensor `name`, or `None`.
    pub fn find_info(&self, name: &str) -> Option<&TensorInfo> {
        let found = self.by_name.binary_search_by(|i| self.tensors[*i].name.as_str().cmp(name)).ok()?;
        Some(&self.tensors[self.by_name[found]])
    }

    /// Returns the tensor `name` with its data, or `None`.
    pub fn find_tensor(&self, name: &str) -> Option<TensorView<'_>> {
        let info = self.find_info(name)?;
        Some(TensorView { info, bytes: self.data(info) })
    }

    /// Returns the data of one of this model's [`Gguf::tensors`], `[info.n_bytes]`: borrowed if a
    /// file in memory holds it in this format.
    ///
    /// # Panics
    /// When `info` comes from another model and its range is outside this one's files; within them,
    /// the bytes are meaningless.
    pub fn data(&self, info: &TensorInfo) -> Cow<'_, [u8]> {
        let bytes = self.stored_data(info);
        match (info.scales, info.packed) {
            (Some(scales), _) => Cow::Owned(self.scaled(&bytes, scales, info.dtype)),
            (None, Some(packed)) => Cow::Owned(packed.unpack(&bytes)),
            (None, None) => bytes,
        }
    }

    /// Returns the number of parts of whole rows that a tensor consists of: one, but for large
    /// tables of a [virtual file](Gguf::from_virtual).
    pub fn n_parts(&self, info: &TensorInfo) -> usize {
        match &self.described {
            Some(described) if info.packed.is_none() => described.source.n_parts(&info.name),
            _ => 1,
        }
    }

    /// Returns one of these parts, borrowed where [`Gguf::data`] would borrow it if it were all.
    ///
    /// # Panics
    /// As [`Gguf::data`], and when there is no such part.
    pub fn part(&self, info: &TensorInfo, index: usize) -> Cow<'_, [u8]> {
        match &self.described {
            Some(described) if self.n_parts(info) > 1 => described.source.part(&info.name, index),
            _ => self.data(info),
        }
    }

    /// Returns the data as in the file, `[info.stored_bytes]`.
    ///
    /// # Panics
    /// As [`Gguf::data`].
    pub fn stored_data(&self, info: &TensorInfo) -> Cow<'_, [u8]> {
        match &self.described {
            Some(described) => {
                let bytes = described.source.data(&info.name);
                assert_eq!(bytes.len(), info.stored_bytes, "{}", info.name);
                bytes
            }
            // Validated by `parse`: the end is within the file.
            None => self.shards[info.shard].bytes.range(info.offset, info.stored_bytes),
        }
    }

    /// Returns the tensor `name` with its data.
    ///
    /// # Errors
    /// [`Problem::Missing`] if it does not exist.
    pub fn tensor(&self, name: &str) -> Result<TensorView<'_>, GgufError> {
        let info = self.info(name)?;
        Ok(TensorView { info, bytes: self.data(info) })
    }

    /// Returns the record of the tensor `name`.
    ///
    /// # Errors
    /// [`Problem::Missing`] if it does not exist.
    pub fn info(&self, name: &str) -> Result<&TensorInfo, GgufError> {
        self.find_info(name).ok_or_else(|| {
            GgufError::new(Item::Tensor(name.to_owned()), None, Problem::Missing).in_file(self.path())
        })
    }

    /// Returns the memory of mapped files to the system; later reads load the data from the files
    /// again. For a loader that has copied what it needs.
    pub fn release(&self) {
        match &self.described {
            Some(described) => described.source.release(),
            None => self.shards.iter().for_each(|shard| shard.bytes.release()),
        }
    }

    /// Returns the GGUF version of the (first) file, 2 or 3.
    pub fn version(&self) -> u32 {
        self.shards[0].parsed.version
    }

    /// Returns the alignment of data in the (first) file in bytes, a power of two.
    pub fn alignment(&self) -> u64 {
        self.shards[0].parsed.alignment
    }

    /// Returns the path of the (first) file, or the place of a [virtual](Gguf::from_virtual) one;
    /// `None` for a file in memory.
    pub fn path(&self) -> Option<&Path> {
        self.shards[0].path.as_deref()
    }

    /// Returns the path of every file in order, `None` for one in memory.
    pub fn shard_paths(&self) -> impl Iterator<Item = Option<&Path>> {
        let described = self.described.iter().flat_map(|described| &described.files);
        let shards = self.own_shards().iter().map(|shard| shard.path.as_deref());
        described.map(|file| Some(file.path.as_path())).chain(shards)
    }

    /// Returns the shards that are real files.
    fn own_shards(&self) -> &[Shard] {
        if self.described.is_some() { &[] } else { &self.shards }
    }

    /// Returns size in bytes and modification time of every file in order, at the time of opening;
    /// `None` as time if the system does not report it, and for a file in memory.
    pub fn shard_stamps(&self) -> impl Iterator<Item = (u64, Option<SystemTime>)> {
        let described = self.described.iter().flat_map(|described| &described.files);
        let shards = self.own_shards().iter().map(|shard| (shard.bytes.n_bytes(), shard.modified));
        described.map(|file| (file.n_bytes, file.modified)).chain(shards)
    }

    /// Returns the size of all files together in bytes.
    pub fn file_bytes(&self) -> u64 {
        self.shard_stamps().map(|(n_bytes, _)| n_bytes).sum()
    }
}

impl std::fmt::Debug for Gguf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gguf").field("path", &self.path()).finish_non_exhaustive()
    }
}
