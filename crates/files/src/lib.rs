//! User files: reads regular files only, and replaces them atomically.
//!
//! All files of Kvant go through this crate, so that the same rules apply to all of them:
//!
//! - Only regular files are read and written. A pipe would block, a device may have any effect, and
//!   "replacing" either would put a file in its place: all of them are rejected with a one-line
//!   error.
//! - A file is written next to its final name, synced and renamed ([`write_atomic`]): a reader
//!   always sees the old file or the new one.
//! - A replaced file keeps its mode and, where the system permits, its owner. A symlink is kept and
//!   its target is replaced.
//! - Conversations are readable by their owner alone ([`write_private`]).
//! - Long computations first check that their result can be written ([`check_target`]).
#![forbid(unsafe_code)]

mod temp_file;
mod write;

use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use etcetera::BaseStrategy;

pub use write::{check_target, write, write_atomic, write_private};

/// Opens a regular file for reading.
///
/// # Errors
/// Those of the system; [`io::ErrorKind::InvalidInput`] for a folder, pipe, device or socket, which
/// is not opened.
pub fn open(path: impl AsRef<Path>) -> io::Result<File> {
    let path = path.as_ref();
    // Checked before opening: opening a pipe would wait for its other end.
    check_regular(&fs::metadata(path)?)?;
    let file = File::open(path)?;
    check_regular(&file.metadata()?)?;
    Ok(file)
}

/// Reads the bytes of a regular file.
///
/// # Errors
/// As [`open`].
pub fn read(path: impl AsRef<Path>) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open(path)?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Opens a regular file for reading and for writing in place, created empty if missing: for files
/// that grow line by line.
///
/// # Errors
/// As [`open`].
pub fn open_for_update(path: impl AsRef<Path>) -> io::Result<File> {
    let path = path.as_ref();
    if let Some(metadata) = found(path)? {
        check_regular(&metadata)?;
    }
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
    check_regular(&file.metadata()?)?;
    Ok(file)
}

/// Returns the user's cache folder for Kvant, `kvant` in the folder for recomputable data of all
/// programs. It may not exist or not be writable.
pub fn cache_folder() -> Option<PathBuf> {
    Some(etcetera::choose_base_strategy().ok()?.cache_dir().join("kvant"))
}

/// Returns the metadata of the file at `path`, symlinks followed; `None` if it does not exist.
fn found(path: &Path) -> io::Result<Option<Metadata>> {
    match fs::metadata(path) {
        Ok(metadata) => Ok(Some(metadata)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn check_regular(metadata: &Metadata) -> io::Result<()> {
    if metadata.is_file() {
        return Ok(());
    }
    let what = format!("is {}, not a regular file", kind(metadata));
    Err(io::Error::new(io::ErrorKind::InvalidInput, what))
}

/// Names a file type other than a regular file.
fn kind(metadata: &Metadata) -> &'static str {
    #[cfg(unix)]
    {
        use std::os::unix::fs::FileTypeExt;
        let kind = metadata.file_type();
        if kind.is_fifo() {
            return "a pipe";
        }
        if kind.is_socket() {
            return "a socket";
        }
        if kind.is_char_device() || kind.is_block_device() {
            return "a device";
        }
    }
    if metadata.is_dir() { "a folder" } else { "something else" }
}

#[cfg(test)]
mod tests;
