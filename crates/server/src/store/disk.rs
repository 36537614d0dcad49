//! Disk tier: conversations in files of a folder, which outlive the process.
//!
//! Each is a context file (checksummed, versioned, replaced atomically) whose name starts with the
//! [hash](CacheKey::hash_with_model) of its cache key and model, which must match to find it: a
//! file of another key, or of an earlier version of the hash, is evicted when others need its room.
//! An invalid file is logged and removed.
//!
//! Servers of the same model may use one folder at once ([`SharedFolder`]): each finds what another
//! has saved, and all together keep one budget.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use kvant::{Error, Model, Session};
use xxhash_rust::xxh3::Xxh3;

use super::shared_folder::{Reservation, SharedFolder};
use super::tier::{OffloadedSession, Tier};
use crate::cache_key::CacheKey;
use crate::error::ServeError;
use crate::events::{Blocks, Medium};

/// File extension.
pub(super) const EXTENSION: &str = "kvctx";

/// Conversation to save.
pub(super) struct ConversationToSave<'a> {
    /// [Hash](CacheKey::hash_with_model) of its cache key and the model.
    pub hash: u64,
    pub kind: &'a CacheKey,
    pub tokens: &'a [u32],
}

/// Disk tier of a model.
pub(super) struct Disk {
    model: Model,
    folder: SharedFolder,
    pub tier: Tier<PathBuf>,
    /// Files that are not conversations of this model.
    foreign: HashSet<PathBuf>,
}

impl Disk {
    /// Opens a folder, which is created if missing, and reads the files there.
    ///
    /// # Errors
    /// The folder cannot be created, read or locked.
    pub fn open(path: PathBuf, budget: u64, model: &Model) -> Result<Self, ServeError> {
        let failed = |source| ServeError::Folder { folder: path.clone(), source };
        let folder = SharedFolder::open(path.clone()).map_err(failed)?;
        let (tier, foreign) = (Tier::new(budget), HashSet::new());
        let mut disk = Self { model: model.clone(), folder, tier, foreign };
        disk.refresh().map_err(failed)?;
        disk.make_room(0, None).map_err(failed)?;
        Ok(disk)
    }

    /// Finds what other servers have saved and removed. Reports whether anything may have changed.
    pub fn refresh(&mut self) -> io::Result<bool> {
        let Some(found) = self.folder.list_if_changed()? else { return Ok(false) };
        let known = std::iter::from_fn(|| self.tier.pop()).map(|kept| (kept.place.clone(), kept));
        let mut known: HashMap<_, _> = known.collect();
        self.foreign.retain(|path| found.iter().any(|file| file.path == *path));
        for file in found {
            if self.foreign.contains(&file.path) {
                continue;
            }
            match known.remove(&file.path).or_else(|| read(&file.path, file.bytes, &self.model)) {
                Some(kept) => self.tier.push(kept),
                None => _ = self.foreign.insert(file.path),
            }
        }
        Ok(true)
    }

    /// Saves a conversation of `needed` bytes by `write`, if it fits and is not present.
    pub fn save(
        &mut self,
        conversation: ConversationToSave<'_>,
        needed: u64,
        blocks: &Blocks,
        write: impl FnOnce(&Path) -> Result<u64, Error>,
    ) {
        let ConversationToSave { hash, kind, tokens } = conversation;
        if needed > self.tier.budget() || self.tier.has(hash, tokens) {
            return;
        }
        while let Some(beginning) = self.tier.take_prefix(hash, tokens) {
            remove(beginning);
        }
        let mut text = Xxh3::new();
        tokens.iter().for_each(|token| text.update(&token.to_le_bytes()));
        let path = self.folder.path().join(format!("{hash:016x}-{:016x}.{EXTENSION}", text.digest()));
        let reserved = self.make_room(needed, Some(&path));
        // It will be recomputed when needed.
        let failed = |error: &dyn std::fmt::Display| tracing::warn!(%error, "a conversation cannot be saved");
        let _reserved = match reserved {
            Ok(Some(reserved)) => reserved,
            Ok(None) => return,
            Err(error) => return failed(&error),
        };
        match write(&path) {
            Ok(bytes) => {
                let mut kept =
                    OffloadedSession { kind: hash, tokens: tokens.to_vec(), bytes, place: path, held: None };
                kept.publish(blocks, kind);
                self.tier.push(kept);
            }
            Err(error) => failed(&error),
        }
    }

    /// Loads the prefix of `prompt` that the conversation at `index` has into `session`.
    pub fn load(
        &mut self,
        index: usize,
        session: &mut Session,
        kind: &CacheKey,
        prompt: &[u32],
        blocks: &Blocks,
    ) {
        let Some(mut kept) = self.tier.take(index) else { return };
        match session.load_prefix(&kept.place, prompt) {
            Ok(_) => {
                _ = fs::File::open(&kept.place).and_then(|file| file.set_modified(SystemTime::now()));
                kept.publish(blocks, kind);
                self.tier.push(kept);
            }
            Err(error) if error.is_out_of_memory() => self.tier.push(kept),
            Err(error) => {
                tracing::warn!(%error, "a saved conversation cannot be loaded");
                remove(kept);
            }
        }
    }

    /// Removes the least recently used conversations until `needed` bytes fit, and reserves them
    /// for `file`. `None` without a file, or where other servers have reserved too much.
    fn make_room(&mut self, needed: u64, file: Option<&Path>) -> io::Result<Option<Reservation>> {
        let turn = self.folder.lock()?;
        // What others used last does not show in the folder.
        self.folder.forget();
        self.refresh()?;
        let all = needed.saturating_add(self.folder.reserved(&turn)?);
        if all > self.tier.budget() {
            return Ok(None);
        }
        while !self.tier.fits(all)
            && let Some(oldest) = self.tier.pop()
        {
            remove(oldest);
        }
        file.map(|file| self.folder.reserve(file, needed, &turn)).transpose()
    }
}

impl OffloadedSession<PathBuf> {
    /// Publishes its blocks once its cache key is known.
    pub fn publish(&mut self, blocks: &Blocks, kind: &CacheKey) {
        let Self { tokens, held, .. } = self;
        held.get_or_insert_with(|| {
            let mut held = blocks.register(Medium::Disk, kind);
            held.grow(tokens);
            held
        });
    }
}

fn remove(kept: OffloadedSession<PathBuf>) {
    // Another process may have removed it.
    _ = fs::remove_file(kept.place);
}

/// Reads a file of another process, if it belongs to this model.
fn read(path: &Path, bytes: u64, model: &Model) -> Option<OffloadedSession<PathBuf>> {
    let name = path.file_name()?.to_str()?.strip_suffix(EXTENSION)?.strip_suffix('.')?;
    let kind = u64::from_str_radix(name.split_once('-')?.0, 16).ok()?;
    keep_private(path);
    match model.saved_tokens(path) {
        Ok(tokens) => Some(OffloadedSession { kind, tokens, bytes, place: path.to_owned(), held: None }),
        Err(error) => {
            tracing::info!(%error, "left alone");
            None
        }
    }
}

/// Makes a file readable by its owner only: before 0.1 files had default permissions.
fn keep_private(path: &Path) {
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        // Fails for a file of another user, which is theirs to protect.
        _ = fs::set_permissions(path, fs::Permissions::from_mode(0o600));
    }
    #[cfg(not(unix))]
    let _ = path;
}
