//! Hugging Face folders, described as GGUF files.
//!
//! [`open`] reads `config.json`, the headers of the safetensors files and `tokenizer.json`, and gives the [`Gguf`] that llama.cpp's
//! converter would write: the same keys, names and orders. Nothing is written. Tensors stay in their mapped files; those that GGUF has
//! otherwise (rows of queries and keys in another order, experts side by side, norms that hold what is beyond 1) are made when they
//! are asked for. So everything that loads, measures or writes a GGUF file does so with a folder.
//!
//! [`open_adapter`] does the same with adapters as PEFT saves them.
//!
//! What a family of models is called in either place, and where they differ, is a row of `family.rs`. Every byte of a folder is
//! untrusted.
#![forbid(unsafe_code)]

mod adapter;
mod cut;
mod error;
mod family;
mod folder;
mod generation;
mod layers;
mod metadata;
mod pooling;
mod pre;
mod recipe;
mod safetensors;
mod scaling;
mod tensors;
mod tokenizer;

use std::path::Path;

use kvant_gguf::{Gguf, GgufWriter, printable_path};

pub use adapter::{ADAPTER_FILES, is_adapter, open_adapter};
pub use error::HfError;

use family::{Family, Layers};
use folder::{Folder, Object};
use safetensors::Shards;
use tokenizer::Settings;

/// The file that makes a folder a model.
const CONFIG: &str = "config.json";

/// Whether `path` is a folder with a model's `config.json`.
pub fn is_folder(path: &Path) -> bool {
    path.is_dir() && path.join(CONFIG).is_file()
}

/// Describes the model in a folder.
///
/// Its files must not be overwritten or truncated by another program while the model is open.
///
/// # Errors
/// [`HfError`] with the first thing found wrong: a file that is missing or no sound JSON or safetensors, a family or a tokenizer
/// that is not converted, a tensor that is missing, unknown or of another size.
pub fn open(path: impl AsRef<Path>) -> Result<Gguf, HfError> {
    let path = path.as_ref();
    std::fs::metadata(path).map_err(|source| HfError::File { path: path.to_owned(), source })?;
    let mut folder = Folder::new(path);
    let config = folder.json(CONFIG)?.ok_or_else(|| no_model(path))?;
    refuse_quantised(config.object()?)?;
    let family = Family::of(config.object()?)?;
    let config = if family.sees { config.within("text_config") } else { config };
    let config = config.with_defaults(family.defaults);
    let config = config.object()?;
    let shards = Shards::open(&mut folder)?;
    let mut writer = GgufWriter::new();
    let sizes = metadata::write(&mut writer, config, family, &name(folder.path()))?;
    pooling::write(&mut writer, &mut folder, family)?;
    let mut tensors = tensors::plan(&shards, family, &sizes)?;
    for (name, divisors) in scaling::write(&mut writer, config, family, &sizes)? {
        tensors.add_constant(name, &divisors);
    }
    let n_vocab = tensors.n_vocab()?;
    let generation = folder.json("generation_config.json")?;
    let generation = generation.as_ref().map(|generation| generation.object()).transpose()?;
    if let Some(generation) = generation {
        generation::write(&mut writer, generation)?;
    }
    let said = Settings { config, generation, keeps_merges: family.layers == Layers::OwnHeads };
    tokenizer::write(&mut writer, &mut folder, said, n_vocab)?;
    tensors.declare(&mut writer)?;
    let files = shards.stamps().chain(folder.take_stamps()).collect();
    Ok(Gguf::described(&writer, path, files, Box::new(tensors.with(shards)))?)
}

fn no_model(path: &Path) -> HfError {
    let path = path.to_owned();
    match is_adapter(&path) {
        true => HfError::Adapter { path },
        false => {
            HfError::Folder { path, why: "has no config.json: it is no GGUF file, and no Hugging Face model" }
        }
    }
}

/// Weights that are packed in ways of their own are no tensors of numbers; but for blocks that GGUF has too.
fn refuse_quantised(config: Object<'_>) -> Result<(), HfError> {
    let Some(how) = config.find_object("quantization_config")? else { return Ok(()) };
    let method = how.find_str("quant_method")?.unwrap_or("a way that it does not name");
    if method == "mxfp4" && Family::of(config).is_ok_and(|family| family.packs_experts) {
        return Ok(());
    }
    Err(HfError::Quantised { method: method.to_owned() })
}

/// What the model is called: as its folder is.
fn name(path: &Path) -> String {
    // `.` and `..` have no name of their own.
    let whole = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    whole.file_name().map_or_else(|| "model".to_owned(), |name| printable_path(Path::new(name)))
}
