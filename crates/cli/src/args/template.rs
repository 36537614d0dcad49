//! Argument of the chat template.

use clap::Args;
use kvant::chat::BUILTIN;

/// Selects the chat template.
#[derive(Args, Debug, Clone)]
pub struct TemplateArgs {
    /// Chat template instead of the model's own: chatml, llama3, gemma, mistral, phi3, rwkv-world,
    /// or a file
    #[arg(long, value_name = "NAME|FILE", env = "KVANT_CHAT_TEMPLATE")]
    pub chat_template: Option<String>,
}

/// Returns the names of the built-in templates.
pub fn names() -> Vec<&'static str> {
    BUILTIN.iter().map(|(name, _)| *name).collect()
}
