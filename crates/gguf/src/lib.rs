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
mod file;
mod load_only;
mod meta;
pub mod oracle;
mod parse;
mod printable;
mod scaled;
mod shard;
mod source;
mod split;
mod tensor;
mod value;
mod virtual_file;
mod writer;

pub use error::{GgufError, Item, Problem};
pub use file::Gguf;
pub use load_only::{LoadOnlyType, encode_iq3_s};
pub use meta::{Meta, MetaIter};
pub use printable::{printable, printable_path};
pub use source::{RangeReader, Source};
pub use tensor::{TensorInfo, TensorView};
pub use value::{Array, Element, Elements, FromValue, Strings, Value, ValueType};
pub use virtual_file::{SourceFile, TensorSource};
pub use writer::{GgufWriter, TensorSink};
