//! Files that are written whole or not at all.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

/// Writes a file so that, whatever happens meanwhile, `path` holds either what it held before or all of what `write`
/// wrote: into a file beside it, synced, then renamed, and the folder synced.
///
/// A process that is killed midway leaves its unfinished file behind, named `.NAME.PID.tmp`.
///
/// # Errors
/// Whatever `write` or the file system fails with; the unfinished file is removed.
pub fn write_whole<T, E: From<io::Error>>(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<File>) -> Result<T, E>,
) -> Result<T, E> {
    let unfinished = beside(path)?;
    let written = write_and_sync(&unfinished, write);
    let renamed = written.and_then(|value| {
        fs::rename(&unfinished, path)?;
        sync_folder(path)?;
        Ok(value)
    });
    if renamed.is_err() {
        // The first error is the one to report; an unfinished file that cannot be removed does no harm.
        let _ = fs::remove_file(&unfinished);
    }
    renamed
}

fn beside(path: &Path) -> io::Result<PathBuf> {
    let name =
        path.file_name().ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "not a file name"))?;
    Ok(path.with_file_name(format!(".{}.{}.tmp", name.to_string_lossy(), std::process::id())))
}

fn write_and_sync<T, E: From<io::Error>>(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<File>) -> Result<T, E>,
) -> Result<T, E> {
    let mut writer = BufWriter::with_capacity(1 << 20, File::create(path)?);
    let value = write(&mut writer)?;
    writer.flush()?;
    writer.get_ref().sync_all()?;
    Ok(value)
}

/// Makes the rename itself last. Only Unix lets a folder be opened and synced.
fn sync_folder(path: &Path) -> io::Result<()> {
    if cfg!(unix) {
        let folder = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        File::open(folder.unwrap_or(Path::new(".")))?.sync_all()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_write_leaves_the_old_file_and_nothing_else() {
        let folder = std::env::temp_dir().join(format!("kvant-durable-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let path = folder.join("file");
        write_whole(&path, |w| w.write_all(b"old")).unwrap();
        let error = write_whole(&path, |w| {
            w.write_all(b"half of the n")?;
            Err::<(), _>(io::Error::from(io::ErrorKind::StorageFull))
        });
        assert_eq!(error.unwrap_err().kind(), io::ErrorKind::StorageFull);
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);
        write_whole(&path, |w| w.write_all(b"new")).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        fs::remove_dir_all(&folder).unwrap();
    }
}
