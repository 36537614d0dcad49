//! Source of a model: bundled, a file, or the Hugging Face hub.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use clap::Args;
use kvant::gguf::printable_path;
use kvant::{Gguf, Model, hf, open_file};

use crate::args::from_env;
use crate::failure::Failure;
#[cfg(feature = "hub")]
use crate::hub::{self, Id};

/// Name of the model inside the program.
pub const BUNDLED: &str = "bundled";

/// Arguments that select the model.
#[allow(rustdoc::broken_intra_doc_links, reason = "the help has brackets that are no links")]
#[derive(Args, Debug, Clone)]
pub struct ModelSourceArgs {
    /// The model, as with -m
    #[arg(value_name = "MODEL")]
    word: Option<String>,
    /// GGUF file, Hugging Face folder or id (USER/REPO[:QUANT]), or bundled, the small built-in
    /// model [default: bundled] [env: KVANT_MODEL]
    #[arg(short = 'm', long, value_name = "MODEL")]
    model: Option<String>,
    /// Model of the Hugging Face hub (-hf), downloaded if needed: USER/REPO[:QUANT], Q4_K_M by
    /// default
    #[cfg(feature = "hub")]
    #[arg(long, value_name = "REPO", value_parser = hub_id, help_heading = HUB)]
    hf_repo: Option<Id>,
    /// File of that repository (-hff)
    #[cfg(feature = "hub")]
    #[arg(long, value_name = "FILE", requires = "hf_repo", help_heading = HUB)]
    hf_file: Option<String>,
    /// Use downloaded files only, as HF_HUB_OFFLINE=1 does
    #[cfg(feature = "hub")]
    #[arg(long, help_heading = HUB)]
    offline: bool,
}

#[cfg(feature = "hub")]
const HUB: &str = "Hugging Face hub";

#[cfg(feature = "hub")]
fn hub_id(text: &str) -> Result<Id, String> {
    Id::parse(text).ok_or_else(|| "expected USER/REPO or USER/REPO:QUANT".to_owned())
}

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

    /// Moves the first word to `words` if `-m` names the model.
    pub fn move_first_word(&mut self, words: &mut Vec<String>) {
        if self.is_by_flag()
            && let Some(word) = self.word.take()
        {
            words.insert(0, word);
        }
    }

    /// Returns the source of another model, given as for `-m`.
    pub fn named(&self, model: &str) -> Self {
        Self {
            word: None,
            model: Some(model.to_owned()),
            #[cfg(feature = "hub")]
            hf_repo: None,
            #[cfg(feature = "hub")]
            hf_file: None,
            #[cfg(feature = "hub")]
            offline: self.offline,
        }
    }

    /// Returns whether only local files are used.
    #[cfg(feature = "hub")]
    pub fn is_offline(&self) -> bool {
        self.offline
    }

    /// Returns whether an argument, not the environment, names a model.
    pub fn is_given(&self) -> bool {
        self.word.is_some() || self.is_by_flag()
    }

    /// Returns whether a flag names the model.
    fn is_by_flag(&self) -> bool {
        #[cfg(feature = "hub")]
        if self.hf_repo.is_some() {
            return true;
        }
        self.model.is_some()
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

/// Returns whether `path` is a model or a part of one.
pub fn is_model(path: &Path) -> bool {
    is_safetensors(path) || has_gguf_magic(path)
}

/// Returns whether `path` is a GGUF file of a language model: the first shard of a split one, and
/// no vision encoder.
pub fn is_language_model(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy().to_ascii_lowercase();
    let is_later_shard = name.contains("-of-") && !name.contains("-00001-of-");
    has_gguf_magic(path) && !name.starts_with("mmproj") && !is_later_shard
}

/// Returns whether `path` is a weight file of a Hugging Face folder.
pub fn is_safetensors(path: &Path) -> bool {
    path.is_file() && path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("safetensors"))
}

fn has_gguf_magic(path: &Path) -> bool {
    let mut magic = [0; 4];
    // Reads only from a regular file: reading from a pipe would consume its data.
    path.is_file()
        && File::open(path).is_ok_and(|mut file| file.read_exact(&mut magic).is_ok())
        && magic == *b"GGUF"
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
