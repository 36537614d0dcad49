//! Devices of encoders: bidirectional transformers of texts, images and audio, with their types
//! erased.

use std::sync::Arc;

use kvant_audio::{AudioClip, AudioEncoder, AudioError};
use kvant_backend::{Backend, DeviceInfo, KernelChoice};
use kvant_codec::DType;
use kvant_cpu::PrefillPrecision;
use kvant_gguf::Gguf;
use kvant_model::ModelError;
use kvant_model::encoder::{Encoder, EncoderConfig, EncoderText};
use kvant_vision::{Image, VisionEncoder, VisionError};

use super::{DeviceChoice, DeviceList, cpu, cuda};
use crate::error::Error;

/// An open device with the ops of encoders.
pub(crate) trait EncoderDevice {
    /// Returns the description of the device.
    fn info(&self) -> DeviceInfo;
    /// Returns its kernels.
    fn kernel_choices(&self) -> Vec<KernelChoice>;
    /// Loads the text encoder of a file, with its matrices as `dtype` if it is given.
    fn load_texts(&self, gguf: &Gguf, dtype: Option<DType>) -> Result<Box<dyn EncodesTexts>, ModelError>;
    /// Loads the vision encoder of a file.
    fn load_images(&self, gguf: &Gguf) -> Result<Box<dyn EncodesImages>, VisionError>;
    /// Loads the audio encoder of a file.
    fn load_audio(&self, gguf: &Gguf) -> Result<Box<dyn EncodesAudio>, AudioError>;
}

/// An [`Encoder`] on a device.
pub(crate) trait EncodesTexts: Send + Sync {
    /// See [`Encoder::config`].
    fn config(&self) -> &EncoderConfig;
    /// See [`Encoder::n_vocab`].
    fn n_vocab(&self) -> usize;
    /// See [`Encoder::weight_bytes`].
    fn weight_bytes(&self) -> usize;
    /// See [`Encoder::has_classifier`].
    fn has_classifier(&self) -> bool;
    /// See [`Encoder::hidden_states`].
    fn hidden_states(&self, texts: &[EncoderText<'_>]) -> Result<Vec<f32>, ModelError>;
    /// See [`Encoder::score`].
    fn score(&self, state: &[f32]) -> Result<f32, ModelError>;
    /// See [`Encoder::projects_pooled`].
    fn projects_pooled(&self) -> bool;
    /// See [`Encoder::project_pooled`].
    fn project_pooled(&self, pooled: Vec<f32>) -> Result<Vec<f32>, ModelError>;
}

/// A [`VisionEncoder`] on a device.
pub(crate) trait EncodesImages: Send + Sync {
    /// See [`VisionEncoder::config`].
    fn config(&self) -> &kvant_vision::Config;
    /// See [`VisionEncoder::rows`].
    fn rows(&self, tile: &Image) -> Result<Vec<Vec<f32>>, VisionError>;
}

/// An [`AudioEncoder`] on a device.
pub(crate) trait EncodesAudio: Send + Sync {
    /// See [`AudioEncoder::config`].
    fn config(&self) -> &kvant_audio::Config;
    /// See [`AudioEncoder::rows`].
    fn rows(&self, clip: &AudioClip, go_on: &dyn Fn() -> bool) -> Result<Vec<f32>, AudioError>;
}

/// Opens the device of an encoder beside a model on `devices`: the first of these, or the CPU in
/// place of an adapter, which lacks the ops, and where no layer is on a GPU.
pub(crate) fn open(
    devices: &DeviceList,
    n_gpu_layers: Option<usize>,
    n_threads: Option<usize>,
    precision: PrefillPrecision,
) -> Result<Box<dyn EncoderDevice>, Error> {
    let first = devices.devices().first().copied().unwrap_or_default();
    let gpu = match first {
        _ if n_gpu_layers == Some(0) => None,
        DeviceChoice::Cpu | DeviceChoice::Wgpu(_) => None,
        DeviceChoice::Cuda(index) => Some(cuda::open_encoders(index)?),
        // As for a model.
        DeviceChoice::Auto => super::usable(cuda::open_encoders(0))?,
    };
    match gpu {
        Some(_) if precision != PrefillPrecision::Exact => {
            let (expected, got) = ("exact on a GPU".to_owned(), precision.to_string());
            Err(Error::Setting { name: "prefill_precision", expected, got })
        }
        Some(gpu) => Ok(gpu),
        None => Ok(Box::new(Arc::new(cpu::open(n_threads, precision)?))),
    }
}

impl<B: Backend> EncoderDevice for Arc<B> {
    fn info(&self) -> DeviceInfo {
        (**self).info()
    }

    fn kernel_choices(&self) -> Vec<KernelChoice> {
        (**self).kernel_choices()
    }

    fn load_texts(&self, gguf: &Gguf, dtype: Option<DType>) -> Result<Box<dyn EncodesTexts>, ModelError> {
        Ok(Box::new(Encoder::load(gguf, dtype, Self::clone(self))?))
    }

    fn load_images(&self, gguf: &Gguf) -> Result<Box<dyn EncodesImages>, VisionError> {
        Ok(Box::new(VisionEncoder::load(gguf, Self::clone(self))?))
    }

    fn load_audio(&self, gguf: &Gguf) -> Result<Box<dyn EncodesAudio>, AudioError> {
        Ok(Box::new(AudioEncoder::load(gguf, Self::clone(self))?))
    }
}

impl<B: Backend> EncodesTexts for Encoder<B> {
    fn config(&self) -> &EncoderConfig {
        self.config()
    }

    fn n_vocab(&self) -> usize {
        self.n_vocab()
    }

    fn weight_bytes(&self) -> usize {
        self.weight_bytes()
    }

    fn has_classifier(&self) -> bool {
        self.has_classifier()
    }

    fn hidden_states(&self, texts: &[EncoderText<'_>]) -> Result<Vec<f32>, ModelError> {
        self.hidden_states(texts)
    }

    fn score(&self, state: &[f32]) -> Result<f32, ModelError> {
        self.score(state)
    }

    fn projects_pooled(&self) -> bool {
        self.projects_pooled()
    }

    fn project_pooled(&self, pooled: Vec<f32>) -> Result<Vec<f32>, ModelError> {
        self.project_pooled(pooled)
    }
}

impl<B: Backend> EncodesImages for VisionEncoder<B> {
    fn config(&self) -> &kvant_vision::Config {
        self.config()
    }

    fn rows(&self, tile: &Image) -> Result<Vec<Vec<f32>>, VisionError> {
        self.rows(tile)
    }
}

impl<B: Backend> EncodesAudio for AudioEncoder<B> {
    fn config(&self) -> &kvant_audio::Config {
        self.config()
    }

    fn rows(&self, clip: &AudioClip, go_on: &dyn Fn() -> bool) -> Result<Vec<f32>, AudioError> {
        self.rows(clip, go_on)
    }
}
