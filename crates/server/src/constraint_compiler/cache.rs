//! Cache of compiled constraints: an agent sends the same tools with every turn, and their
//! compilation takes longer than the prefill of the new tokens.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use kvant::generate::constraint::{Constraint, OutputFormat, Owner};
use xxhash_rust::xxh3::xxh3_128;

/// Maximum cached constraints of all owners together.
const MAX_FORMS: usize = 16;
/// Maximum size of the text of a cached constraint in bytes: its compiled form is a small multiple.
const MAX_BYTES: usize = 64 << 10;

/// Constraints in their initial state, least recently used first.
#[derive(Default)]
pub(super) struct Cache(Mutex<VecDeque<(Key, Constraint)>>);

/// Hash of a constraint and its owner: timing reveals no constraint of another owner.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Key(u128);

impl Key {
    /// Returns the key of a constraint, or `None` if it is too large to be cached.
    pub fn of(form: &OutputFormat, owner: &Owner) -> Option<Self> {
        let text = match form {
            OutputFormat::Schema(schema) => format!("schema {schema}"),
            OutputFormat::Regex(regex) => format!("regex {regex}"),
            OutputFormat::Lark(lark) => format!("lark {lark}"),
            OutputFormat::Choice(texts) => format!("choice {texts:?}"),
        };
        (text.len() <= MAX_BYTES).then(|| Self(xxh3_128(format!("{owner:?} {text}").as_bytes())))
    }
}

impl Cache {
    fn all(&self) -> MutexGuard<'_, VecDeque<(Key, Constraint)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a guide in its initial state.
    pub fn find(&self, key: Key) -> Option<Constraint> {
        let mut all = self.all();
        let at = all.iter().position(|(known, _)| *known == key)?;
        let found = all.remove(at)?;
        let guide = found.1.fork();
        all.push_back(found);
        guide
    }

    /// Adds a new guide.
    pub fn keep(&self, key: Key, guide: &Constraint) {
        let Some(guide) = guide.fork() else { return };
        let mut all = self.all();
        all.push_back((key, guide));
        if all.len() > MAX_FORMS {
            all.pop_front();
        }
    }
}
