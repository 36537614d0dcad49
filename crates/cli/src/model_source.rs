//! Source of a model: bundled, a file, or the Hugging Face hub.

use std::fmt;
use std::path::{Path, PathBuf};

use kvant::gguf::printable_path;
use kvant::{Gguf, Model, hf, open_file};

use crate::args::model::ModelSourceArgs;
use crate::env_var::from_env;
use crate::failure::Failure;
use crate::files::has_gguf_magic;
#[cfg(feature = "hub")]
use crate::hub::{self, id::Id};

/// Name of the model inside the program.
pub const BUNDLED: &str = "bundled";

impl ModelSourceArgs {
    /// Resolves the first word in a command that takes a prompt as well: moves it to `prompt`
    /// unless it names a model.
    ///
    /// # Errors
    ///
    /// A word that names a model of another program's catalogue, or a path without a model: it is
    /// no prompt.
    pub fn split_off_prompt(&mut self, prompt: &mut Vec<String>) -> Result<(), Failure> {
        let Some(word) = self.word.take_if(|word| ModelSource::infer(word).is_none()) else { return Ok(()) };
        if !self.is_by_flag() && (is_catalogue_name(&word) || is_path(&word)) {
            let line = format!("no model '{word}': expected {EXPECTED} (-p takes it as a prompt)");
            return Err(Failure::Usage(line));
        }
        prompt.insert(0, word);
        Ok(())
    }

    /// Returns the source of the model.
    pub fn source(&self) -> Result<ModelSource, Failure> {
        #[cfg(feature = "hub")]
        if let Some(id) = &self.hf_repo {
            if let Some(other) = self.word.as_ref().or(self.model.as_ref()) {
                return Err(Failure::Usage(format!("two models: {id} and {other}")));
            }
            return Ok(ModelSource::Hub(Id { file: self.hf_file.clone(), ..id.clone() }));
        }
        let given = match (&self.word, &self.model) {
            (Some(a), Some(b)) if a != b => return Err(Failure::Usage(format!("two models: {b} and {a}"))),
            (given @ Some(_), _) | (None, given @ Some(_)) => given.clone(),
            (None, None) => from_env("KVANT_MODEL")?,
        };
        Ok(given.map_or(ModelSource::Bundled, |given| ModelSource::new(&given)))
    }

    /// Opens the file of another model, given as for `-m`.
    pub fn open_other(&self, model: &str, quiet: bool) -> Result<Gguf, Failure> {
        let place = self.named(model);
        place.source()?.open(&place, quiet)
    }
}

/// Source of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelSource {
    /// Inside the program.
    Bundled,
    /// A GGUF file, or a Hugging Face folder.
    File(PathBuf),
    /// On the hub.
    #[cfg(feature = "hub")]
    Hub(Id),
}

/// Accepted forms of a model.
const EXPECTED: &str = match cfg!(feature = "hub") {
    true => "a GGUF file, a Hugging Face folder or id",
    false => "a GGUF file or a Hugging Face folder",
};

impl ModelSource {
    /// Parses a word that must be a model.
    pub fn new(text: &str) -> Self {
        if Path::new(text).exists() {
            return Self::File(text.into());
        }
        #[cfg(feature = "hub")]
        if let Some(id) = hub_model(text) {
            return Self::Hub(id);
        }
        if text == BUNDLED { Self::Bundled } else { Self::File(text.into()) }
    }

    /// Parses a word that may be a prompt as well; `None` unless it can only be a model.
    pub fn infer(text: &str) -> Option<Self> {
        let path = Path::new(text);
        #[cfg(feature = "hub")]
        if !path.exists() && hub_model(text).is_some() {
            return Some(Self::new(text));
        }
        let is_gguf = path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("gguf"));
        let is_folder = hf::is_folder(path) || hf::is_adapter(path);
        (text == BUNDLED || is_gguf && !text.contains('\n') || has_gguf_magic(path) || is_folder)
            .then(|| Self::new(text))
    }

    /// Returns the local path of the model, downloaded if needed; `None` for the bundled one.
    pub fn fetch(&self, place: &ModelSourceArgs, quiet: bool) -> Result<Option<PathBuf>, Failure> {
        #[cfg(not(feature = "hub"))]
        let _ = (place, quiet);
        match self {
            #[cfg(feature = "hub")]
            Self::Hub(id) => Ok(Some(hub::fetch(id, place.offline, quiet)?)),
            Self::Bundled => Ok(None),
            Self::File(path) => Ok(Some(path.clone())),
        }
    }

    /// Opens the model, downloaded if needed.
    pub fn open(&self, place: &ModelSourceArgs, quiet: bool) -> Result<Gguf, Failure> {
        match self.fetch(place, quiet)? {
            Some(path) => Ok(open_file(path)?),
            None => Ok(Model::bundled_file()?),
        }
    }

    /// Returns the file or folder if the source is one.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::File(path) => Some(path),
            _ => None,
        }
    }

    /// Returns the file's name, for a summary.
    pub fn name(&self) -> String {
        match self {
            Self::Bundled => BUNDLED.to_owned(),
            #[cfg(feature = "hub")]
            Self::Hub(id) => id.to_string(),
            Self::File(path) => path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned(),
        }
    }
}

impl fmt::Display for ModelSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bundled => f.write_str(BUNDLED),
            #[cfg(feature = "hub")]
            Self::Hub(id) => id.fmt(f),
            Self::File(path) => f.write_str(&printable_path(path)),
        }
    }
}

/// Parses a hub id; `x/y.gguf` is taken as a file.
#[cfg(feature = "hub")]
fn hub_model(text: &str) -> Option<Id> {
    Id::parse(text).filter(|id| !id.repo.to_ascii_lowercase().ends_with(".gguf"))
}

/// Returns whether a word is a path or URL rather than the beginning of a sentence.
fn is_path(text: &str) -> bool {
    const PREFIXES: [&str; 4] = ["./", "../", "~/", "/"];
    let is_plain = !text.contains(char::is_whitespace);
    let is_named = text.contains("://") || PREFIXES.iter().any(|start| text.starts_with(start));
    is_plain && (is_named || text.contains('/') && Path::new(text).exists())
}

/// Returns whether a word resembles a name of ollama's catalogue, such as `llama3.2` or
/// `qwen2.5:7b`.
fn is_catalogue_name(text: &str) -> bool {
    const FAMILIES: [&str; 9] =
        ["llama", "qwen", "mistral", "gemma", "phi", "deepseek-", "smollm", "tinyllama", "gpt-oss"];
    let is_plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || ".:-_".contains(c);
    let has_digit = |rest: &str| rest.contains(|c: char| c.is_ascii_digit());
    const WHOLE_NAMES: [&str; 5] = ["mistral", "mixtral", "gemma", "tinyllama", "gpt2"];
    WHOLE_NAMES.contains(&text)
        || text.chars().all(is_plain)
            && FAMILIES.iter().any(|family| text.strip_prefix(family).is_some_and(has_digit))
}
