//! Host memory tier: each conversation is held as the bytes of a context file, from which it is
//! restored or moved to disk.

use kvant::{SavedSession, Session};

use super::tier::{OffloadedSession, Tier};
use crate::cache_key::CacheKey;
use crate::events::{Blocks, Medium};

/// Conversation in host memory.
pub(super) struct InRam {
    pub saved: SavedSession,
    /// Its cache key, in case it is moved.
    pub kind: CacheKey,
}

pub(super) type Ram = Tier<InRam>;

/// Returns the bytes of a session here: those of the file, and its tokens once more, by which it is
/// found.
fn needed(session: &Session) -> u64 {
    session.saved_bytes() + size_of_val(session.tokens()) as u64
}

impl Ram {
    /// Returns the bytes to be free for a session; `None` if it exceeds the whole budget.
    pub fn room_for(&self, session: &Session) -> Option<u64> {
        Some(needed(session)).filter(|&bytes| bytes <= self.budget())
    }

    /// Saves a session that fits.
    pub fn save(&mut self, hash: u64, kind: &CacheKey, session: &Session, blocks: &Blocks) {
        let bytes = needed(session);
        match session.to_saved() {
            Ok(saved) => {
                let tokens = session.tokens().to_vec();
                let mut held = blocks.register(Medium::Ram, kind);
                held.grow(&tokens);
                let place = InRam { saved, kind: kind.clone() };
                self.push(OffloadedSession { kind: hash, tokens, bytes, place, held: Some(held) });
            }
            // It will be recomputed when needed.
            Err(error) => tracing::warn!(%error, "a conversation cannot be saved"),
        }
    }

    /// Loads the prefix of `prompt` that the conversation at `index` has into `session`. A
    /// conversation that is loaded whole is removed here: it returns when it is evicted again.
    pub fn load(&mut self, index: usize, session: &mut Session, prompt: &[u32]) {
        let Some(kept) = self.take(index) else { return };
        match session.load_saved_prefix(&kept.place.saved, prompt) {
            Ok(n) if n == kept.tokens.len() => {}
            Ok(_) => self.push(kept),
            Err(error) if error.is_out_of_memory() => self.push(kept),
            Err(error) => tracing::warn!(%error, "a saved conversation cannot be loaded"),
        }
    }
}
