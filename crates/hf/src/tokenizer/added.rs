//! Properties of added tokens, for which GGUF has no keys.

use kvant_gguf::GgufWriter;

use crate::error::HfError;
use crate::folder::Object;

/// The properties of added tokens, as defined in `tokenizer.json`. Kvant's keys have the same
/// names.
const PROPERTIES: [&str; 4] = ["lstrip", "rstrip", "single_word", "normalized"];

/// The tokens with each property.
#[derive(Debug, Default)]
pub(super) struct AddedTokens {
    ids: [Vec<u32>; 4],
}

impl AddedTokens {
    /// Reads the properties of a token.
    ///
    /// # Errors
    /// A property that is not a boolean.
    pub fn read(&mut self, token: Object<'_>, id: u32) -> Result<(), HfError> {
        for (property, ids) in PROPERTIES.into_iter().zip(&mut self.ids) {
            if token.find_bool(property)?.unwrap_or(false) {
                ids.push(id);
            }
        }
        Ok(())
    }

    /// Writes the properties that any token has.
    ///
    /// # Errors
    /// Those of the writer.
    pub fn write(&self, writer: &mut GgufWriter) -> Result<(), HfError> {
        for (property, ids) in PROPERTIES.into_iter().zip(&self.ids).filter(|(_, ids)| !ids.is_empty()) {
            writer.set_array(&format!("kvant.tokenizer.{property}"), ids.iter().copied())?;
        }
        Ok(())
    }
}
