//! Context files: a session's tokens and KV cache, bit for bit.
//!
//! # Format, version 3
//!
//! All numbers are little endian. Every section starts at a multiple of 64 bytes, so that a mapped
//! file can be read in place. Offsets count from the start of the file.
//!
//! ```text
//!   0   8   "KVANTCTX"
//!   8   4   version, 3
//!  12   4   bytes of the header
//!  16   4   number of sections
//!  20   4   0
//!  24   8   bytes of the whole file
//!  32   8   checksum of the header and the table
//!  40  24   0
//!  64   ..  header: JSON, padded with spaces to a multiple of 64
//!  ..  32   each section: offset, bytes, checksum, 0
//!  ..   ..  section 0: the tokens, 4 bytes each
//!  ..   ..  section 1 ..: for each group of layers with the same window the sink, the tail, and
//!           the blocks of 128 tokens that a query can still attend to, byte for byte (those
//!           that the plan has and the tokens have reached); then, where there is a checkpoint,
//!           the tail at the checkpoint, group by group
//! ```
//!
//! Checksums are XXH3-64. The header has the fields that must agree before a file is used
//! (`identity`: layout, RoPE, shape, and the [fingerprint](Model::fingerprint) of the whole model)
//! and the plan of the cache (`plan`).
//!
//! A file is replaced atomically ([`write_private`](kvant_files::write_private)) and is readable by
//! its owner alone: a crash, a full disk or a kill leaves the old one.
//!
//! A [`SavedSession`] is the same bytes in memory, written and read by the same code. It has
//! checksums, since it may be moved to a file; they are verified in memory too, which costs little
//! beside the copy.

mod format;
mod header;

use std::fmt;
use std::io::{self, Cursor, Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kvant_backend::limits::{MAX_TOKENS, check_size};
use kvant_gguf::printable_path;
use kvant_kv::{CacheState, Plan};

use crate::error::Error;
use crate::model::Model;
use crate::runtime::Sequence;
use crate::session::Session;
use format::{Reader, Writer};
use header::Header;

/// Path of a [`SavedSession`] in errors.
const MEMORY_PATH: &str = "(memory)";

/// Why a session cannot be saved or restored.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ContextFileError {
    /// An I/O error, or out of memory. A previous file stays intact.
    #[error("{}: {source}", printable_path(path))]
    Io {
        /// The file; `(memory)` for a [`SavedSession`], here and below.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The file does not begin with the magic bytes.
    #[error("{}: not a context file", printable_path(path))]
    NotOurs {
        /// The file.
        path: PathBuf,
    },
    /// The file is of another version of the format.
    #[error("{}: context file version {got}, expected {expected}", printable_path(path))]
    Version {
        /// The file.
        path: PathBuf,
        /// The version this engine reads.
        expected: u32,
        /// The version of the file.
        got: u32,
    },
    /// The file is truncated or was changed.
    #[error("{}: corrupt context file: {what}", printable_path(path))]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// The part at fault, with expected and actual values where that helps.
        what: String,
    },
    /// The file belongs to another model, layout, RoPE or cache type.
    #[error("{}: {field}: expected {expected}, the file has {got}", printable_path(path))]
    Mismatch {
        /// The file.
        path: PathBuf,
        /// The field that differs.
        field: String,
        /// The value of this model or session.
        expected: String,
        /// The value of the file.
        got: String,
    },
    /// The session has an image, whose tokens are ids of one loaded model.
    #[error("{}: a context with an image or audio cannot be saved yet", printable_path(path))]
    Images {
        /// The file.
        path: PathBuf,
    },
}

