//! Opens what the arguments name: the model, with its adapters, and the chat template.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use kvant::chat::builtin;
use kvant::{
    Config, DeviceChoice, Error, Gguf, InputStatistics, LoraFile, Model, OpenOptions, Requirements, devices,
    open_lora,
};

use crate::args::decode::DraftArgs;
use crate::args::lora::{LoraArgs, Scaled, short};
use crate::args::model::{ModelArgs, ModelSourceArgs};
use crate::args::template::{TemplateArgs, names};
use crate::failure::Failure;
use crate::files::{read_text, strip_bom};
use crate::media::MediaOptions;
use crate::{log, output, progress};

/// Holds what a command needs of a model besides its weights.
#[derive(Default)]
pub struct ModelRequirements<'a> {
    pub needs: Requirements,
    pub chat_template: Option<String>,
    /// Options of speculative decoding, for a command that generates.
    pub draft: Option<&'a DraftArgs>,
    /// Options of the vision and audio encoders.
    pub media: Option<MediaOptions<'a>>,
    /// Receives the inputs of the model's matrices.
    pub input_statistics: Option<Arc<InputStatistics>>,
    /// Whether a guard compares the caches with what they were made from.
    pub kv_guard: bool,
    /// Whether the command takes text encoders, which embed or rank texts and generate none.
    pub takes_encoders: bool,
}

impl ModelArgs {
    /// Loads the model, with a progress bar on a terminal.
    pub fn open(&self, quiet: bool) -> Result<Model, Failure> {
        self.open_with(quiet, ModelRequirements::default())
    }

    /// Loads another model to the same device, with the weight types of its file.
    pub fn load_other(&self, model: &str, quiet: bool) -> Result<Model, Failure> {
        let (place, lora) = (self.place.named(model), LoraArgs::default());
        let other = Self { place, weights: None, lora, ..self.clone() };
        other.open_with(quiet, ModelRequirements { takes_encoders: true, ..Default::default() })
    }

    /// Loads the model as [`open`](Self::open) does and checks a command's further requirements
    /// before the weights are loaded.
    pub fn open_with(&self, quiet: bool, requirements: ModelRequirements<'_>) -> Result<Model, Failure> {
        let ModelRequirements {
            needs,
            chat_template,
            draft,
            media,
            input_statistics,
            kv_guard,
            takes_encoders,
        } = requirements;
        let place = self.place.source()?;
        let gguf = Arc::new(place.open(&self.place, quiet)?);
        if !takes_encoders {
            Config::from_gguf(&gguf).map_err(Error::from)?;
        }
        let draft_tokens = draft.filter(|draft| draft.draft_max != Some(0));
        let mtp = draft_tokens.is_some();
        let draft = draft_tokens.and_then(|draft| draft.model_draft.as_ref());
        let draft = draft.map(|name| self.place.open_other(name, quiet).map(Arc::new)).transpose()?;
        let loras = self.lora.open(&self.place, &gguf, quiet)?;
        let mmproj = media.map(|media| media.open(&self.place, &gguf, quiet)).transpose()?.flatten();
        let started = Instant::now();
        let bar = progress::bar("loading", 100, quiet);
        let mut on_progress = |share: f32| bar.set_position((share * 100.0) as u64);
        let template = chat_template.clone();
        let options = self.options(loras.clone(), Some(&mut on_progress));
        let (draft_file, mmproj_file) = (draft.clone(), mmproj.clone());
        let options = OpenOptions {
            needs,
            chat_template: template,
            mtp,
            draft: draft_file,
            mmproj: mmproj_file,
            input_statistics: input_statistics.clone(),
            kv_guard,
            ..options
        };
        let model = match Model::from_gguf(gguf.clone(), options) {
            // GPU layers were requested, but no GPU may be present.
            Err(Error::Device(error))
                if self.gpu_is_optional() && devices::check(DeviceChoice::Cuda(0)).is_err() =>
            {
                log::note(format_args!("-ngl: {error}; all layers are on the CPU"));
                let (device, n_gpu_layers) = (DeviceChoice::Cpu.into(), None);
                let options = self.options(loras, Some(&mut on_progress));
                let options =
                    OpenOptions { needs, chat_template, mtp, draft, mmproj, input_statistics, ..options };
                let options = OpenOptions { device, n_gpu_layers, kv_guard, ..options };
                Model::from_gguf(gguf, options)
            }
            other => other,
        };
        bar.finish_and_clear();
        let model = model?;
        let (device, seconds) = (model.device(), started.elapsed().as_secs_f64());
        if self.device == DeviceChoice::Auto && self.n_gpu_layers.is_none() && device.name == "cpu" {
            note_unused_gpu();
        }
        if let Some(draft) = model.draft() {
            note_draft_context(draft.config().n_ctx_train, model.config().n_ctx_train);
        }
        let [mapped, read] = model.mapped_bytes();
        if mapped > 0 {
            log::note(format_args!(
                "{} of experts stay in the file, {} are in memory; decoding a token reads and repacks {} of them, which takes at least ten times as long as in memory",
                output::bytes(mapped),
                output::bytes(model.weight_bytes() - mapped),
                output::bytes(read),
            ));
        }
        tracing::info!(model = %place, device = %device.name, kernels = %device.kernels, seconds, "model loaded");
        Ok(model)
    }

    /// Returns the model's name for the summary, with its weight type and adapters.
    pub fn label(&self) -> String {
        let (name, adapters) = (self.name(), self.lora.label());
        let weights = self.weights.map(|dtype| format!(" as {dtype}")).unwrap_or_default();
        format!("{name}{weights}{adapters}")
    }

    /// Returns the model's name.
    pub fn name(&self) -> String {
        self.place.source().map_or_else(|_| String::new(), |place| place.name())
    }
}

/// Notes that the draft model has the shorter context.
fn note_draft_context(n_ctx: usize, of: usize) {
    if n_ctx < of {
        log::note(format_args!(
            "-md: drafts only the first {n_ctx} tokens of a conversation, the draft model's context"
        ));
    }
}

/// Notes a GPU that is present but unusable, with the reason.
fn note_unused_gpu() {
    if devices::cuda_count().is_ok_and(|n| n > 0)
        && let Err(error) = devices::check(DeviceChoice::Cuda(0))
    {
        log::note(format_args!("the GPU is not used: {error}"));
    }
}

impl LoraArgs {
    /// Opens the adapters, found as `place` finds other models; `base` is the model that they
    /// modify.
    pub fn open(&self, place: &ModelSourceArgs, base: &Gguf, quiet: bool) -> Result<Vec<LoraFile>, Failure> {
        let open = |Scaled { name, scale }: Scaled| {
            let args = place.named(&name);
            let file = match args.source()?.fetch(&args, quiet)? {
                Some(path) => open_lora(path, base)?,
                None => Model::bundled_file()?,
            };
            Ok(LoraFile { name: short(&name), ..LoraFile::new(file, scale) })
        };
        self.all().map(open).collect()
    }
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
