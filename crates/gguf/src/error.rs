//! What can be wrong with a file, and where.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use kvant_codec::DType;

use crate::{Packed, printable, printable_path};

/// Why a file could not be read, looked into or written: [`Problem`], [`Item`], byte offset and file.
///
/// `Display` gives one line, e.g. `model.gguf: tensor "output.weight" at byte 5120: ends at byte 9000, the file has 8192`.
#[derive(Debug)]
pub struct GgufError(Box<Inner>);

#[derive(Debug)]
struct Inner {
    file: Option<PathBuf>,
    item: Option<Item>,
    offset: Option<u64>,
    problem: Problem,
}

/// The part of a file that an error is about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Item {
    /// Magic, version and the two counts.
    Header,
    /// The nth (from 0) metadata record, whose key could not be read.
    NthKey(u64),
    /// The metadata record of this key.
    Key(String),
    /// The nth (from 0) tensor record, whose name could not be read.
    NthTensor(u64),
    /// The record or data of the tensor of this name.
    Tensor(String),
}

/// What is wrong.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Problem {
    /// The operating system refused, or the path leads to no regular file.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// The file has no bytes.
    #[error("the file is empty")]
    Empty,
    /// The first four bytes are not `GGUF`.
    #[error("is not a GGUF file: it starts with {got:02x?}, not \"GGUF\"")]
    Magic {
        /// The first bytes, four at most.
        got: Vec<u8>,
    },
    /// The file was written in big-endian order.
    #[error("is a big-endian GGUF file (version {version}); only little-endian files can be read")]
    BigEndian {
        /// The version, read in that order.
        version: u32,
    },
    /// A version that this crate does not read.
    #[error("GGUF version {got} is not supported, only 2 and 3 are")]
    Version {
        /// The version found.
        got: u32,
    },
    /// The file ends inside this item.
    #[error("needs {need} bytes, but the file ends after {left}")]
    Truncated {
        /// Bytes needed from the offset on.
        need: u64,
        /// Bytes there are.
        left: u64,
    },
    /// A count that the rest of the file cannot hold, whatever its contents.
    #[error("claims {count} {what}, but the rest of the file holds {at_most} at most")]
    Count {
        /// What is counted.
        what: &'static str,
        /// The count found.
        count: u64,
        /// The most that fit into the bytes that follow.
        at_most: u64,
    },
    /// A name of zero bytes or of too many.
    #[error("the name has {got} bytes, not 1 to {max}")]
    NameLength {
        /// Bytes found.
        got: u64,
        /// Bytes allowed.
        max: u64,
    },
    /// Text that has to be UTF-8 and is not.
    #[error("is not UTF-8 from its byte {valid} on")]
    Utf8 {
        /// Length of the valid beginning in bytes.
        valid: usize,
    },
    /// The same name a second time.
    #[error("occurs twice; first at byte {first}{}", in_file(.first_file))]
    Duplicate {
        /// Offset of the first record.
        first: u64,
        /// The file of the first record, where it is another shard.
        first_file: Option<PathBuf>,
    },
    /// A tensor of a name that was added before.
    #[error("was added already, as tensor {first}")]
    Declared {
        /// Its number, from 0.
        first: usize,
    },
    /// A metadata type id that GGUF does not define.
    #[error("has unknown value type {id}")]
    ValueType {
        /// The id found.
        id: u32,
    },
    /// A boolean that is neither 0 nor 1.
    #[error("is a bool of value {got}, not 0 or 1")]
    Bool {
        /// The byte found.
        got: u8,
    },
    /// Arrays within arrays beyond the limit.
    #[error("nests arrays deeper than {max}")]
    Depth {
        /// Levels allowed.
        max: usize,
    },
    /// An alignment that is no power of two.
    #[error("must be a power of two, got {got}")]
    Alignment {
        /// The alignment found.
        got: u64,
    },
    /// Too few or too many dimensions.
    #[error("has {got} dimensions, not 1 to {max}")]
    Dims {
        /// Dimensions found.
        got: u64,
        /// Dimensions allowed.
        max: usize,
    },
    /// A shape that holds nothing, or more than the address space.
    #[error("has the impossible shape {shape:?}")]
    Shape {
        /// Dimensions as found, fastest first.
        shape: Vec<u64>,
    },
    /// A tensor type that the codec does not know.
    #[error("has unsupported tensor type {id}{}; read are {}", ggml_name(*.id), types())]
    TensorType {
        /// The id found.
        id: u32,
    },
    /// A format that files do not hold.
    #[error("{dtype} has no GGUF tensor type")]
    NotStorable {
        /// The format given.
        dtype: DType,
    },
    /// A row that is not a whole number of blocks.
    #[error("has rows of {row} values, not a multiple of the {type_name} block of {block}")]
    Row {
        /// The tensor's format.
        type_name: &'static str,
        /// Values per block.
        block: usize,
        /// Values per row.
        row: usize,
    },
    /// A data offset that is not a multiple of the alignment.
    #[error("has data offset {got}, not a multiple of the alignment {alignment}")]
    Misaligned {
        /// The offset found, relative to the data section.
        got: u64,
        /// The file's alignment.
        alignment: u64,
    },
    /// Tensor data outside the file.
    #[error("has {bytes} bytes of data at data offset {offset}, beyond the file's end at byte {file_len}")]
    PastEnd {
        /// Size of the data in bytes.
        bytes: u64,
        /// The offset found, relative to the data section.
        offset: u64,
        /// Length of the file in bytes.
        file_len: u64,
    },
    /// Two tensors that share bytes.
    #[error("overlaps tensor {}, which ends at byte {other_end}", name(.other))]
    Overlap {
        /// The tensor before.
        other: String,
        /// Absolute offset where that one ends.
        other_end: u64,
    },
    /// A tensor whose data does not fill the space up to the next one: its type or shape is not what it was written with.
    #[error("claims type {id} ({type_name}, {want} bytes), but {got} bytes lie before {}", if *.is_last { "the file's end" } else { "the next tensor" })]
    Space {
        /// The id found.
        id: u32,
        /// What the id means here.
        type_name: &'static str,
        /// Bytes of such a tensor, padding excluded.
        want: u64,
        /// Bytes up to the next tensor or the end of the file.
        got: u64,
        /// Whether no tensor follows.
        is_last: bool,
    },
    /// A key or tensor that is not in the file.
    #[error("is missing")]
    Missing,
    /// A value of another type, or one that the type asked for cannot hold.
    #[error("expected {expected}, got {got}")]
    WrongType {
        /// What was asked for.
        expected: String,
        /// What the file holds.
        got: String,
    },
    /// A shard that is not named `NAME-00001-of-0000N.gguf`.
    #[error(
        "belongs to a model split into {count} files; such a file is opened by path and named NAME-00001-of-{count:05}.gguf"
    )]
    ShardName {
        /// Number of files.
        count: u64,
    },
    /// A shard that contradicts its name or the first shard.
    #[error("is {got} here, but {want} by {by}")]
    ShardDisagrees {
        /// What this shard holds.
        got: String,
        /// What it should hold.
        want: String,
        /// Where that is from.
        by: &'static str,
    },
    /// Tensor data given for another tensor than the next one in the header, or for one too many.
    #[error("was given out of order; next is {want}")]
    Order {
        /// The tensor whose turn it is, or a word for none.
        want: String,
    },
    /// Tensor data of the wrong size.
    #[error("takes {want} bytes of data, got {got}")]
    DataSize {
        /// Bytes of the shape and type declared.
        want: u64,
        /// Bytes given; for a reader, bytes until it ended.
        got: u64,
    },
}

