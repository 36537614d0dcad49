//! Arguments that select the model, its device and the form of its weights.

use clap::{Args, ValueEnum};
use kvant::{DType, DeviceChoice, DeviceList, LoraFile, OpenOptions, PrefillPrecision};

use crate::args::lora::LoraArgs;
use crate::args::value::{devices, layers, positive, share};
use crate::args::weight_type::weight_type;
#[cfg(feature = "hub")]
use crate::hub::id::Id;

/// Arguments that select the model.
#[allow(rustdoc::broken_intra_doc_links, reason = "the help has brackets that are no links")]
#[derive(Args, Debug, Clone)]
pub struct ModelSourceArgs {
    /// The model, as with -m
    #[arg(value_name = "MODEL")]
    pub word: Option<String>,
    /// GGUF file, Hugging Face folder or id (USER/REPO[:QUANT]), or bundled, the small built-in
    /// model [default: bundled] [env: KVANT_MODEL]
    #[arg(short = 'm', long, value_name = "MODEL")]
    pub model: Option<String>,
    /// Model of the Hugging Face hub (-hf), downloaded if needed: USER/REPO[:QUANT], Q4_K_M by
    /// default
    #[cfg(feature = "hub")]
    #[arg(long, value_name = "REPO", value_parser = hub_id, help_heading = HUB)]
    pub hf_repo: Option<Id>,
    /// File of that repository (-hff)
    #[cfg(feature = "hub")]
    #[arg(long, value_name = "FILE", requires = "hf_repo", help_heading = HUB)]
    pub hf_file: Option<String>,
    /// Use downloaded files only, as HF_HUB_OFFLINE=1 does
    #[cfg(feature = "hub")]
    #[arg(long, help_heading = HUB)]
    pub offline: bool,
}

#[cfg(feature = "hub")]
const HUB: &str = "Hugging Face hub";

#[cfg(feature = "hub")]
fn hub_id(text: &str) -> Result<Id, String> {
    Id::parse(text).ok_or_else(|| "expected USER/REPO or USER/REPO:QUANT".to_owned())
}

impl ModelSourceArgs {
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

    /// Returns whether an argument, not the environment, names a model.
    pub fn is_given(&self) -> bool {
        self.word.is_some() || self.is_by_flag()
    }

    /// Returns whether a flag names the model.
    pub fn is_by_flag(&self) -> bool {
        #[cfg(feature = "hub")]
        if self.hf_repo.is_some() {
            return true;
        }
        self.model.is_some()
    }
}

/// Selects the model to load and its device.
#[derive(Args, Debug, Clone)]
pub struct ModelArgs {
    #[command(flatten)]
    pub place: ModelSourceArgs,
    /// Number of threads [default: all cores]
    #[arg(short = 't', long, value_name = "N", env = "KVANT_THREADS", value_parser = positive)]
    pub threads: Option<usize>,
    /// Device: cpu, cuda:N (NVIDIA), wgpu:N (any GPU, through Vulkan, Metal or DX12), or auto: the
    /// first usable NVIDIA GPU, else the CPU. Several, as in cuda:0,cuda:1, share the layers, in
    /// this order
    #[arg(long, value_name = "DEVICES", env = "KVANT_DEVICE", default_value = "auto", value_parser = devices)]
    pub device: DeviceList,
    /// Convert weights to this type on load (q8_0, q4_K, f16, ...); the file is unchanged. With
    /// f16, activations are not rounded, so that eval measures the cache alone
    #[arg(long, value_name = "TYPE", env = "KVANT_WEIGHTS", value_parser = weight_type)]
    pub weights: Option<DType>,
    /// Where MoE expert weights reside: ram, or mmap: they stay in the file and are repacked when
    /// the router selects them (CPU only; less memory, at least ten times slower)
    #[arg(long, value_name = "WHERE", env = "KVANT_EXPERTS", default_value = "ram")]
    pub experts: ExpertPlace,
    /// Arithmetic of prefill: exact (bit-identical to decode) or bf16 (needs a CPU with a bf16
    /// matrix unit; see kvant doctor)
    #[arg(
        long,
        alias = "prompt-math",
        value_name = "PRECISION",
        env = "KVANT_PROMPT_MATH",
        default_value = "exact"
    )]
    pub prefill_precision: PrefillPrecisionArg,
    /// Offload the last N layers to the GPU and run the rest on the CPU (-ngl); a number or all
    /// [default: all]. Without a usable GPU the CPU runs all layers and a note is printed
    #[arg(long, visible_alias = "gpu-layers", value_name = "N", env = "KVANT_N_GPU_LAYERS", value_parser = layers)]
    pub n_gpu_layers: Option<usize>,
    /// Share of the layers for each of several devices, as in 3,1 (-ts) [default: in proportion to
    /// free memory]
    #[arg(long, value_name = "SHARES", value_delimiter = ',', value_parser = share)]
    pub tensor_split: Vec<f32>,
    #[command(flatten)]
    pub lora: LoraArgs,
}

impl ModelArgs {
    /// Returns the same arguments with exact prefill arithmetic, for reference measurements.
    pub fn with_exact_prefill(&self) -> Self {
        Self { prefill_precision: PrefillPrecisionArg::Exact, ..self.clone() }
    }

    /// Returns whether GPU layers were requested without naming a device.
    pub fn gpu_is_optional(&self) -> bool {
        self.device == DeviceChoice::Auto && self.n_gpu_layers.is_some_and(|n| n > 0)
    }

    /// Returns the load options for the model with these adapters.
    pub fn options<'a>(
        &self,
        loras: Vec<LoraFile>,
        progress: Option<&'a mut dyn FnMut(f32)>,
    ) -> OpenOptions<'a> {
        OpenOptions {
            device: self.device.clone(),
            n_gpu_layers: self.n_gpu_layers,
            layer_split: self.tensor_split.clone(),
            n_threads: self.threads,
            weights: self.weights,
            maps_experts: self.experts == ExpertPlace::Mmap,
            prefill_precision: match self.prefill_precision {
                PrefillPrecisionArg::Exact => PrefillPrecision::Exact,
                PrefillPrecisionArg::Bf16 => PrefillPrecision::Bf16,
            },
            loras,
            progress,
            ..Default::default()
        }
    }
}

/// Selects where expert weights reside.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ExpertPlace {
    /// In memory, repacked for the kernels
    Ram,
    /// In the file
    Mmap,
}

/// Selects the arithmetic of prefill GEMMs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PrefillPrecisionArg {
    /// Same as decode
    Exact,
    /// Operands rounded to bf16
    Bf16,
}
