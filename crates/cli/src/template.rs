//! Option of the chat template.

use std::path::Path;

use clap::Args;
use kvant::chat::{BUILTIN, builtin};

use crate::args::{read_text, strip_bom};
use crate::failure::Failure;

/// Selects the chat template.
#[derive(Args, Debug, Clone)]
pub struct TemplateArgs {
    /// Chat template instead of the model's own: chatml, llama3, gemma, mistral, phi3, or a file
    #[arg(long, value_name = "NAME|FILE", env = "KVANT_CHAT_TEMPLATE")]
    chat_template: Option<String>,
}

impl TemplateArgs {
    /// Returns the template's source, if one is named.
    pub fn source(&self) -> Result<Option<String>, Failure> {
        let Some(name) = &self.chat_template else { return Ok(None) };
        if let Some(source) = builtin(name) {
            return Ok(Some(source.to_owned()));
        }
        if !Path::new(name).exists() {
            return Err(Failure::Usage(format!(
                "--chat-template: expected a file or one of {}, got '{name}'",
                names().join(" ")
            )));
        }
        read_text(Path::new(name)).map(strip_bom).map(Some)
    }
}

/// Returns the names of the built-in templates.
pub fn names() -> Vec<&'static str> {
    BUILTIN.iter().map(|(name, _)| *name).collect()
}
