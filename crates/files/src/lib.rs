//! Files of the user: read where they are files, replaced whole or not at all.
//!
//! Everything that Kvant keeps in files goes through here, so that the rules are the same for all of it:
//!
//! - Only regular files are read and written. A pipe would block, a device can do anything, and to "replace" either would
//!   put a file in its place: all are refused in one line.
//! - What is written anew is written beside its final name, synced and renamed ([`write_whole`]): whatever happens
//!   meanwhile, a reader sees the old file or the new one.
//! - A replaced file keeps its mode and, where the system lets us, its owner. A symlink stays, what it leads to is
//!   replaced.
//! - What was said is for its owner's eyes alone ([`write_private`]).
//! - Long work asks first whether its result can be written ([`check_target`]).
#![forbid(unsafe_code)]

mod unfinished;
mod write;

use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use etcetera::BaseStrategy;

pub use write::{check_target, write, write_private, write_whole};

/// Opens a regular file for reading.
///
/// # Errors
/// What the system says; [`io::ErrorKind::InvalidInput`] for a folder, pipe, device or socket, which is not opened.
pub fn open(path: impl AsRef<Path>) -> io::Result<File> {
    let path = path.as_ref();
    // Asked before opening: to open a pipe would wait for its other end.
    check_regular(&fs::metadata(path)?)?;
    let file = File::open(path)?;
    check_regular(&file.metadata()?)?;
    Ok(file)
}

/// The bytes of a regular file.
///
/// # Errors
/// As [`open`].
pub fn read(path: impl AsRef<Path>) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open(path)?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Opens a regular file for reading and for writing in place, made empty when it is missing: for what grows line by line.
///
/// # Errors
/// As [`open`].
pub fn edit(path: impl AsRef<Path>) -> io::Result<File> {
    let path = path.as_ref();
    if let Some(there) = found(path)? {
        check_regular(&there)?;
    }
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
    check_regular(&file.metadata()?)?;
    Ok(file)
}

/// The folder in which programs of this user keep what can be made again; ours is `kvant` in it. Nothing says that it exists
/// or can be written.
pub fn cache_folder() -> Option<PathBuf> {
    Some(etcetera::choose_base_strategy().ok()?.cache_dir().join("kvant"))
}

/// What is at `path`, symlinks followed; `None` where nothing is.
fn found(path: &Path) -> io::Result<Option<Metadata>> {
    match fs::metadata(path) {
        Ok(there) => Ok(Some(there)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn check_regular(there: &Metadata) -> io::Result<()> {
    if there.is_file() {
        return Ok(());
    }
    let what = format!("is {}, not a regular file", kind(there));
    Err(io::Error::new(io::ErrorKind::InvalidInput, what))
}

/// What something that is no file is called.
fn kind(there: &Metadata) -> &'static str {
    #[cfg(unix)]
    {
        use std::os::unix::fs::FileTypeExt;
        let kind = there.file_type();
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
    if there.is_dir() { "a folder" } else { "something else" }
}

#[cfg(test)]
mod tests;
