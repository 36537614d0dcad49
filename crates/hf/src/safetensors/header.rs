//! Reads the header of a safetensors file one tensor at a time.

use std::fmt;
use std::path::Path;

use serde::de::{Deserializer as _, Error as _, MapAccess, Visitor};
use serde_json::Value;

use crate::error::HfError;

/// Entries that a header may have. DeepSeek-V3, in one file, would have 92,000. A header of the
/// largest size has room for a million and a half, which would take gigabytes.
pub(super) const MAX_TENSORS: usize = 1 << 18;

/// Calls `read` with each name of the header of the file at `path`, and its record.
///
/// # Errors
/// [`HfError::Json`], [`HfError::TooManyTensors`], and those of `read`. The first ends the reading.
pub(super) fn for_each(
    path: &Path,
    header: &[u8],
    read: impl FnMut(String, &Value) -> Result<(), HfError>,
) -> Result<(), HfError> {
    let mut refused = None;
    let mut json = serde_json::Deserializer::from_slice(header);
    let records = Records { path, read, refused: &mut refused };
    let done = json.deserialize_map(records).and_then(|()| json.end());
    match (refused, done) {
        (Some(error), _) => Err(error),
        (None, Err(error)) => Err(HfError::Json { path: path.to_owned(), why: error.to_string() }),
        (None, Ok(())) => Ok(()),
    }
}

struct Records<'a, F> {
    path: &'a Path,
    read: F,
    /// An error of ours: those of serde hold text alone.
    refused: &'a mut Option<HfError>,
}

impl<'de, F: FnMut(String, &Value) -> Result<(), HfError>> Visitor<'de> for Records<'_, F> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<(), A::Error> {
        let mut n_tensors = 0;
        while let Some((name, record)) = map.next_entry::<String, Value>()? {
            n_tensors += 1;
            let result = match n_tensors > MAX_TENSORS {
                true => Err(HfError::TooManyTensors { path: self.path.to_owned(), max: MAX_TENSORS }),
                false => (self.read)(name, &record),
            };
            if let Err(error) = result {
                *self.refused = Some(error);
                return Err(A::Error::custom("refused"));
            }
        }
        Ok(())
    }
}
