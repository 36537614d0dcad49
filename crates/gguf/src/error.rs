//! Errors in files, with their location.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use kvant_codec::DType;

use crate::load_only::LoadOnlyType;
use crate::printable::{printable, printable_path};

/// Reports why a file could not be read or written: [`Problem`], [`Item`], byte offset and file.
///
/// `Display` prints one line, e.g.
/// `model.gguf: key "general.alignment" at byte 57: must be a power of two, got 24`.
#[derive(Debug)]
pub struct GgufError(Box<Inner>);

#[derive(Debug)]
struct Inner {
    file: Option<PathBuf>,
    item: Option<Item>,
    offset: Option<u64>,
    problem: Problem,
}

/// The part of a file at fault.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Item {
    /// Magic, version and the two counts.
    Header,
    /// The nth (from 0) metadata record, whose key is unreadable.
    NthKey(u64),
    /// The metadata record of this key.
    Key(String),
    /// The nth (from 0) tensor record, whose name is unreadable.
    NthTensor(u64),
    /// The record or data of the tensor of this name.
    Tensor(String),
}

/// The problem.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Problem {
    /// An error of the operating system, or the path is not a regular file.
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
        /// The version in big-endian order.
        version: u32,
    },
    /// A version that this crate does not support.
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
        /// Bytes left.
        left: u64,
    },
    /// A count that exceeds the rest of the file, for any contents.
    #[error("claims {count} {what}, but the rest of the file holds {at_most} at most")]
    Count {
        /// The counted items.
        what: &'static str,
        /// The count found.
        count: u64,
        /// The maximum that fits in the bytes that follow.
        at_most: u64,
    },
    /// A name of zero or too many bytes.
    #[error("the name has {got} bytes, not 1 to {max}")]
    NameLength {
        /// Bytes found.
        got: u64,
        /// Bytes allowed.
        max: u64,
    },
    /// Text that is not UTF-8 but has to be.
    #[error("is not UTF-8 from its byte {valid} on")]
    Utf8 {
        /// Length of the valid prefix in bytes.
        valid: usize,
    },
    /// A repeated name.
    #[error("occurs twice; first at byte {first}{}", in_file(.first_file))]
    Duplicate {
        /// Offset of the first record.
        first: u64,
        /// The file of the first record, if it is another shard.
        first_file: Option<PathBuf>,
    },
    /// A tensor whose name was added before.
    #[error("was added already, as tensor {first}")]
    Declared {
        /// Its index, from 0.
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
    /// Arrays nested beyond the limit.
    #[error("nests arrays deeper than {max}")]
    Depth {
        /// Levels allowed.
        max: usize,
    },
    /// An alignment that is not a power of two.
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
    /// A shape of zero elements, or of more than the address space.
    #[error("has the impossible shape {shape:?}")]
    Shape {
        /// Dimensions as found, fastest first.
        shape: Vec<u64>,
    },
    /// A tensor type that the codec does not support.
    #[error("has unsupported tensor type {id}{}; read are {}", ggml_name(*.id), types())]
    TensorType {
        /// The id found.
        id: u32,
    },
    /// A format that files cannot contain.
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
        /// The preceding tensor.
        other: String,
        /// Absolute offset of its end.
        other_end: u64,
    },
    /// A tensor whose data does not fill the space up to the next one: it was written with another
    /// type or shape.
    #[error("claims type {id} ({type_name}, {want} bytes), but {got} bytes lie before {}", if *.is_last { "the file's end" } else { "the next tensor" })]
    Space {
        /// The id found.
        id: u32,
        /// The type of this id.
        type_name: &'static str,
        /// Bytes of such a tensor, padding excluded.
        want: u64,
        /// Bytes up to the next tensor or the end of the file.
        got: u64,
        /// Whether no tensor follows.
        is_last: bool,
    },
    /// A key or tensor missing from the file.
    #[error("is missing")]
    Missing,
    /// A value of another type, or out of range of the requested type.
    #[error("expected {expected}, got {got}")]
    WrongType {
        /// The requested type.
        expected: String,
        /// The value in the file.
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
        /// The value in this shard.
        got: String,
        /// The expected value.
        want: String,
        /// Origin of the expected value.
        by: &'static str,
    },
    /// Tensor data given out of the order of the header, or for one tensor too many.
    #[error("was given out of order; next is {want}")]
    Order {
        /// The tensor expected next, or `the end`.
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
    /// Returns the file, if the source has a path.
    pub fn file(&self) -> Option<&Path> {
        self.0.file.as_deref()
    }

    /// Returns the part of the file.
    pub fn item(&self) -> Option<&Item> {
        self.0.item.as_ref()
    }

    /// Returns the byte offset in the file.
    pub fn offset(&self) -> Option<u64> {
        self.0.offset
    }

    /// Returns the problem.
    pub fn problem(&self) -> &Problem {
        &self.0.problem
    }

    pub(crate) fn new(item: Item, offset: impl Into<Option<u64>>, problem: Problem) -> Self {
        Self(Box::new(Inner { file: None, item: Some(item), offset: offset.into(), problem }))
    }

    pub(crate) fn of_file(path: &Path, problem: impl Into<Problem>) -> Self {
        Self::from(problem.into()).in_file(Some(path))
    }

    /// Sets the file, unless it is set already.
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

/// A problem at an offset whose item is not yet known.
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

/// Quotes a name, which may be 64 KiB of arbitrary text.
fn name(name: &str) -> String {
    format!("\"{}\"", printable(name, 96))
}

fn in_file(file: &Option<PathBuf>) -> String {
    file.as_ref().map(|f| format!(" of {}", printable_path(f))).unwrap_or_default()
}

/// Lists the types that files may contain.
fn types() -> String {
    let types = DType::ALL.into_iter().filter(|dtype| dtype.ggml_id().is_some()).map(DType::name);
    types.chain(LoadOnlyType::stored().map(LoadOnlyType::name)).collect::<Vec<_>>().join(" ")
}

/// Returns GGML's name, in brackets, of a type that the codec does not support; empty if GGML has
/// none either.
fn ggml_name(id: u32) -> &'static str {
    match id {
        9 => " (q8_1)",
        15 => " (q8_K)",
        41 => " (q1_0)",
        _ => "",
    }
}
