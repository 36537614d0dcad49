//! Errors of reading a folder.

use std::io;
use std::path::PathBuf;

use kvant_gguf::{GgufError, printable, printable_path};

/// Why a folder is not a readable model. `Display` is one line.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HfError {
    /// A file cannot be mapped, or the description would not be a valid GGUF file.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// A file operation failed.
    #[error("{}: {source}", printable_path(path))]
    File {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The folder lacks a file, or has it in an unsupported form.
    #[error("{}: {why}", printable_path(path))]
    Folder {
        /// The folder.
        path: PathBuf,
        /// The fault.
        why: &'static str,
    },
    /// The folder holds an adapter instead of a model.
    #[error("{}: an adapter, not a model by itself", printable_path(path))]
    Adapter {
        /// The folder.
        path: PathBuf,
    },
    /// A file is not valid JSON.
    #[error("{}: not sound JSON: {why}", printable_path(path))]
    Json {
        /// The file.
        path: PathBuf,
        /// The parser's message.
        why: String,
    },
    /// A file exceeds the size limit of its kind.
    #[error("{}: {got} bytes, at most {max} are read", printable_path(path))]
    TooLong {
        /// The file.
        path: PathBuf,
        /// Its size in bytes.
        got: u64,
        /// The limit in bytes.
        max: u64,
    },
    /// A safetensors header that lists more tensors than any model has.
    #[error("{}: more than {max} tensors in one file", printable_path(path))]
    TooManyTensors {
        /// The file.
        path: PathBuf,
        /// Tensors allowed.
        max: usize,
    },
    /// A value is missing, of another type or out of range.
    #[error(
        "{}: '{}': expected {expected}, got {}",
        printable_path(path),
        printable(key, 96),
        printable(got, 96)
    )]
    Value {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// The expected value.
        expected: String,
        /// The actual value.
        got: String,
    },
    /// The architecture is not supported.
    #[error(
        "architecture '{}' is not supported; most similar: {nearest} (supported: {known})",
        printable(got, 96)
    )]
    Family {
        /// The name found.
        got: String,
        /// The most similar supported name.
        nearest: &'static str,
        /// All supported names.
        known: String,
    },
    /// The weights are quantized.
    #[error(
        "its weights are quantized as {}, which is not supported: use the model in bf16, f16 or f32, or in \
         GPTQ, AWQ, FP8, bitsandbytes, compressed-tensors or modelopt",
        printable(method, 96)
    )]
    Quantized {
        /// The quantization method named by the folder.
        method: String,
    },
    /// A feature that is not supported for this family.
    #[error("{}: {what}", printable_path(path))]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// The feature.
        what: String,
    },
    /// A header is longer than its file, or than the format allows.
    #[error("{}: claims a header of {claimed} bytes, at most {left} are possible", printable_path(path))]
    HeaderLength {
        /// The file.
        path: PathBuf,
        /// Claimed length in bytes.
        claimed: u64,
        /// Possible length in bytes.
        left: u64,
    },
    /// A header entry does not describe a valid tensor.
    #[error("{}: tensor '{}': {what}", printable_path(path), printable(name, 96))]
    Tensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// The fault.
        what: TensorFault,
    },
    /// A required tensor is missing.
    #[error("tensor '{}' is missing{}", printable(name, 96), of.as_ref().map(|of| format!(": {of}")).unwrap_or_default())]
    Missing {
        /// Its name in GGUF, or in the folder.
        name: String,
        /// Why it is required.
        of: Option<String>,
    },
    /// The family does not have this tensor. Without it, the model would produce different outputs.
    #[error("tensor '{}' is unknown in the family {family}", printable(name, 96))]
    Unknown {
        /// The name in the folder.
        name: String,
        /// The family.
        family: &'static str,
    },
    /// A tensor's shape contradicts the configuration.
    #[error("tensor '{}' has the shape {got:?}, expected {expected}", printable(name, 96))]
    Shape {
        /// The name in the folder.
        name: String,
        /// The expected shape.
        expected: String,
        /// The shape, outermost first.
        got: Vec<usize>,
    },
    /// The pre-tokenizer has no GGUF name.
    #[error("{}: an unknown pre-tokenizer: {}", printable_path(path), printable(found, 400))]
    Pre {
        /// The file.
        path: PathBuf,
        /// The pre-tokenizer found.
        found: String,
    },
}

/// Faults of a tensor in a safetensors file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TensorFault {
    /// The header entry is malformed.
    #[error("expected dtype, shape and data_offsets")]
    Record,
    /// The type cannot hold weights.
    #[error("holds {got}; weights are read in F32, F16 and BF16")]
    Type {
        /// The type found.
        got: String,
    },
    /// A part of a quantized weight has another type.
    #[error("holds {got}; it is read in {expected}")]
    Part {
        /// The types it may have.
        expected: &'static str,
        /// The type found.
        got: String,
    },
    /// An input of a quantized weight belongs to a group that does not exist.
    #[error("puts an input into group {got} of {groups}")]
    Group {
        /// The group found.
        got: String,
        /// Number of groups.
        groups: usize,
    },
    /// The levels of a quantized weight are not those of its type.
    #[error("holds other levels than those that bitsandbytes names")]
    Levels,
    /// The description of a quantized weight is malformed.
    #[error("not a sound description: {}", printable(why, 200))]
    Json {
        /// The fault.
        why: String,
    },
    /// Values where 4-bit codes and scales are expected.
    #[error("holds {got}; blocks and scales are read in U8")]
    Codes {
        /// The type found.
        got: String,
    },
    /// The shape is empty or overflows.
    #[error("has the impossible shape {shape:?}")]
    Shape {
        /// The shape found, outermost first.
        shape: Vec<u64>,
    },
    /// The data extends past the end of the file.
    #[error("lies from byte {begin} to {end} of {len} bytes of data")]
    Range {
        /// Its first byte.
        begin: u64,
        /// The byte after its last.
        end: u64,
        /// Bytes of data in the file.
        len: u64,
    },
    /// The size of the data contradicts the shape and type.
    #[error("takes {want} bytes, but has {got}")]
    Size {
        /// Bytes of the shape and the type.
        want: u64,
        /// Bytes between its offsets.
        got: u64,
    },
    /// The data overlaps that of another tensor.
    #[error("overlaps tensor '{}'", printable(.other, 96))]
    Overlap {
        /// The other tensor.
        other: String,
    },
}
