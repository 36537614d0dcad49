//! Hugging Face folders, described as GGUF files.
//!
//! [`open`] reads `config.json`, the headers of the safetensors files and `tokenizer.json`, and
//! returns the [`Gguf`] that llama.cpp's converter would write, with the same keys, names and
//! orders. No file is written. Tensors stay in their mapped files. Those that differ in GGUF
//! (reordered rows of queries and keys, stacked experts, norms that store their weight minus 1,
//! quantized weights) are converted on access. Everything that loads, measures or writes a GGUF
//! file thus works with a folder.
//!
//! [`open_adapter`] does the same for PEFT adapters.
//!
//! The names of a family in both formats, and their differences, are a row of `family.rs`. All
//! bytes of a folder are untrusted.
#![forbid(unsafe_code)]

mod adapter;
mod attended_streams;
mod block_index;
mod connections;
mod draft_head;
mod encoder;
mod error;
mod family;
mod folder;
mod gated_streams;
mod generation;
mod heads_by_layer;
mod layers;
mod metadata;
mod ngrams;
mod pooling;
mod pretokenizer;
mod quantized;
mod recipe;
mod safetensors;
mod scaling;
mod shared_kv;
mod streams;
mod tensor_names;
mod tensor_transform;
mod tensors;
mod tokenizer;
mod windowed_latent;
mod xielu;

use std::path::Path;

use kvant_gguf::{Gguf, GgufWriter, printable_path};

pub use adapter::{ADAPTER_FILES, is_adapter, open_adapter};
pub use error::HfError;

use encoder::EncoderFamily;
use family::{Family, Layers};
use folder::Folder;
use quantized::Method;
use safetensors::Shards;
use tokenizer::Settings;

/// The file that identifies a model folder.
const CONFIG: &str = "config.json";

/// Whether `path` is a folder with a model's `config.json`.
pub fn is_folder(path: &Path) -> bool {
    path.is_dir() && path.join(CONFIG).is_file()
}

/// Describes the model in a folder as a GGUF file.
///
/// Its files must not be overwritten or truncated by another program while the model is open.
///
/// # Errors
/// [`HfError`] with the first fault: a missing file, invalid JSON or safetensors, an unsupported
/// family or tokenizer, or a tensor that is missing, unknown or of another shape.
pub fn open(path: impl AsRef<Path>) -> Result<Gguf, HfError> {
    let path = path.as_ref();
    std::fs::metadata(path).map_err(|source| HfError::File { path: path.to_owned(), source })?;
    let mut folder = Folder::new(path);
    let config = folder.json(CONFIG)?.ok_or_else(|| no_model(path))?;
    if let Some(family) = EncoderFamily::of(config.object()?) {
        return encoder::open(family, config.object()?, folder, &name(path));
    }
    if draft_head::is_head(config.object()?) {
        return draft_head::open(config, folder, &name(path));
    }
    let quantization = Method::of(config.object()?)?;
    let family = Family::of(config.object()?)?;
    let config = if family.is_multimodal { config.with_nested("text_config") } else { config };
    // A multimodal model may describe the weights of its text model there.
    let quantization =
        quantization.map_or_else(|| Method::of(config.object()?), |method| Ok(Some(method)))?;
    let config = config.with_defaults(family.defaults);
    let config = match family.layers {
        Layers::HeadsByLayer { halves_full: true } => config.with(heads_by_layer::add_usual_keys),
        Layers::SelectingBlocks => config.with(block_index::add_usual_keys),
        Layers::WindowedLatent => config.with(windowed_latent::add_usual_keys),
        _ => config,
    };
    let config = config.object()?;
    let mut shards = Shards::open(&mut folder)?;
    if family.layers == Layers::SharedKv {
        shared_kv::remove_images(&mut shards);
    }
    if let Some(method) = quantization {
        quantized::join(&mut shards, method)?;
    }
    let mut writer = GgufWriter::new();
    let sizes = metadata::write(&mut writer, config, family, &name(folder.path()))?;
    pooling::write(&mut writer, &mut folder, family.arch)?;
    if family.activations == family::XIELU {
        xielu::write(&mut writer, &mut shards, sizes.n_layers)?;
    }
    if family.layers == Layers::DeltaStreams {
        ngrams::write(&mut writer, config, family, &mut shards)?;
    }
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
    let settings = Settings { config, generation, keeps_merges: family.layers == Layers::OwnHeads };
    tokenizer::write(&mut writer, &mut folder, settings, n_vocab)?;
    tensors.declare(&mut writer)?;
    let files = shards.stamps().chain(folder.take_stamps()).collect();
    Ok(Gguf::from_virtual(&writer, path, files, Box::new(tensors.with(shards)))?)
}

fn no_model(path: &Path) -> HfError {
    let path = path.to_owned();
    match is_adapter(&path) {
        true => HfError::Adapter { path },
        false => {
            HfError::Folder { path, why: "has no config.json: neither a GGUF file nor a Hugging Face model" }
        }
    }
}

/// Returns the model's name: that of its folder.
fn name(path: &Path) -> String {
    // `.` and `..` have no file name.
    let whole = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    whole.file_name().map_or_else(|| "model".to_owned(), |name| printable_path(Path::new(name)))
}
