//! Audio encoders on a device.

use std::sync::Arc;

use kvant_backend::host_ops::for_rows;
use kvant_backend::{Backend, limits};
use kvant_gguf::Gguf;
use kvant_model::ModelError;
use kvant_model::linear::Linear;

use crate::clip::AudioClip;
use crate::config::{Config, Projector};
use crate::conformer::Conformer;
use crate::error::AudioError;
use crate::loader::Loader;
use crate::rows::rms_norm;
use crate::transformer::Transformer;

/// An audio encoder on a device.
pub struct AudioEncoder<B: Backend> {
    device: Arc<B>,
    config: Config,
    weights: Weights<B>,
}

/// What computes rows from features.
enum Weights<B: Backend> {
    Transformer(Transformer<B>),
    Conformer(Conformer<B>),
    /// A matrix, of normalized frames of samples (Gemma 4 unified).
    Frames(Linear<B>),
}

impl<B: Backend> AudioEncoder<B> {
    /// Loads the encoder of a file onto a device.
    ///
    /// # Errors
    /// A file of another kind, an unknown encoder, tensors of wrong shapes, or a device without
    /// memory.
    pub fn load(gguf: &Gguf, device: Arc<B>) -> Result<Self, AudioError> {
        let config = Config::from_gguf(gguf)?;
        let mut loader = Loader::new(gguf, &*device);
        let weights = Weights::load(&mut loader, &config)?;
        loader.finish()?;
        Ok(Self { device, config, weights })
    }

    /// Returns the hyper-parameters.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Encodes a clip. Returns its rows `[n, n_embd_text]` in the order of time. Windows of the
    /// clip are encoded one after the other: outputs of different windows do not attend to each
    /// other. `go_on` is called before each window, which takes seconds.
    ///
    /// # Errors
    /// A clip that is too short or too long, [`AudioError::Cancelled`] when `go_on` returns
    /// `false`, or a failure of the device.
    pub fn rows(&self, clip: &AudioClip, go_on: &dyn Fn() -> bool) -> Result<Vec<f32>, AudioError> {
        let (c, device) = (&self.config, &*self.device);
        let features = c.features(clip)?;
        let n_positions = c.n_positions_of(clip.samples().len());
        let mut rows = Vec::new();
        for window in features.chunks(c.window_frames() * c.n_features()) {
            if !go_on() {
                return Err(AudioError::Cancelled);
            }
            rows.extend(match &self.weights {
                Weights::Transformer(transformer) => transformer.rows(device, c, window, n_positions)?,
                Weights::Conformer(conformer) => conformer.rows(device, c, window)?,
                Weights::Frames(matrix) => {
                    let mut frames = window.to_vec();
                    for_rows(&mut frames, c.n_embd, limits::n_cores(), |row| rms_norm(row, None, c.eps));
                    matrix.forward(device, &frames)?
                }
            });
        }
        if let Weights::Conformer(conformer) = &self.weights {
            rows.extend(conformer.end());
        }
        Ok(rows)
    }
}

impl<B: Backend> Weights<B> {
    fn load(loader: &mut Loader<'_, B>, c: &Config) -> Result<Self, ModelError> {
        Ok(match c.projector {
            Projector::Voxtral | Projector::Qwen2 | Projector::Qwen3 => {
                Self::Transformer(Transformer::load(loader, c)?)
            }
            Projector::Gemma3n | Projector::Gemma4 => Self::Conformer(Conformer::load(loader, c)?),
            Projector::Gemma4Unified => {
                Self::Frames(loader.linear("mm.a.input_projection", [c.n_embd, c.n_embd_text])?)
            }
        })
    }
}
