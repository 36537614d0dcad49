//! Atomic writes of whole files.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use crate::temp_file::Unfinished;
use crate::{check_regular, found};

/// Maximum length of a chain of symlinks, as on Linux.
const MAX_LINKS: usize = 40;

/// Writes a file atomically: at any time, `path` holds either its previous contents or everything
/// that `write` wrote.
///
/// The data goes to a file next to `path`, is synced and renamed, and the folder is synced. `fail`
/// converts errors of the file system to the caller's type.
///
/// A process that is killed midway leaves nothing where the system supports unnamed files (Linux,
/// most file systems); elsewhere it leaves `.NAME.PID-N.tmp`, which the next writer of that file
/// removes.
///
/// # Errors
/// Those of `write` and of the file system, as for [`check_target`]; `path` is unchanged then,
/// except when only the sync of the folder fails.
pub fn write_atomic<T, E>(
    path: impl AsRef<Path>,
    fail: impl Fn(io::Error) -> E,
    write: impl FnOnce(&mut BufWriter<File>) -> Result<T, E>,
) -> Result<T, E> {
    write_with(path.as_ref(), MODE_ANY, fail, write)
}

/// Writes private data such as conversations, as [`write_atomic`]: only the owner may read the
/// file, regardless of the permissions of the folder, the umask and the replaced file.
///
/// # Errors
/// As [`write_atomic`].
pub fn write_private<T, E>(
    path: impl AsRef<Path>,
    fail: impl Fn(io::Error) -> E,
    write: impl FnOnce(&mut BufWriter<File>) -> Result<T, E>,
) -> Result<T, E> {
    write_with(path.as_ref(), MODE_PRIVATE, fail, write)
}

/// Upper bounds on the mode of a file.
const MODE_ANY: u32 = 0o777;
const MODE_PRIVATE: u32 = 0o600;

fn write_with<T, E>(
    path: &Path,
    max_mode: u32,
    fail: impl Fn(io::Error) -> E,
    write: impl FnOnce(&mut BufWriter<File>) -> Result<T, E>,
) -> Result<T, E> {
    let (target, unfinished) = begin(path, max_mode).map_err(&fail)?;
    let mut writer = BufWriter::with_capacity(1 << 20, unfinished.file().map_err(&fail)?);
    let value = write(&mut writer)?;
    writer.flush().map_err(&fail)?;
    target.finish(unfinished).map_err(&fail)?;
    Ok(value)
}

/// Writes `bytes`, as [`write_atomic`].
///
/// # Errors
/// As [`write_atomic`].
pub fn write(path: impl AsRef<Path>, bytes: &[u8]) -> io::Result<()> {
    write_atomic(path, std::convert::identity, |file| file.write_all(bytes))
}

/// Checks that [`write_atomic`] can begin, before the computation of the data. Changes nothing.
///
/// # Errors
/// [`io::ErrorKind::InvalidInput`] if `path` is not a regular file; the system's error if the
/// existing file is not writable, or none can be created in its folder.
pub fn check_target(path: impl AsRef<Path>) -> io::Result<()> {
    begin(path.as_ref(), MODE_ANY).map(drop)
}

fn begin(path: &Path, max_mode: u32) -> io::Result<(Target, Unfinished)> {
    let target = Target::find(path, max_mode)?;
    let unfinished = Unfinished::begin(&target.path, target.mode());
    let unfinished = unfinished.map_err(|error| {
        let folder = folder_of(&target.path);
        io::Error::new(error.kind(), format!("no file can be written to the folder {folder:?}: {error}"))
    })?;
    Ok((target, unfinished))
}

/// Destination of a write.
struct Target {
    /// Path with symlinks resolved.
    path: PathBuf,
    /// Metadata of the existing file.
    old: Option<Metadata>,
    /// Upper bound on the mode.
    max_mode: u32,
}

impl Target {
    fn find(path: &Path, max_mode: u32) -> io::Result<Self> {
        let old = found(path)?;
        let path = follow(path)?;
        if let Some(old) = &old {
            check_regular(old)?;
            // A rename does not check whether the file itself is writable.
            OpenOptions::new().write(true).open(&path)?;
        }
        if path.file_name().is_none() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "is not the name of a file"));
        }
        Ok(Self { path, old, max_mode })
    }

    /// Returns the mode for creation: no more than that of the replaced file.
    fn mode(&self) -> u32 {
        self.old.as_ref().map_or(0o666, permissions) & self.max_mode
    }

    /// Replaces the existing file by the written one.
    fn finish(self, unfinished: Unfinished) -> io::Result<()> {
        if let Some(old) = &self.old {
            make_alike(&unfinished.file()?, old, self.max_mode)?;
        }
        unfinished.rename(&self.path)?;
        sync_folder(folder_of(&self.path))
    }
}

/// Resolves the symlinks at `path`; the target may not exist.
fn follow(path: &Path) -> io::Result<PathBuf> {
    let mut path = path.to_owned();
    for _ in 0..MAX_LINKS {
        match fs::read_link(&path) {
            Ok(to) => path = folder_of(&path).join(to),
            Err(_) => return Ok(path),
        }
    }
    Err(io::Error::new(io::ErrorKind::InvalidInput, "too many symbolic links"))
}

/// Returns the folder of a path.
pub(crate) fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

#[cfg(unix)]
fn permissions(old: &Metadata) -> u32 {
    std::os::unix::fs::MetadataExt::mode(old) & 0o777
}

#[cfg(not(unix))]
fn permissions(_: &Metadata) -> u32 {
    0o666
}

/// Copies owner and mode of the replaced file, with at most the mode `max_mode`.
#[cfg(unix)]
fn make_alike(file: &File, old: &Metadata, max_mode: u32) -> io::Result<()> {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown};
    let new = file.metadata()?;
    if (new.uid(), new.gid()) != (old.uid(), old.gid()) {
        // Only root may change the owner. Other users keep the group if they are members.
        let _ =
            fchown(file, Some(old.uid()), Some(old.gid())).or_else(|_| fchown(file, None, Some(old.gid())));
    }
    let mode = permissions(old) & max_mode;
    if permissions(&new) != mode {
        file.set_permissions(fs::Permissions::from_mode(mode))?;
    }
    Ok(())
}

#[cfg(not(unix))]
fn make_alike(_: &File, _: &Metadata, _: u32) -> io::Result<()> {
    Ok(())
}

/// Makes the rename durable. Only Unix can open and sync a folder.
fn sync_folder(folder: &Path) -> io::Result<()> {
    if cfg!(unix) {
        File::open(folder)?.sync_all()?;
    }
    Ok(())
}
