//! What can be wrong with a folder.

use std::io;
use std::path::PathBuf;

use kvant_gguf::{GgufError, printable, printable_path};

/// Why a folder is no model that can be read. `Display` is one line.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HfError {
    /// A file cannot be mapped, or the description would be no sound GGUF file.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// The system refused.
    #[error("{}: {source}", printable_path(path))]
    File {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// The folder lacks something, or has it in a form that is not read.
    #[error("{}: {why}", printable_path(path))]
    Folder {
        /// The folder.
        path: PathBuf,
        /// What is wrong.
        why: &'static str,
    },
    /// No model, but what changes one.
    #[error("{}: an adapter, which changes a model and is none by itself", printable_path(path))]
    Adapter {
        /// The folder.
        path: PathBuf,
    },
    /// A file that is no JSON.
    #[error("{}: not sound JSON: {why}", printable_path(path))]
    Json {
        /// The file.
        path: PathBuf,
        /// What the parser says.
        why: String,
    },
    /// A file that is too long to be what it should be.
    #[error("{}: {got} bytes, at most {max} are read", printable_path(path))]
    TooLong {
        /// The file.
        path: PathBuf,
        /// Its bytes.
        got: u64,
        /// Bytes allowed.
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
    /// A value that is missing, of another type or out of range.
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
        /// What was expected.
        expected: String,
        /// What was found.
        got: String,
    },
    /// An architecture that is not converted.
    #[error(
        "architecture '{}' is not converted; the nearest that is: {nearest} (known: {known})",
        printable(got, 96)
    )]
    Family {
        /// The name found.
        got: String,
        /// The known name that is most like it.
        nearest: &'static str,
        /// All known names.
        known: String,
    },
    /// Weights that are packed.
    #[error(
        "its weights are quantised as {}, which is not read: take the model in bf16, f16 or f32",
        printable(method, 96)
    )]
    Quantised {
        /// How, as the folder names it.
        method: String,
    },
    /// Something that this family is not known to do.
    #[error("{}: {what}", printable_path(path))]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// What it is.
        what: String,
    },
    /// A header that is longer than its file, or than any header is.
    #[error("{}: claims a header of {claimed} bytes, {left} can be there", printable_path(path))]
    HeaderLength {
        /// The file.
        path: PathBuf,
        /// Bytes claimed.
        claimed: u64,
        /// Bytes possible.
        left: u64,
    },
    /// A header that does not say what a tensor is.
    #[error("{}: tensor '{}': {what}", printable_path(path), printable(name, 96))]
    Tensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// What is wrong with it.
        what: TensorFault,
    },
    /// A tensor that the model should have.
    #[error("tensor '{}' is missing{}", printable(name, 96), of.as_ref().map(|of| format!(": {of}")).unwrap_or_default())]
    Missing {
        /// What it is called in GGUF, or in the folder.
        name: String,
        /// Why it should be there.
        of: Option<String>,
    },
    /// A tensor that the family is not known to have; without it, the model would say something else.
    #[error("tensor '{}' is unknown in the family {family}", printable(name, 96))]
    Unknown {
        /// The name in the folder.
        name: String,
        /// The family.
        family: &'static str,
    },
    /// A tensor of another size than the configuration says.
    #[error("tensor '{}' has the shape {got:?}, expected {expected}", printable(name, 96))]
    Shape {
        /// The name in the folder.
        name: String,
        /// What was expected.
        expected: String,
        /// The shape, outermost first.
        got: Vec<usize>,
    },
    /// A way to cut text into words that has no name in GGUF.
    #[error("{}: a pre-tokenizer that is not known: {}", printable_path(path), printable(found, 400))]
    Pre {
        /// The file.
        path: PathBuf,
        /// What was found.
        found: String,
    },
}

/// What is wrong with a tensor in a safetensors file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TensorFault {
    /// Its record is not of the form that the format has.
    #[error("expected dtype, shape and data_offsets")]
    Record,
    /// A type that holds no weights.
    #[error("holds {got}; weights are read in F32, F16 and BF16")]
    Type {
        /// The type found.
        got: String,
    },
    /// Values where codes of 4 bits and their scales should be.
    #[error("holds {got}; blocks and scales are read in U8")]
    Codes {
        /// The type found.
        got: String,
    },
    /// Nothing, or more than can be counted.
    #[error("has the impossible shape {shape:?}")]
    Shape {
        /// The shape found, outermost first.
        shape: Vec<u64>,
    },
    /// Data beyond the end of the file.
    #[error("lies from byte {begin} to {end} of {len} bytes of data")]
    Range {
        /// Its first byte.
        begin: u64,
        /// The byte behind its last.
        end: u64,
        /// Bytes of data in the file.
        len: u64,
    },
    /// More or fewer bytes than its shape and type take.
    #[error("takes {want} bytes, but {got} are its own")]
    Size {
        /// Bytes of the shape and the type.
        want: u64,
        /// Bytes between its offsets.
        got: u64,
    },
    /// Data that is another tensor's too.
    #[error("overlaps tensor '{}'", printable(.other, 96))]
    Overlap {
        /// The other tensor.
        other: String,
    },
}
