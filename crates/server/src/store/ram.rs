//! Conversations in the machine's memory, each the bytes of a context file: what is read from there, and what is moved to the
//! disk, is what a file would have been.

use kvant::{SavedSession, Session};

use super::tier::{Kept, Tier};
use crate::events::{Blocks, Medium};
use crate::shelf::Kind;

/// Where one is.
pub(super) struct InRam {
    pub saved: SavedSession,
    /// What it is known by, should it move.
    pub kind: Kind,
}

pub(super) type Ram = Tier<InRam>;

/// Bytes that a session takes here: the file's, and its text once more, by which it is found.
fn needed(session: &Session) -> u64 {
    session.saved_bytes() + size_of_val(session.tokens()) as u64
}

impl Ram {
    /// Bytes to be free for a session; `None` where it does not fit even alone.
    pub fn room_for(&self, session: &Session) -> Option<u64> {
        Some(needed(session)).filter(|&bytes| bytes <= self.budget())
    }

    /// Keeps a session that there is room for.
    pub fn save(&mut self, hash: u64, kind: &Kind, session: &Session, blocks: &Blocks) {
        let bytes = needed(session);
        match session.to_saved() {
            Ok(saved) => {
                let tokens = session.tokens().to_vec();
                let mut held = blocks.hold(Medium::Ram, kind);
                held.grow(&tokens);
                let place = InRam { saved, kind: kind.clone() };
                self.push(Kept { kind: hash, tokens, bytes, place, held: Some(held) });
            }
            // It will be read again, then.
            Err(error) => tracing::warn!(%error, "a conversation is not kept"),
        }
    }

    /// Fetches into `session` the beginning of `prompt` that the conversation at `index` has. What is fetched whole is gone from
    /// here: it comes back when there is no room for it any more where it is now.
    pub fn load(&mut self, index: usize, session: &mut Session, prompt: &[u32]) {
        let Some(kept) = self.take(index) else { return };
        match session.load_saved_prefix(&kept.place.saved, prompt) {
            Ok(n) if n == kept.tokens.len() => {}
            Ok(_) => self.push(kept),
            Err(error) if error.is_out_of_memory() => self.push(kept),
            Err(error) => tracing::warn!(%error, "a conversation that was kept is of no use"),
        }
    }
}
