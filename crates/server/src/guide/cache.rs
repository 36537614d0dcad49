//! Compiled forms of late: an agent sends the same tools with every turn, and compiling them takes longer than reading what is new.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use xxhash_rust::xxh3::xxh3_128;

use super::{Form, Guide};
use crate::lanes::Owner;

/// Forms that are kept, of all owners together.
const MAX_FORMS: usize = 16;
/// The largest form that is kept, in bytes of its text: what it takes once compiled is a small multiple.
const MAX_BYTES: usize = 64 << 10;

/// Guides at the beginning of their forms, the one that was used last at the end.
#[derive(Default)]
pub(super) struct Cache(Mutex<VecDeque<(Key, Guide)>>);

/// Names a form of an owner: nobody learns from times what forms another has sent.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Key(u128);

impl Key {
    /// `None` for a form that is too large to be kept.
    pub fn of(form: &Form, owner: &Owner) -> Option<Self> {
        let text = match form {
            Form::Schema(schema) => format!("schema {schema}"),
            Form::Regex(regex) => format!("regex {regex}"),
            Form::Lark(lark) => format!("lark {lark}"),
            Form::Choice(texts) => format!("choice {texts:?}"),
        };
        (text.len() <= MAX_BYTES).then(|| Self(xxh3_128(format!("{owner:?} {text}").as_bytes())))
    }
}

impl Cache {
    fn all(&self) -> MutexGuard<'_, VecDeque<(Key, Guide)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A guide at the beginning of this form.
    pub fn find(&self, key: Key) -> Option<Guide> {
        let mut all = self.all();
        let at = all.iter().position(|(known, _)| *known == key)?;
        let found = all.remove(at)?;
        let guide = found.1.fork();
        all.push_back(found);
        guide
    }

    /// Keeps a guide that has just been made.
    pub fn keep(&self, key: Key, guide: &Guide) {
        let Some(guide) = guide.fork() else { return };
        let mut all = self.all();
        all.push_back((key, guide));
        if all.len() > MAX_FORMS {
            all.pop_front();
        }
    }
}