impl Session {
    /// Saves the tokens and the cache to a file, replacing it atomically. Returns the bytes
    /// written.
    ///
    /// # Errors
    /// [`Error::ContextFile`] when the file cannot be written (the old one then stays), a device
    /// error.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<u64, Error> {
        let path = path.as_ref();
        kvant_files::write_private(path, |source| failed(path, source), |file| self.write_to(file, path))
    }

    /// Returns the bytes that [`Session::save`] would write now.
    pub fn saved_bytes(&self) -> u64 {
        let sequence = self.sequence();
        let mut sections = vec![size_of_val(self.tokens())];
        sections.extend(sequence.page_bytes());
        format::n_bytes(&Header::new(self.model(), sequence).to_json(), &sections)
    }

    /// Saves the session in memory, in exactly [`Session::saved_bytes`].
    ///
    /// # Errors
    /// [`Error::ContextFile`] when memory runs out, a device error.
    pub fn to_saved(&self) -> Result<SavedSession, Error> {
        let path = Path::new(MEMORY_PATH);
        let needed = self.saved_bytes();
        let mut bytes = Vec::new();
        // A size beyond `usize` fails the allocation too.
        let room = bytes.try_reserve_exact(usize::try_from(needed).unwrap_or(usize::MAX));
        room.map_err(|error| failed(path, error.into()))?;
        let written = self.write_to(Cursor::new(&mut bytes), path)?;
        assert_eq!(written, needed, "bytes written and announced");
        Ok(SavedSession(bytes.into_boxed_slice()))
    }

    /// Writes the bytes of a file. Returns their number.
    fn write_to(&self, out: impl Write + Seek, path: &Path) -> Result<u64, Error> {
        let io = |source| failed(path, source);
        if self.has_media() {
            return Err(ContextFileError::Images { path: path.to_owned() }.into());
        }
        self.recommit()?;
        let sequence = self.sequence();
        let header = Header::new(self.model(), sequence).to_json();
        let mut writer = Writer::new(out, &header, 1 + sequence.page_bytes().len()).map_err(io)?;
        let tokens: Vec<u8> = self.tokens().iter().flat_map(|token| token.to_le_bytes()).collect();
        writer.section(&tokens).map_err(io)?;
        sequence.pages(&mut |image| writer.section(&image).map_err(io))?;
        writer.finish().map_err(io)
    }

    /// Replaces the context by the common prefix of the file's tokens and `prompt`. The prefix is
    /// up to 511 tokens shorter where the next token would attend in 16 bits to tokens that the
    /// file has in codes only. Returns its length; the last token of the prompt is always left to
    /// feed.
    ///
    /// # Errors
    /// [`Error::ContextFile`] when the file cannot be read, is corrupt, or belongs to another
    /// model, layout, RoPE or cache type (the field is named). The session is then unchanged.
    pub fn load_prefix(&mut self, path: impl AsRef<Path>, prompt: &[u32]) -> Result<usize, Error> {
        self.read_prefix(Reader::open(path.as_ref())?, prompt)
    }

    /// Works as [`Session::load_prefix`] on a session saved in memory.
    ///
    /// # Errors
    /// As [`Session::load_prefix`].
    pub fn load_saved_prefix(&mut self, saved: &SavedSession, prompt: &[u32]) -> Result<usize, Error> {
        self.read_prefix(Reader::new(Cursor::new(&saved.0), Path::new(MEMORY_PATH))?, prompt)
    }

    fn read_prefix(&mut self, mut reader: Reader<impl Read + Seek>, prompt: &[u32]) -> Result<usize, Error> {
        let header = Header::parse(&reader)?;
        let strengths = self.sequence().lora_scales().cloned();
        header.check_identity(self.model(), strengths.as_ref(), reader.path())?;
        header.check_rope_variant(self.model().config(), self.n_ctx(), reader.path())?;
        header.check_plan(self.sequence().plan(), reader.path())?;
        let tokens = tokens(&mut reader, &header, self.model())?;
        let same = tokens.iter().zip(prompt).take_while(|(a, b)| a == b).count();
        let n = same.min(prompt.len().saturating_sub(1)).min(self.n_ctx());
        if n == 0 {
            self.clear();
            return Ok(0);
        }
        let plan = self.sequence().plan().clone();
        let n_ctx = tokens.len().max(self.n_ctx());
        let sequence = restore(&mut reader, self.model(), plan, n_ctx, header.state())?;
        let mut sequence = sequence.with_strengths(strengths);
        let n = sequence.truncate(n);
        sequence.set_n_ctx(self.n_ctx());
        self.replace(sequence, tokens[..n].to_vec());
        Ok(n)
    }
}

impl Model {
    /// Returns the tokens of a file that [`Session::save`] wrote, without reading its pages.
    ///
    /// # Errors
    /// As [`Session::load_prefix`], except for the cache type and faults of the pages.
    pub fn saved_tokens(&self, path: impl AsRef<Path>) -> Result<Vec<u32>, Error> {
        let mut reader = Reader::open(path.as_ref())?;
        let header = Header::parse(&reader)?;
        header.check_identity(self, None, reader.path())?;
        tokens(&mut reader, &header, self)
    }

