//! Properties of added tokens, for which GGUF has no keys.

use kvant_gguf::GgufWriter;

use crate::HfError;
use crate::folder::Object;

/// The properties that `tokenizer.json` gives to added tokens; what they mean, see there. The keys of Kvant's are called like them.
const PROPERTIES: [&str; 4] = ["lstrip", "rstrip", "single_word", "normalized"];

/// Which tokens have each of the properties.
#[derive(Debug, Default)]
pub(super) struct AddedTokens {
    ids: [Vec<u32>; 4],
}

impl AddedTokens {
    /// Reads the properties of a token.
    ///
    /// # Errors
    /// One that is neither true nor false.
    pub fn read(&mut self, token: Object<'_>, id: u32) -> Result<(), HfError> {
        for (property, ids) in PROPERTIES.into_iter().zip(&mut self.ids) {
            if token.find_bool(property)?.unwrap_or(false) {
                ids.push(id);
            }
        }
        Ok(())
    }

    /// Writes those that some token has.
    ///
    /// # Errors
    /// What the writer refuses.
    pub fn write(&self, writer: &mut GgufWriter) -> Result<(), HfError> {
        for (property, ids) in PROPERTIES.into_iter().zip(&self.ids).filter(|(_, ids)| !ids.is_empty()) {
            writer.set_array(&format!("kvant.tokenizer.{property}"), ids.iter().copied())?;
        }
        Ok(())
    }
}
