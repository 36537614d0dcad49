//! Read and write GGUF v2 and v3 files; every byte is untrusted.
//!
//! [`Gguf::open`] maps a file, or all shards of a split one, walks it once and checks everything that later calls rely
//! on: after that, no call can leave the bytes of the file. Metadata stays as the file has it: an array of 150,000 tokens costs
//! no allocation until it is iterated. [`GgufWriter`] writes a file whole or not at all.
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
mod described;
mod error;
mod meta;
pub mod oracle;
mod packed;
mod parse;
mod printable;
mod scaled;
mod source;
mod split;
mod value;
mod writer;

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use kvant_codec::DType;

use described::Described;
pub use described::{SourceFile, TensorSource};
pub use error::{GgufError, Item, Problem};
pub use meta::{Meta, MetaIter};
pub use packed::Packed;
use parse::{Parsed, sorted};
pub use printable::{printable, printable_path};
use scaled::Scales;
pub use source::{Source, Store};
pub use value::{Array, Element, Elements, FromValue, Strings, Value, ValueType};
pub use writer::{GgufWriter, TensorSink};

/// Bytes of a stored file that are read first, to find what it says of itself there, and those that are looked through at most.
const FIRST_HEAD: u64 = 8 << 20;
const MOST_HEAD: u64 = 1 << 30;

/// A checked GGUF model: one file, all shards of a split one, or a [description](Gguf::described) of what lies elsewhere.
pub struct Gguf {
    /// At least one; the first holds the metadata.
    shards: Vec<Shard>,
    tensors: Vec<TensorInfo>,
    /// Indices of `tensors` in the order of their names.
    by_name: Vec<usize>,
    /// Where the tensors' data is, if not in the shards.
    described: Option<Described>,
}

/// One file of a model.
struct Shard {
    path: Option<PathBuf>,
    modified: Option<SystemTime>,
    bytes: Source,
    /// A copy of what the file says of itself, where another program may change it: see [`Shard::open`].
    head: Option<Vec<u8>>,
    parsed: Parsed,
}

/// What a file says of a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// The name, unique in the model.
    pub name: String,
    /// 1 to 4 sizes, none zero, in GGUF order: the first is the fastest, the row length, a matrix's input features.
    pub shape: Vec<usize>,
    /// The format of the data that is read; rows are whole blocks of it.
    pub dtype: DType,
    /// Offset of the data in its file in bytes, a multiple of that file's alignment.
    pub offset: u64,
    /// Size of the data in bytes, as it is read.
    pub n_bytes: usize,
    /// What the file holds instead, where that is unpacked when it is read.
    pub packed: Option<Packed>,
    /// Size of the data in the file.
    pub stored_bytes: usize,
    /// What its values are multiplied with when it is read.
    scales: Option<Scales>,
    /// Index of the file, see [`Gguf::shard_paths`].
    pub shard: usize,
    /// Offset of the record in its file.
    record: u64,
}

impl TensorInfo {
    /// Values per row: the first size.
    pub fn row_len(&self) -> usize {
        self.shape[0]
    }

    /// Number of rows: the product of all sizes but the first.
    pub fn rows(&self) -> usize {
        self.shape[1..].iter().product()
    }

    /// Number of values.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// A tensor and its data.
#[derive(Debug, Clone)]
pub struct TensorView<'a> {
    /// Name, shape and format.
    pub info: &'a TensorInfo,
    /// The encoded rows, `[info.rows()]` times `[info.dtype.row_bytes(info.row_len())]` bytes. The address is as aligned
    /// as that of the file's bytes: mapped files to the file's alignment, embedded ones perhaps not at all.
    pub bytes: Cow<'a, [u8]>,
}

