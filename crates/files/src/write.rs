//! Writing a file whole or not at all.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use crate::unfinished::Unfinished;
use crate::{check_regular, found};

/// Symlinks that lead from one to the next: as many as Linux follows.
const MAX_LINKS: usize = 40;

/// Writes a file so that, whatever happens meanwhile, `path` holds either what it held before or all of what `write`
/// wrote: into a file beside it, synced, then renamed, and the folder synced. `fail` makes the caller's error of the file
/// system's.
///
/// A process that is killed midway leaves nothing where the system knows files without a name (Linux, most file systems);
/// elsewhere `.NAME.PID-N.tmp`, which the next who writes that file removes.
///
/// # Errors
/// Whatever `write` or the file system fails with, as for [`check_target`]; `path` stays as it was then, except when only
/// the sync of the folder fails.
pub fn write_whole<T, E>(
    path: impl AsRef<Path>,
    fail: impl Fn(io::Error) -> E,
    write: impl FnOnce(&mut BufWriter<File>) -> Result<T, E>,
) -> Result<T, E> {
    write_with(path.as_ref(), ANYONE, fail, write)
}

/// [`write_whole`] of what is for its owner's eyes alone, such as what was said: nobody else may read the file, whatever the folder, the
/// umask or the file that it replaces allow.
///
/// # Errors
/// As [`write_whole`].
pub fn write_private<T, E>(
    path: impl AsRef<Path>,
    fail: impl Fn(io::Error) -> E,
    write: impl FnOnce(&mut BufWriter<File>) -> Result<T, E>,
) -> Result<T, E> {
    write_with(path.as_ref(), OWNER, fail, write)
}

/// What a file may be made with, at most.
const ANYONE: u32 = 0o777;
const OWNER: u32 = 0o600;

fn write_with<T, E>(
    path: &Path,
    most: u32,
    fail: impl Fn(io::Error) -> E,
    write: impl FnOnce(&mut BufWriter<File>) -> Result<T, E>,
) -> Result<T, E> {
    let (target, unfinished) = begin(path, most).map_err(&fail)?;
    let mut writer = BufWriter::with_capacity(1 << 20, unfinished.file().map_err(&fail)?);
    let value = write(&mut writer)?;
    writer.flush().map_err(&fail)?;
    target.finish(unfinished).map_err(&fail)?;
    Ok(value)
}

/// [`write_whole`] of bytes that are there already.
///
/// # Errors
/// As [`write_whole`].
pub fn write(path: impl AsRef<Path>, bytes: &[u8]) -> io::Result<()> {
    write_whole(path, std::convert::identity, |file| file.write_all(bytes))
}

/// Whether [`write_whole`] can begin, to be asked before the work whose result it is to write. Changes nothing.
///
/// # Errors
/// [`io::ErrorKind::InvalidInput`] for what is there and is no regular file; what the system says when the file that is
/// there may not be written, or none can be made in its folder.
pub fn check_target(path: impl AsRef<Path>) -> io::Result<()> {
    begin(path.as_ref(), ANYONE).map(drop)
}

fn begin(path: &Path, most: u32) -> io::Result<(Target, Unfinished)> {
    let target = Target::find(path, most)?;
    let unfinished = Unfinished::begin(&target.path, target.mode());
    let unfinished = unfinished.map_err(|error| {
        let folder = folder_of(&target.path);
        io::Error::new(error.kind(), format!("no file can be written to the folder {folder:?}: {error}"))
    })?;
    Ok((target, unfinished))
}

/// Where a file is to be.
struct Target {
    /// No symlink.
    path: PathBuf,
    /// What is there.
    old: Option<Metadata>,
    /// What the file may be made with, at most.
    most: u32,
}

impl Target {
    fn find(path: &Path, most: u32) -> io::Result<Self> {
        let old = found(path)?;
        let path = follow(path)?;
        if let Some(old) = &old {
            check_regular(old)?;
            // A rename would not ask whether the file itself may be written.
            OpenOptions::new().write(true).open(&path)?;
        }
        if path.file_name().is_none() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "is not the name of a file"));
        }
        Ok(Self { path, old, most })
    }

    /// What the file may be made with: no more than what it replaces.
    fn mode(&self) -> u32 {
        self.old.as_ref().map_or(0o666, permissions) & self.most
    }

    /// Puts what was written in the place of what is there.
    fn finish(self, unfinished: Unfinished) -> io::Result<()> {
        if let Some(old) = &self.old {
            make_alike(&unfinished.file()?, old, self.most)?;
        }
        unfinished.rename(&self.path)?;
        sync_folder(folder_of(&self.path))
    }
}

/// Where the symlinks at `path`, if any, lead in the end; nothing need be there.
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

/// The folder that a path is in.
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

/// Gives a file owner and mode of the one it replaces, the mode `most` at most.
#[cfg(unix)]
fn make_alike(file: &File, old: &Metadata, most: u32) -> io::Result<()> {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown};
    let new = file.metadata()?;
    if (new.uid(), new.gid()) != (old.uid(), old.gid()) {
        // Only root may give files away. Others keep the group where they are in it.
        let _ =
            fchown(file, Some(old.uid()), Some(old.gid())).or_else(|_| fchown(file, None, Some(old.gid())));
    }
    let wanted = permissions(old) & most;
    if permissions(&new) != wanted {
        file.set_permissions(fs::Permissions::from_mode(wanted))?;
    }
    Ok(())
}

#[cfg(not(unix))]
fn make_alike(_: &File, _: &Metadata, _: u32) -> io::Result<()> {
    Ok(())
}

/// Makes the rename itself last. Only Unix lets a folder be opened and synced.
fn sync_folder(folder: &Path) -> io::Result<()> {
    if cfg!(unix) {
        File::open(folder)?.sync_all()?;
    }
    Ok(())
}
