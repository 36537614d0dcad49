//! A folder that several servers use at once: which files changed, whose turn it is to evict, and
//! how much room others have reserved.
//!
//! Files appear and disappear whole, so that reading needs no lock. A server that writes one holds
//! the lock only while it makes room and reserves it: a sparse file of the size to come, which
//! others count, stands for the room until the file is there. One that a killed server left counts
//! for [`LEASE`].

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use super::disk::EXTENSION;

/// Name of the locked file.
const LOCK: &str = ".lock";
/// File extension of a reservation.
const RESERVED: &str = "reserved";
/// Maximum time that a server takes to write a file.
const LEASE: Duration = Duration::from_secs(600);
/// Maximum age of a change that the folder's modification time may not show.
const RECENT: Duration = Duration::from_secs(2);

/// Folder of several servers. See the [module](self).
pub(super) struct SharedFolder {
    path: PathBuf,
    lock: Arc<File>,
    /// Modification time of the folder when it was last listed, if no later change can have the
    /// same.
    listed: Option<SystemTime>,
}

/// File of the folder.
pub(super) struct Listed {
    pub path: PathBuf,
    pub bytes: u64,
    /// Time of its last use.
    pub used: SystemTime,
}

impl SharedFolder {
    /// Opens a folder readable by its owner only, since it will hold conversations, which is
    /// created if missing and checked to be writable.
    pub fn open(path: PathBuf) -> io::Result<Self> {
        let mut builder = fs::DirBuilder::new();
        #[cfg(unix)]
        std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
        builder.recursive(true).create(&path)?;
        // Otherwise the error would appear only when a conversation is lost.
        let probe = path.join(format!(".probe-{}", std::process::id()));
        File::create(&probe)?;
        fs::remove_file(probe).or_else(ignore_missing)?;
        let lock = File::options().create(true).append(true).open(path.join(LOCK))?;
        Ok(Self { path, lock: Arc::new(lock), listed: None })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the conversations in the folder, if it may have changed since the last call.
    pub fn list_if_changed(&mut self) -> io::Result<Option<Vec<Listed>>> {
        let changed = fs::metadata(&self.path)?.modified()?;
        if self.listed == Some(changed) {
            return Ok(None);
        }
        let is_settled = SystemTime::now().duration_since(changed).is_ok_and(|age| age > RECENT);
        let mut found = self.list(EXTENSION)?;
        found.sort_by_key(|file| file.used);
        self.listed = is_settled.then_some(changed);
        Ok(Some(found))
    }

    /// Has the next call list the folder.
    pub fn forget(&mut self) {
        self.listed = None;
    }

    /// Waits until no other server makes room.
    ///
    /// # Errors
    /// A file system without locks.
    pub fn lock(&self) -> io::Result<Turn> {
        self.lock.lock()?;
        Ok(Turn(Arc::clone(&self.lock)))
    }

    /// Returns the bytes that servers have reserved.
    pub fn reserved(&self, _: &Turn) -> io::Result<u64> {
        let is_expired = |file: &Listed| file.used.elapsed().is_ok_and(|age| age > LEASE);
        let (expired, live): (Vec<_>, Vec<_>) = self.list(RESERVED)?.into_iter().partition(is_expired);
        for file in expired {
            fs::remove_file(file.path).or_else(ignore_missing)?;
        }
        Ok(live.iter().map(|file| file.bytes).sum())
    }

    /// Reserves room for a file of `bytes`.
    pub fn reserve(&self, file: &Path, bytes: u64, _: &Turn) -> io::Result<Reservation> {
        let reservation = Reservation(file.with_extension(format!("{}.{RESERVED}", std::process::id())));
        File::create(&reservation.0)?.set_len(bytes)?;
        Ok(reservation)
    }

    fn list(&self, extension: &str) -> io::Result<Vec<Listed>> {
        let mut found = Vec::new();
        for entry in fs::read_dir(&self.path)? {
            let path = entry?.path();
            // Another server may have removed it.
            if path.extension().is_some_and(|of| of == extension)
                && let Ok(there) = fs::metadata(&path)
            {
                let used = there.modified().unwrap_or(SystemTime::UNIX_EPOCH);
                found.push(Listed { path, bytes: there.len(), used });
            }
        }
        Ok(found)
    }
}

/// The lock of a folder.
pub(super) struct Turn(Arc<File>);

impl Drop for Turn {
    fn drop(&mut self) {
        // Fails only if it is not locked.
        _ = self.0.unlock();
    }
}

/// Room for a file, until dropped.
pub(super) struct Reservation(PathBuf);

impl Drop for Reservation {
    fn drop(&mut self) {
        // Otherwise it counts until its lease ends.
        _ = fs::remove_file(&self.0);
    }
}

fn ignore_missing(error: io::Error) -> io::Result<()> {
    if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) }
}
