//! Reads and writes GGUF v2 and v3 files; every byte is untrusted.
//!
//! [`Gguf::open`] maps a file, or all shards of a split one, parses it once and validates
//! everything that later calls rely on: afterwards, no call reads outside the file. Metadata is
//! decoded lazily: an array of 150,000 tokens takes no allocation until it is iterated.
//! [`GgufWriter`] writes files atomically.
//!
//! ```
//! use kvant_codec::DType;
//! use kvant_gguf::{Gguf, GgufError, GgufWriter, Strings};
//!
//! # fn main() -> Result<(), GgufError> {
//! let mut writer = GgufWriter::new();
//! writer.set("general.architecture", "llama")?;
//! writer.set("llama.block_count", 1u32)?;
//! writer.set_array("tokenizer.ggml.tokens", ["<s>", "hello"])?;
//! writer.add_tensor("token_embd.weight", &[4, 2], DType::F32)?;
//! let mut file = Vec::new();
//! writer.write_to(&mut file, |data| data.bytes("token_embd.weight", &[0; 32]))?;
//!
//! let gguf = Gguf::from_bytes(file)?;
//! assert_eq!(gguf.meta().get::<usize>("llama.block_count")?, 1);
//! assert_eq!(gguf.meta().find::<f32>("llama.rope.freq_base")?, None);
//! assert_eq!(gguf.meta().get::<Strings>("tokenizer.ggml.tokens")?.count(), 2);
//! assert_eq!(gguf.tensor("token_embd.weight")?.bytes.len(), 32);
//! # Ok(())
//! # }
//! ```

mod cursor;
mod error;
mod load_only;
mod meta;
pub mod oracle;
mod parse;
mod printable;
mod scaled;
mod source;
mod split;
mod value;
mod virtual_file;
mod writer;

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use kvant_codec::DType;

pub use error::{GgufError, Item, Problem};
pub use load_only::LoadOnlyType;
pub use meta::{Meta, MetaIter};
use parse::{Parsed, sorted};
pub use printable::{printable, printable_path};
use scaled::TensorScales;
pub use source::{RangeReader, Source};
pub use value::{Array, Element, Elements, FromValue, Strings, Value, ValueType};
use virtual_file::VirtualFile;
pub use virtual_file::{SourceFile, TensorSource};
pub use writer::{GgufWriter, TensorSink};

/// Bytes of a stored file read first to find its head, and the maximum searched.
const INITIAL_HEAD_BYTES: u64 = 8 << 20;
const MAX_HEAD: u64 = 1 << 30;

/// A validated GGUF model: one file, all shards of a split one, or a
/// [virtual file](Gguf::from_virtual).
pub struct Gguf {
    /// At least one; the first holds the metadata.
    shards: Vec<Shard>,
    tensors: Vec<TensorInfo>,
    /// Indices of `tensors` in the order of their names.
    by_name: Vec<usize>,
    /// Source of the tensors' data, if not the shards.
    described: Option<VirtualFile>,
}

/// One file of a model.
struct Shard {
    path: Option<PathBuf>,
    modified: Option<SystemTime>,
    bytes: Source,
    /// A copy of the file's head, as another program may change the file: see [`Shard::open`].
    head: Option<Vec<u8>>,
    parsed: Parsed,
}

/// The record of a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// The name, unique in the model.
    pub name: String,
    /// 1 to 4 sizes, none zero, in GGUF order: the first is the fastest, the row length, a matrix's
    /// input features.
    pub shape: Vec<usize>,
    /// The format of the data after loading; rows are whole blocks of it.
    pub dtype: DType,
    /// Offset of the data in its file in bytes, a multiple of that file's alignment.
    pub offset: u64,
    /// Size of the data in bytes after loading.
    pub n_bytes: usize,
    /// The type in the file, if it is converted on loading.
    pub packed: Option<LoadOnlyType>,
    /// Size of the data in the file.
    pub stored_bytes: usize,
    /// Per-tensor scales to apply on loading.
    scales: Option<TensorScales>,
    /// Index of the file, see [`Gguf::shard_paths`].
    pub shard: usize,
    /// Offset of the record in its file.
    record: u64,
}

impl TensorInfo {
    /// Returns the values per row: the first size.
    pub fn row_len(&self) -> usize {
        self.shape[0]
    }

    /// Returns the number of rows: the product of all sizes but the first.
    pub fn rows(&self) -> usize {
        self.shape[1..].iter().product()
    }

    /// Returns the number of values.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// A tensor and its data.
#[derive(Debug, Clone)]
pub struct TensorView<'a> {
    /// Name, shape and format.
    pub info: &'a TensorInfo,
    /// The encoded rows, `[info.rows()]` times `[info.dtype.row_bytes(info.row_len())]` bytes. They
    /// are as aligned as the file's bytes: those of mapped files to the file's alignment, embedded
    /// ones perhaps not at all.
    pub bytes: Cow<'a, [u8]>,
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
        if let Some(described) = &self.described {
            let bytes = described.source.data(&info.name);
            assert_eq!(bytes.len(), info.n_bytes, "{}", info.name);
            return bytes;
        }
        let bytes = self.stored_data(info);
        match (info.scales, info.packed) {
            (Some(scales), _) => Cow::Owned(self.scaled(&bytes, scales)),
            (None, Some(packed)) => Cow::Owned(packed.unpack(&bytes)),
            (None, None) => bytes,
        }
    }

    /// Returns the data as in the file, `[info.stored_bytes]`.
    ///
    /// # Panics
    /// As [`Gguf::data`].
    pub fn stored_data(&self, info: &TensorInfo) -> Cow<'_, [u8]> {
        match self.described {
            Some(_) => self.data(info),
            // Validated by `parse`: the end is within the file.
            None => self.shards[info.shard].bytes.range(info.offset, info.stored_bytes),
        }
    }

    /// Returns the tensor `name` with its data.
    ///
    /// # Errors
    /// [`Problem::Missing`] if it does not exist.
    pub fn tensor(&self, name: &str) -> Result<TensorView<'_>, GgufError> {
        self.find_tensor(name).ok_or_else(|| {
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

impl Shard {
    fn new(path: Option<PathBuf>, bytes: Source) -> Result<Self, GgufError> {
        let parsed = parse::parse(&bytes).map_err(|e| e.in_file(path.as_deref()))?;
        Ok(Self { path, modified: None, bytes, head: None, parsed })
    }

    /// Maps a file and copies its metadata: metadata is read as long as the model is open, and a
    /// file that is truncated or overwritten meanwhile would end the process, or return unvalidated
    /// data.
    fn open(path: PathBuf) -> Result<Self, GgufError> {
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
    fn head(&self) -> &[u8] {
        self.head.as_deref().unwrap_or(&self.bytes)
    }
}
