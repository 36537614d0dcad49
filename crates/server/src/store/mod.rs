//! Offload tiers for conversations that exceed the device memory: host memory, and disk for those
//! that were not used there for longest, each within its budget.
//!
//! In every tier a conversation is the bytes of a context file, so it is restored bit for bit.

mod disk;
mod ram;
mod shared_folder;
mod tier;

use std::ops::Add;
use std::path::{Path, PathBuf};

use kvant::{Model, Session};

use crate::cache_key::CacheKey;
use crate::error::ServeError;
use crate::events::Blocks;
use disk::{ConversationToSave, Disk};
use ram::{InRam, Ram};
use tier::OffloadedSession;

/// Minimum tokens that are worth saving or loading.
const MIN_TOKENS: usize = 128;

/// Used and maximum bytes of each tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct StoreUse {
    pub ram: u64,
    pub ram_budget: u64,
    pub disk: u64,
    pub disk_budget: u64,
}

impl Add for StoreUse {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            ram: self.ram + other.ram,
            ram_budget: self.ram_budget + other.ram_budget,
            disk: self.disk + other.disk,
            disk_budget: self.disk_budget + other.disk_budget,
        }
    }
}

/// Offloaded conversations of a model. See the [module](self).
pub(crate) struct Store {
    model: Model,
    ram: Ram,
    disk: Option<Disk>,
    blocks: Blocks,
}

impl Store {
    /// Opens a store with `ram` bytes of host memory and a folder, which is created if missing and
    /// read if an earlier process used it.
    ///
    /// # Errors
    /// The folder cannot be created or read.
    pub fn open(
        ram: u64,
        disk: Option<(PathBuf, u64)>,
        model: &Model,
        blocks: Blocks,
    ) -> Result<Self, ServeError> {
        let disk = disk.map(|(folder, budget)| Disk::open(folder, budget, model)).transpose()?;
        let mut store = Self { model: model.clone(), ram: Ram::new(ram), disk, blocks };
        store.publish_files();
        Ok(store)
    }

    /// Publishes KV-block events for files with the usual cache key.
    fn publish_files(&mut self) {
        if let Some(usual) = self.blocks.usual() {
            let kind = self.hash(usual);
            let found = self.disk.iter_mut().flat_map(|disk| disk.tier.iter_mut());
            found.filter(|kept| kept.kind == kind).for_each(|kept| kept.publish(&self.blocks, usual));
        }
    }

    /// Finds what other servers have saved in the folder.
    fn refresh(&mut self) {
        match self.disk.as_mut().map(Disk::refresh) {
            Some(Ok(true)) => self.publish_files(),
            Some(Err(error)) => tracing::warn!(%error, "the folder of conversations cannot be read"),
            Some(Ok(false)) | None => {}
        }
    }

    /// Saves a conversation if it is long enough and fits: in host memory, where the least recently
    /// used ones make room, or else on disk.
    pub fn save(&mut self, kind: &CacheKey, session: &Session) {
        self.refresh();
        let (hash, tokens) = (self.hash(kind), session.tokens());
        let is_kept =
            self.ram.has(hash, tokens) || self.disk.as_ref().is_some_and(|disk| disk.tier.has(hash, tokens));
        // Ids of soft tokens are meaningless in a file.
        if tokens.len() < MIN_TOKENS || is_kept || session.has_media() {
            return;
        }
        // A prefix on disk outlives the process, and is removed when the longer conversation is
        // written there.
        while self.ram.take_prefix(hash, tokens).is_some() {}
        match self.ram.room_for(session) {
            Some(needed) => {
                while !self.ram.fits(needed)
                    && let Some(oldest) = self.ram.pop()
                {
                    self.move_to_disk(&oldest);
                }
                self.ram.save(hash, kind, session, &self.blocks);
            }
            None => {
                if let Some(disk) = &mut self.disk {
                    let write = |path: &Path| session.save(path);
                    let conversation = ConversationToSave { hash, kind, tokens };
                    disk.save(conversation, session.saved_bytes(), &self.blocks, write);
                }
            }
        }
    }

    /// Without a disk it is dropped, and recomputed when needed.
    fn move_to_disk(&mut self, kept: &OffloadedSession<InRam>) {
        if let Some(disk) = &mut self.disk {
            let InRam { saved, kind } = &kept.place;
            let write = |path: &Path| saved.write(path);
            let conversation = ConversationToSave { hash: kept.kind, kind, tokens: &kept.tokens };
            disk.save(conversation, saved.n_bytes(), &self.blocks, write);
        }
    }

    /// Loads the longest saved prefix of `tokens` into `session`, if it is long enough.
    pub fn load(&mut self, session: &mut Session, kind: &CacheKey, tokens: &[u32]) {
        self.refresh();
        let min_len = session.tokens().len() + MIN_TOKENS;
        let hash = self.hash(kind);
        let is_worth_it = |(n, _): &(usize, usize)| *n >= min_len;
        let in_ram = self.ram.longest(hash, tokens).filter(is_worth_it);
        let on_disk = self.disk.as_ref().and_then(|disk| disk.tier.longest(hash, tokens));
        let on_disk = on_disk.filter(is_worth_it);
        match (in_ram, on_disk, &mut self.disk) {
            (Some((n, index)), other, _) if other.is_none_or(|(other, _)| n >= other) => {
                self.ram.load(index, session, tokens);
            }
            (_, Some((_, index)), Some(disk)) => {
                disk.load(index, session, kind, tokens, &self.blocks);
            }
            _ => {}
        }
    }

    /// Moves conversations from host memory to disk, where later ones go as well: the process or
    /// the model is about to end.
    pub fn flush_to_disk(&mut self) {
        while let Some(oldest) = self.ram.pop() {
            self.move_to_disk(&oldest);
        }
        self.ram = Ram::new(0);
    }

    /// Returns the usage and budgets.
    pub fn in_use(&self) -> StoreUse {
        let disk = self.disk.as_ref().map(|disk| &disk.tier);
        StoreUse {
            ram: self.ram.bytes(),
            ram_budget: self.ram.budget(),
            disk: disk.map_or(0, |disk| disk.bytes()),
            disk_budget: disk.map_or(0, |disk| disk.budget()),
        }
    }

    fn hash(&self, kind: &CacheKey) -> u64 {
        kind.hash_with_model(&self.model.compute_fingerprint())
    }
}

#[cfg(test)]
mod tests;
