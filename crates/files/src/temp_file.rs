//! A file that is being written.
//!
//! On Linux it has no name until it is complete, so that nothing is left of it if the process is
//! killed. Where unnamed files are unavailable it is called `.NAME.PID-N.tmp` and locked: an
//! unlocked one was abandoned by a killed process, and the next writer of that file removes it. A
//! lock, unlike a process number, is never reused by another process, and works across containers.

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

use crate::write::folder_of;

/// An unfinished file, removed when dropped unless it was renamed.
pub(crate) struct Unfinished {
    file: File,
    name: Option<PathBuf>,
}

impl Unfinished {
    /// Creates a file in the folder of `target`, so that the rename cannot cross file systems, with
    /// at most the permissions `mode`.
    pub(crate) fn begin(target: &Path, mode: u32) -> io::Result<Self> {
        remove_abandoned(target);
        if let Some(file) = nameless(folder_of(target), mode) {
            return Ok(Self { file, name: None });
        }
        Self::named(target, mode)
    }

    pub(crate) fn named(target: &Path, mode: u32) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        options.write(true).create_new(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, mode);
        #[cfg(not(unix))]
        let _ = mode;
        loop {
            let (file, name) = first_free(target, |name| options.open(name))?;
            let unfinished = Self { file, name: Some(name) };
            // Without locks, no process removes it as abandoned.
            let _ = unfinished.file.lock();
            // Between creation and lock it was indistinguishable from an abandoned file.
            if unfinished.name.as_ref().is_some_and(|name| name.exists()) {
                return Ok(unfinished);
            }
        }
    }

    /// Returns the file for writing.
    pub(crate) fn file(&self) -> io::Result<File> {
        self.file.try_clone()
    }

    /// Syncs the file and renames it to `target`, replacing any existing file.
    pub(crate) fn rename(mut self, target: &Path) -> io::Result<()> {
        self.file.sync_all()?;
        if self.name.is_none() {
            // Locked before it becomes visible to others.
            let _ = self.file.lock();
            self.name = Some(first_free(target, |name| link(&self.file, name))?.1);
        }
        if let Some(name) = &self.name {
            fs::rename(name, target)?;
        }
        self.name = None;
        Ok(())
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if let Some(name) = &self.name {
            // An error is already being reported; a failed removal does not change it.
            let _ = fs::remove_file(name);
        }
    }
}

/// Calls `make` with the first of our names next to `target` that is free.
fn first_free<T>(target: &Path, make: impl Fn(&Path) -> io::Result<T>) -> io::Result<(T, PathBuf)> {
    let stem = target.file_name().unwrap_or_default();
    for n in 0u32.. {
        let mut name = OsStr::new(".").to_owned();
        name.push(stem);
        name.push(format!(".{}-{n}.tmp", std::process::id()));
        let name = target.with_file_name(name);
        match make(&name) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            made => return made.map(|made| (made, name)),
        }
    }
    Err(io::ErrorKind::AlreadyExists.into())
}

/// Removes files that killed processes left while writing `target`.
fn remove_abandoned(target: &Path) {
    let Ok(entries) = fs::read_dir(folder_of(target)) else { return };
    let stem = target.file_name().unwrap_or_default();
    let is_file = |entry: &fs::DirEntry| entry.file_type().is_ok_and(|kind| kind.is_file());
    for entry in entries.flatten().filter(|entry| is_ours(&entry.file_name(), stem) && is_file(entry)) {
        // Opened for writing, as some systems lock only such files.
        let file = OpenOptions::new().write(true).open(entry.path());
        if file.is_ok_and(|file| file.try_lock().is_ok()) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// Returns whether a name is `.STEM.PID.tmp` or `.STEM.PID-N.tmp`.
fn is_ours(name: &OsStr, stem: &OsStr) -> bool {
    let number = name
        .as_encoded_bytes()
        .strip_prefix(b".")
        .and_then(|rest| rest.strip_prefix(stem.as_encoded_bytes()))
        .and_then(|rest| rest.strip_prefix(b"."))
        .and_then(|rest| rest.strip_suffix(b".tmp"));
    let is_number = |text: &[u8]| !text.is_empty() && text.iter().all(u8::is_ascii_digit);
    number.is_some_and(|number| number.splitn(2, |byte| *byte == b'-').all(is_number))
}

/// Creates an unnamed file, if the file system of `folder` supports it.
#[cfg(target_os = "linux")]
fn nameless(folder: &Path, mode: u32) -> Option<File> {
    use rustix::fs::{CWD, Mode, OFlags, openat};
    let flags = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
    let file = File::from(openat(CWD, folder, flags, Mode::from_raw_mode(mode)).ok()?);
    // Without a path in `/proc` the file cannot be named later.
    proc_path(&file).exists().then_some(file)
}

#[cfg(not(target_os = "linux"))]
fn nameless(_: &Path, _: u32) -> Option<File> {
    None
}

/// Names an unnamed file.
#[cfg(target_os = "linux")]
fn link(file: &File, name: &Path) -> io::Result<()> {
    use rustix::fs::{AtFlags, CWD, linkat};
    Ok(linkat(CWD, proc_path(file), CWD, name, AtFlags::SYMLINK_FOLLOW)?)
}

#[cfg(not(target_os = "linux"))]
fn link(_: &File, _: &Path) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Returns the path of an open file in `/proc`, where that is mounted.
#[cfg(target_os = "linux")]
fn proc_path(file: &File) -> PathBuf {
    use std::os::fd::AsRawFd;
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_our_temporary_names_match() {
        let is_ours = |name: &str| is_ours(OsStr::new(name), OsStr::new("a.gguf"));
        assert!(is_ours(".a.gguf.7.tmp") && is_ours(".a.gguf.4194304-12.tmp"));
        for other in
            ["a.gguf", ".a.gguf.tmp", ".a.gguf..tmp", ".a.gguf.x.tmp", ".a.gguf.7-.tmp", ".b.gguf.7.tmp"]
        {
            assert!(!is_ours(other), "{other}");
        }
    }
}
