//! Metadata by key.

use std::borrow::Cow;

use crate::error::{GgufError, Item, Problem};
use crate::parse::Entry;
use crate::shard::Shard;
use crate::value::{FromValue, Value, convert};

/// The metadata of a file: keys and values in the file's order.
#[derive(Clone, Copy)]
pub struct Meta<'a> {
    shard: &'a Shard,
}

impl<'a> Meta<'a> {
    pub(crate) fn of(shard: &'a Shard) -> Self {
        Self { shard }
    }

    /// Returns the number of keys.
    pub fn len(&self) -> usize {
        self.shard.parsed.entries.len()
    }

    /// Returns whether there are no keys.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns keys and values in the file's order.
    pub fn iter(&self) -> MetaIter<'a> {
        MetaIter { shard: self.shard, entries: self.shard.parsed.entries.iter() }
    }

    /// Returns the value of `key` as stored.
    pub fn value(&self, key: &str) -> Option<Value<'a>> {
        self.entry(key).map(|e| value(self.shard, e))
    }

    /// Returns the value of `key` as a `T`; for the conversions see [`FromValue`].
    ///
    /// # Errors
    /// [`Problem::Missing`] if the key does not exist, else as [`Meta::find`].
    pub fn get<T: FromValue<'a>>(&self, key: &str) -> Result<T, GgufError> {
        self.find(key)?.ok_or_else(|| self.fail(key, None, Problem::Missing))
    }

    /// Returns the value of `key` as a `T`, `None` if the key does not exist.
    ///
    /// # Errors
    /// [`Problem::WrongType`] for a value of another type, or out of range.
    pub fn find<T: FromValue<'a>>(&self, key: &str) -> Result<Option<T>, GgufError> {
        let Some(entry) = self.entry(key) else { return Ok(None) };
        convert(value(self.shard, entry)).map(Some).map_err(|problem| self.fail(key, Some(entry), problem))
    }

    /// Returns the string of `key` for display, with invalid UTF-8 replaced by U+FFFD. `None` if
    /// the key does not exist or has another type: a malformed name, author or licence must not
    /// prevent the use of a model.
    pub fn text_lossy(&self, key: &str) -> Option<Cow<'a, str>> {
        match self.value(key)? {
            Value::String(bytes) => Some(String::from_utf8_lossy(bytes)),
            _ => None,
        }
    }

    /// Returns an error about `key`, for callers with requirements beyond the type.
    pub(crate) fn error(&self, key: &str, problem: Problem) -> GgufError {
        self.fail(key, self.entry(key), problem)
    }

    fn fail(&self, key: &str, entry: Option<&Entry>, problem: Problem) -> GgufError {
        let offset = entry.map(|e| e.payload.start as u64);
        GgufError::new(Item::Key(key.to_owned()), offset, problem).in_file(self.shard.path.as_deref())
    }

    fn entry(&self, key: &str) -> Option<&'a Entry> {
        let parsed = &self.shard.parsed;
        let found = parsed.by_key.binary_search_by(|i| parsed.entries[*i].key.as_str().cmp(key)).ok()?;
        Some(&parsed.entries[parsed.by_key[found]])
    }
}

fn value<'a>(shard: &'a Shard, entry: &Entry) -> Value<'a> {
    Value::read_checked(entry.value_type, &shard.head()[entry.payload.clone()])
}

impl<'a> IntoIterator for Meta<'a> {
    type Item = (&'a str, Value<'a>);
    type IntoIter = MetaIter<'a>;

    fn into_iter(self) -> MetaIter<'a> {
        self.iter()
    }
}

/// The keys and values of a [`Meta`].
#[derive(Clone)]
pub struct MetaIter<'a> {
    shard: &'a Shard,
    entries: std::slice::Iter<'a, Entry>,
}

impl<'a> Iterator for MetaIter<'a> {
    type Item = (&'a str, Value<'a>);

    fn next(&mut self) -> Option<Self::Item> {
        let entry = self.entries.next()?;
        Some((&entry.key, value(self.shard, entry)))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.entries.size_hint()
    }
}

impl ExactSizeIterator for MetaIter<'_> {}