    /// Loads a session as [`Session::save`] wrote it, with the file's cache types and a context of
    /// `n_ctx` tokens (when `None`, the model's training length, or the longest context with the
    /// file's RoPE factors; never fewer than the file's tokens).
    ///
    /// [`Session::logits`] returns an error until the next token is fed.
    ///
    /// # Errors
    /// As [`Session::load_prefix`], except for the cache type.
    pub fn load_session(&self, path: impl AsRef<Path>, n_ctx: Option<usize>) -> Result<Session, Error> {
        let mut reader = Reader::open(path.as_ref())?;
        let header = Header::parse(&reader)?;
        header.check_identity(self, None, reader.path())?;
        let plan = header.plan(&self.config().kv_shape(), reader.path())?;
        let tokens = tokens(&mut reader, &header, self)?;
        if let Some(n_ctx) = n_ctx {
            check_size("n_ctx", n_ctx, 1..=MAX_TOKENS)?;
        }
        let n_ctx = n_ctx.unwrap_or_else(|| header.default_n_ctx(self.config())).max(tokens.len());
        header.check_rope_variant(self.config(), n_ctx, reader.path())?;
        let sequence = restore(&mut reader, self, plan, n_ctx, header.state())?;
        Session::of_sequence(self.clone(), sequence, tokens)
    }
}

/// A session saved in memory, in the format of [`Session::save`]: its tokens and its cache, bit for
/// bit.
pub struct SavedSession(Box<[u8]>);

/// Takes the bytes of a file that [`Session::save`] wrote, or of [`SavedSession::as_ref`]. They are
/// checked when they are loaded.
impl From<Vec<u8>> for SavedSession {
    fn from(bytes: Vec<u8>) -> Self {
        Self(bytes.into_boxed_slice())
    }
}

/// Returns the bytes of the file that [`SavedSession::write`] writes.
impl AsRef<[u8]> for SavedSession {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl SavedSession {
    /// Returns its size in bytes.
    pub fn n_bytes(&self) -> u64 {
        self.0.len() as u64
    }

    /// Writes the file that [`Session::save`] would have written when this was made. Returns the
    /// bytes written.
    ///
    /// # Errors
    /// [`Error::ContextFile`] when the file cannot be written; the old one then stays.
    pub fn write(&self, path: impl AsRef<Path>) -> Result<u64, Error> {
        let path = path.as_ref();
        let failed = |source| failed(path, source);
        kvant_files::write_private(path, failed, |file| file.write_all(&self.0).map_err(failed))?;
        Ok(self.n_bytes())
    }
}

impl fmt::Debug for SavedSession {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SavedSession").field("n_bytes", &self.n_bytes()).finish()
    }
}

fn failed(path: &Path, source: io::Error) -> Error {
    ContextFileError::Io { path: path.to_owned(), source }.into()
}

/// Reads the tokens of a file and checks them against the vocabulary.
fn tokens(reader: &mut Reader<impl Read + Seek>, header: &Header, model: &Model) -> Result<Vec<u32>, Error> {
    let tokens = reader.tokens(header.n_tokens)?;
    match tokens.iter().find(|&&token| token as usize >= model.n_vocab()) {
        Some(token) => {
            let what = format!("token {token}, of a vocabulary of {}", model.n_vocab());
            Err(reader.corrupt(what).into())
        }
        None => Ok(tokens),
    }
}

fn restore(
    reader: &mut Reader<impl Read + Seek>,
    model: &Model,
    plan: Plan,
    n_ctx: usize,
    state: CacheState,
) -> Result<Sequence, Error> {
    let mut used = 1;
    let loaded = Arc::clone(model.loaded());
    let sequence = Sequence::restore(loaded, plan, n_ctx, state, &mut |index| {
        used = 2 + index;
        Ok(reader.section(1 + index)?)
    });
    let sequence = sequence.map_err(|error| match error {
        // The checksum holds, yet the page does not fit: the file contradicts itself.
        Error::Kv(kvant_kv::KvError::Image { index, what }) => {
            reader.corrupt(format!("page {index}: {what}")).into()
        }
        error => error,
    })?;
    if used != reader.n_sections() {
        let what = format!("expected {used} sections, got {}", reader.n_sections());
        return Err(reader.corrupt(what).into());
    }
    Ok(sequence)
}

#[cfg(test)]
mod tests;