impl Gguf {
    /// Maps and checks the file at `path`; if it is a shard of a split model (`NAME-00001-of-0000N.gguf`), all of its shards.
    ///
    /// The files must not be overwritten or truncated by another program while the model is open.
    ///
    /// # Errors
    /// [`GgufError`] naming the file, the key or tensor and the byte offset of the first thing found wrong.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, GgufError> {
        Ok(Self::from_shards(split::open_all(path.as_ref())?)?.with_scales())
    }

    /// Checks a file that is in memory: `Vec<u8>`, `Arc<[u8]>`, or `&'static [u8]` as `include_bytes!` gives, without a copy.
    ///
    /// # Errors
    /// As [`Gguf::open`], without a file name; also for a shard of a split model.
    pub fn from_bytes(bytes: impl Into<Source>) -> Result<Self, GgufError> {
        let shard = Shard::new(None, bytes.into())?;
        split::refuse_shard(&shard)?;
        Ok(Self::from_shards(vec![shard])?.with_scales())
    }

    /// Checks a file that `store` brings parts of. What it says of itself is in memory then; tensors are read when they are asked for.
    ///
    /// # Errors
    /// As [`Gguf::from_bytes`]. Metadata of more than 1 GiB is taken to be cut off there.
    pub fn from_store(store: Box<dyn Store>) -> Result<Self, GgufError> {
        let n = store.n_bytes().min(FIRST_HEAD);
        let mut source = Source::stored(store, n as usize);
        let is_cut =
            |error: &GgufError| matches!(error.problem(), Problem::Truncated { .. } | Problem::Count { .. });
        let parsed = loop {
            match parse::parse_head(&source, source.n_bytes()) {
                Err(error) if is_cut(&error) && (source.len() as u64) < source.n_bytes().min(MOST_HEAD) => {
                    source = source.grown();
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

    /// The metadata: that of the first shard.
    pub fn meta(&self) -> Meta<'_> {
        Meta::of(&self.shards[0])
    }

    /// The tensors of all shards, in the order of the files.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// What is said of the tensor of this name, `None` if there is none.
    pub fn find_info(&self, name: &str) -> Option<&TensorInfo> {
        let found = self.by_name.binary_search_by(|i| self.tensors[*i].name.as_str().cmp(name)).ok()?;
        Some(&self.tensors[self.by_name[found]])
    }

    /// The tensor of this name with its data, `None` if there is none.
    pub fn find_tensor(&self, name: &str) -> Option<TensorView<'_>> {
        let info = self.find_info(name)?;
        Some(TensorView { info, bytes: self.data(info) })
    }

    /// The data of one of this model's [`Gguf::tensors`], `[info.n_bytes]`: borrowed where a file in memory holds it as it is.
    ///
    /// # Panics
    /// When `info` comes from another model and its range lies outside this one's files; within, the bytes mean nothing.
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

    /// The same as the file holds it, `[info.stored_bytes]`.
    ///
    /// # Panics
    /// As [`Gguf::data`].
    pub fn stored_data(&self, info: &TensorInfo) -> Cow<'_, [u8]> {
        match self.described {
            Some(_) => self.data(info),
            // Checked by `parse`: the end lies in the file.
            None => self.shards[info.shard].bytes.range(info.offset, info.stored_bytes),
        }
    }

    /// The tensor of this name.
    ///
    /// # Errors
    /// [`Problem::Missing`] if there is none.
    pub fn tensor(&self, name: &str) -> Result<TensorView<'_>, GgufError> {
        self.find_tensor(name).ok_or_else(|| {
            GgufError::new(Item::Tensor(name.to_owned()), None, Problem::Missing).in_file(self.path())
        })
    }

    /// Gives the memory of mapped files back to the system; what is read again later comes from the files. For a loader
    /// that has copied what it needs.
    pub fn release(&self) {
        match &self.described {
            Some(described) => described.source.release(),
            None => self.shards.iter().for_each(|shard| shard.bytes.release()),
        }
    }

    /// The GGUF version of the (first) file, 2 or 3.
    pub fn version(&self) -> u32 {
        self.shards[0].parsed.version
    }

    /// The alignment of data in the (first) file in bytes, a power of two.
    pub fn alignment(&self) -> u64 {
        self.shards[0].parsed.alignment
    }

    /// The path of the (first) file, or the place of a [described](Gguf::described) model; `None` for a file in memory.
    pub fn path(&self) -> Option<&Path> {
        self.shards[0].path.as_deref()
    }

    /// The path of every file in order, `None` for one in memory.
    pub fn shard_paths(&self) -> impl Iterator<Item = Option<&Path>> {
        let described = self.described.iter().flat_map(|described| &described.files);
        let shards = self.own_shards().iter().map(|shard| shard.path.as_deref());
        described.map(|file| Some(file.path.as_path())).chain(shards)
    }

    /// The shards that are files.
    fn own_shards(&self) -> &[Shard] {
        if self.described.is_some() { &[] } else { &self.shards }
    }

    /// Size in bytes of every file in order, and when it was changed last, as it was opened; `None` where the system does not
    /// tell, and for one in memory.
    pub fn shard_stamps(&self) -> impl Iterator<Item = (u64, Option<SystemTime>)> {
        let described = self.described.iter().flat_map(|described| &described.files);
        let shards = self.own_shards().iter().map(|shard| (shard.bytes.n_bytes(), shard.modified));
        described.map(|file| (file.n_bytes, file.modified)).chain(shards)
    }

    /// Size of all files together in bytes.
    pub fn file_bytes(&self) -> u64 {
        self.shard_stamps().map(|(n_bytes, _)| n_bytes).sum()
    }
}

impl Shard {
    fn new(path: Option<PathBuf>, bytes: Source) -> Result<Self, GgufError> {
        let parsed = parse::parse(&bytes).map_err(|e| e.in_file(path.as_deref()))?;
        Ok(Self { path, modified: None, bytes, head: None, parsed })
    }

    /// Maps a file and copies its metadata: they are read for as long as the model is open, and a file that is truncated or overwritten
    /// meanwhile would end the process, or say what was not checked.
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

    /// Bytes that hold the metadata, from the beginning of the file on.
    fn head(&self) -> &[u8] {
        self.head.as_deref().unwrap_or(&self.bytes)
    }
}
