//! Audio encoders: speech and sound as soft tokens of a language model.
//!
//! An [`AudioEncoder`] is an audio encoder from llama.cpp's file `mmproj-*.gguf`: convolutions over
//! a log-mel spectrogram as in training, a bidirectional transformer (Whisper, arXiv 2212.04356) or
//! a conformer (arXiv 2005.08100), and a projector that maps its outputs to rows as wide as the
//! hidden size of the text model. [`AudioClip`] decodes files to mono at 16 kHz.
//!
//! Matrix products run on a device, as those of the text model do; the operations between them run
//! on the host, as they take a small part of the time.
#![forbid(unsafe_code)]

mod clip;
mod config;
mod conformer;
mod convolution;
mod encoder;
mod error;
mod features;
mod loader;
mod log_mel;
mod resample;
mod rows;
mod transformer;

pub use clip::{AudioClip, SAMPLE_RATE};
pub use config::{Config, Projector};
pub use encoder::AudioEncoder;
pub use error::AudioError;