impl GgufError {
    /// The file, where the source has a path.
    pub fn file(&self) -> Option<&Path> {
        self.0.file.as_deref()
    }

    /// The part of the file.
    pub fn item(&self) -> Option<&Item> {
        self.0.item.as_ref()
    }

    /// Byte offset in the file.
    pub fn offset(&self) -> Option<u64> {
        self.0.offset
    }

    /// What is wrong.
    pub fn problem(&self) -> &Problem {
        &self.0.problem
    }

    pub(crate) fn new(item: Item, offset: impl Into<Option<u64>>, problem: Problem) -> Self {
        Self(Box::new(Inner { file: None, item: Some(item), offset: offset.into(), problem }))
    }

    pub(crate) fn of_file(path: &Path, problem: impl Into<Problem>) -> Self {
        Self::from(problem.into()).in_file(Some(path))
    }

    /// Names the file, unless that is done already.
    pub(crate) fn in_file(mut self, path: Option<&Path>) -> Self {
        if self.0.file.is_none() {
            self.0.file = path.map(Path::to_owned);
        }
        self
    }
}

impl From<Problem> for GgufError {
    fn from(problem: Problem) -> Self {
        Self(Box::new(Inner { file: None, item: None, offset: None, problem }))
    }
}

impl fmt::Display for GgufError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Inner { file, item, offset, problem } = &*self.0;
        if let Some(file) = file {
            write!(f, "{}: ", printable_path(file))?;
        }
        match (item, offset) {
            (Some(item), Some(offset)) => write!(f, "{item} at byte {offset}: {problem}"),
            (Some(item), None) => write!(f, "{item}: {problem}"),
            (None, Some(offset)) => write!(f, "byte {offset}: {problem}"),
            (None, None) => write!(f, "{problem}"),
        }
    }
}

impl std::error::Error for GgufError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match &self.0.problem {
            Problem::Io(error) => Some(error),
            _ => None,
        }
    }
}

impl fmt::Display for Item {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Header => f.write_str("header"),
            Self::NthKey(n) => write!(f, "metadata record {n}"),
            Self::Key(key) => write!(f, "key {}", name(key)),
            Self::NthTensor(n) => write!(f, "tensor record {n}"),
            Self::Tensor(tensor) => write!(f, "tensor {}", name(tensor)),
        }
    }
}

/// A problem at an offset, before it is known to which item it belongs.
#[derive(Debug)]
pub(crate) struct Fault {
    pub offset: u64,
    pub problem: Problem,
}

impl Fault {
    pub(crate) fn in_item(self, item: Item) -> GgufError {
        GgufError::new(item, self.offset, self.problem)
    }
}

/// A name, which may be 64 KiB of anything, in quotes.
fn name(name: &str) -> String {
    format!("\"{}\"", printable(name, 96))
}

fn in_file(file: &Option<PathBuf>) -> String {
    file.as_ref().map(|f| format!(" of {}", printable_path(f))).unwrap_or_default()
}

/// Names of the types that files may hold.
fn types() -> String {
    let types = DType::ALL.into_iter().filter(|dtype| dtype.ggml_id().is_some()).map(DType::name);
    types.chain(Packed::stored().map(Packed::name)).collect::<Vec<_>>().join(" ")
}

/// GGML's name of a type that the codec does not know, in brackets; empty where GGML has none either.
fn ggml_name(id: u32) -> &'static str {
    match id {
        9 => " (q8_1)",
        15 => " (q8_K)",
        41 => " (q1_0)",
        _ => "",
    }
}
