//! Environment variables of flags that others override.

use std::ffi::OsString;
use std::path::Path;

use kvant::gguf::printable_path;

use crate::failure::Failure;

/// Returns the value of an environment variable, unless it is empty. Used for flags that others
/// override: clap would take the variable even where an overriding flag is given.
///
/// # Errors
///
/// A value that is not UTF-8: continuing would use another model or prompt than intended.
pub fn from_env(name: &str) -> Result<Option<String>, Failure> {
    let Some(value) = std::env::var_os(name).filter(|value| !value.is_empty()) else { return Ok(None) };
    let refused = |value: OsString| {
        Failure::Usage(format!("{name}: expected UTF-8 text, got {}", printable_path(Path::new(&value))))
    };
    value.into_string().map(Some).map_err(refused)
}
