//! A session kept in a file: its tokens and its cache, bit for bit.
//!
//! # Format, version 3
//!
//! All numbers little endian; every section starts at a multiple of 64 bytes, so that a mapped file can be read in
//! place. Offsets count from the start of the file.
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
//!  ..   ..  section 1 ..: for each group of layers with the same window the sink, the tail, and the blocks of 128 tokens that
//!           a query can still see, byte for byte (those that the plan has and the tokens have reached); then, where a place
//!           to go back to is remembered, the tail as it was there, group by group
//! ```
//!
//! Checksums are XXH3-64. The header names what must agree before a file is used (`identity`: layout, RoPE, shape, and the
//! [fingerprint](Model::fingerprint) of the whole model) and what the cache stores (`plan`).
//!
//! A file is replaced whole or not at all ([`write_whole`](kvant_files::write_whole)): a crash, a full disk or a kill
//! leaves the old one.

mod format;
mod header;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use kvant_gguf::printable_path;
use kvant_kv::{CacheState, Plan};

use crate::runtime::Sequence;
use crate::{Error, Model, Session};
use format::{Reader, Writer};
use header::Header;

/// Why a session cannot be saved or restored.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ContextFileError {
    /// The file system refused. A file that was there before is still whole.
    #[error("{}: {source}", printable_path(path))]
    Io {
        /// The file.
        path: PathBuf,
        /// What the file system says.
        source: std::io::Error,
    },
    /// The file begins otherwise.
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
    /// The file is cut short or was changed.
    #[error("{}: corrupt context file: {what}", printable_path(path))]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// The part that is wrong, with expected and got where that helps.
        what: String,
    },
    /// The file belongs to another model, layout, RoPE or cache type.
    #[error("{}: {field}: expected {expected}, the file has {got}", printable_path(path))]
    Mismatch {
        /// The file.
        path: PathBuf,
        /// Which field disagrees.
        field: String,
        /// What this model or session has.
        expected: String,
        /// What the file has.
        got: String,
    },
}

impl Session {
    /// Writes the tokens and the cache to a file, replacing it whole or not at all. Returns the bytes written.
    ///
    /// # Errors
    /// [`Error::ContextFile`] when the file cannot be written (the old one is still there then), a device error.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<u64, Error> {
        let path = path.as_ref();
        let io = |source| Error::from(ContextFileError::Io { path: path.to_owned(), source });
        let header = Header::new(self.model(), self.sequence());
        kvant_files::write_whole(path, io, |file| {
            let (loaded, id) = (self.sequence().loaded(), self.sequence().id());
            let mut writer = Writer::new(file, &header.to_json(), 1 + loaded.n_images(id)).map_err(io)?;
            let tokens: Vec<u8> = self.tokens().iter().flat_map(|token| token.to_le_bytes()).collect();
            writer.section(&tokens).map_err(io)?;
            loaded.images(id, &mut |image| writer.section(&image).map_err(io))?;
            writer.finish().map_err(io)
        })
    }

    /// Restores from a file as many tokens as its beginning shares with `prompt`, in place of what the session
    /// holds: all of them or, where what comes next would see in 16 bit what the file has in codes only, up to 511 fewer.
    /// Returns how many; the last token of the prompt is always left to read.
    ///
    /// # Errors
    /// [`Error::ContextFile`] when the file cannot be read, is corrupt, or belongs to another model, layout, RoPE or
    /// cache type (the field is named). The session keeps what it held then.
    pub fn load_prefix(&mut self, path: impl AsRef<Path>, prompt: &[u32]) -> Result<usize, Error> {
        let mut reader = Reader::open(path.as_ref())?;
        let header = Header::parse(&reader)?;
        header.check_identity(self.model(), reader.path())?;
        header.check_plan(self.sequence().plan(), reader.path())?;
        let tokens = reader.tokens(header.n_tokens)?;
        let same = tokens.iter().zip(prompt).take_while(|(a, b)| a == b).count();
        let n = same.min(prompt.len().saturating_sub(1)).min(self.n_ctx());
        if n == 0 {
            self.clear();
            return Ok(0);
        }
        let plan = self.sequence().plan().clone();
        let n_ctx = tokens.len().max(self.n_ctx());
        let mut sequence = restore(&mut reader, self.model(), plan, n_ctx, header.state())?;
        let n = sequence.loaded().cut(sequence.id(), n);
        sequence.set_n_ctx(self.n_ctx());
        self.replace(sequence, tokens[..n].to_vec());
        Ok(n)
    }
}

impl Model {
    /// The tokens of a file that [`Session::save`] wrote; its pages are not read.
    ///
    /// # Errors
    /// As [`Session::load_prefix`], the cache type and what is wrong with the pages aside.
    pub fn saved_tokens(&self, path: impl AsRef<Path>) -> Result<Vec<u32>, Error> {
        let mut reader = Reader::open(path.as_ref())?;
        let header = Header::parse(&reader)?;
        header.check_identity(self, reader.path())?;
        Ok(reader.tokens(header.n_tokens)?)
    }

    /// A session as [`Session::save`] wrote it, with the cache types of the file and a context of `n_ctx` tokens (the
    /// model's training length when `None`; more when the file holds more).
    ///
    /// [`Session::logits`] are those of no token until the next one is read.
    ///
    /// # Errors
    /// As [`Session::load_prefix`], the cache type aside.
    pub fn load_session(&self, path: impl AsRef<Path>, n_ctx: Option<usize>) -> Result<Session, Error> {
        let mut reader = Reader::open(path.as_ref())?;
        let header = Header::parse(&reader)?;
        header.check_identity(self, reader.path())?;
        let plan = header.plan(&self.config().kv_shape(), reader.path())?;
        let tokens = reader.tokens(header.n_tokens)?;
        let n_ctx = n_ctx.unwrap_or(self.config().n_ctx_train).max(tokens.len());
        let sequence = restore(&mut reader, self, plan, n_ctx, header.state())?;
        Ok(Session::from_parts(self.clone(), sequence, tokens, None))
    }
}

fn restore(
    reader: &mut Reader,
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
        // The checksum holds, yet the page does not fit: the file lies about itself.
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
