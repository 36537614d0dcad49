//! Disk tier: conversations in files of a folder, which outlive the process.
//!
//! Each is a context file (checksummed, versioned, replaced atomically) whose name starts with the
//! [hash](CacheKey::hash_with_model) of its cache key and model, which must match to find it: a
//! file of another key, or of an earlier version of the hash, is evicted when others need its room.
//! An invalid file is logged and removed.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use kvant::{Error, Model, Session};
use xxhash_rust::xxh3::Xxh3;

use super::tier::{OffloadedSession, Tier};
use crate::cache_key::CacheKey;
use crate::error::ServeError;
use crate::events::{Blocks, Medium};

/// File extension.
const EXTENSION: &str = "kvctx";

/// Conversation to save.
pub(super) struct ConversationToSave<'a> {
    /// [Hash](CacheKey::hash_with_model) of its cache key and the model.
    pub hash: u64,
    pub kind: &'a CacheKey,
    pub tokens: &'a [u32],
}

/// Disk tier of a model.
pub(super) struct Disk {
    folder: PathBuf,
    pub tier: Tier<PathBuf>,
}

impl Disk {
    /// Opens a folder, which is created if missing, and reads the files of earlier processes.
    ///
    /// # Errors
    /// The folder cannot be created or read.
    pub fn open(folder: PathBuf, budget: u64, model: &Model) -> Result<Self, ServeError> {
        let failed = |source| ServeError::Folder { folder: folder.clone(), source };
        make(&folder).map_err(failed)?;
        let mut found: Vec<(SystemTime, OffloadedSession<PathBuf>)> = Vec::new();
        for entry in fs::read_dir(&folder).map_err(failed)? {
            let path = entry.map_err(failed)?.path();
            if let Some(kept) = read(&path, model) {
                let used = fs::metadata(&path).and_then(|there| there.modified());
                found.push((used.unwrap_or(SystemTime::UNIX_EPOCH), kept));
            }
        }
        found.sort_by_key(|(used, _)| *used);
        let mut tier = Tier::new(budget);
        found.into_iter().for_each(|(_, kept)| tier.push(kept));
        let mut disk = Self { folder, tier };
        disk.make_room(0);
        Ok(disk)
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
        self.make_room(needed);
        let mut text = Xxh3::new();
        tokens.iter().for_each(|token| text.update(&token.to_le_bytes()));
        let path = self.folder.join(format!("{hash:016x}-{:016x}.{EXTENSION}", text.digest()));
        match write(&path) {
            Ok(bytes) => {
                let mut kept =
                    OffloadedSession { kind: hash, tokens: tokens.to_vec(), bytes, place: path, held: None };
                kept.publish(blocks, kind);
                self.tier.push(kept);
            }
            // It will be recomputed when needed.
            Err(error) => tracing::warn!(%error, "a conversation cannot be saved"),
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

    fn make_room(&mut self, needed: u64) {
        while !self.tier.fits(needed)
            && let Some(oldest) = self.tier.pop()
        {
            remove(oldest);
        }
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

/// Reads a file of an earlier process, if it belongs to this model.
fn read(path: &Path, model: &Model) -> Option<OffloadedSession<PathBuf>> {
    let name = path.file_name()?.to_str()?.strip_suffix(EXTENSION)?.strip_suffix('.')?;
    let kind = u64::from_str_radix(name.split_once('-')?.0, 16).ok()?;
    let bytes = fs::metadata(path).ok()?.len();
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

/// Creates a folder readable by its owner only, since it will hold conversations, or checks that an
/// existing one is writable.
fn make(folder: &Path) -> std::io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.recursive(true).create(folder)?;
    // Otherwise the error would appear only when a conversation is lost.
    let probe = folder.join(format!(".probe-{}", std::process::id()));
    fs::File::create_new(&probe)?;
    fs::remove_file(probe)
}
