//! Vision encoders: images as soft tokens of a language model.
//!
//! A [`VisionEncoder`] is a vision encoder from llama.cpp's file `mmproj-*.gguf`: a bidirectional
//! transformer over the patches of an image, and a projector that maps its outputs to rows as wide
//! as the hidden size of the text model. [`ImageLayout::new`] preprocesses an image as in training,
//! and places marker tokens of the vocabulary around and between its rows.
//!
//! Matrix products run on a device, as those of the text model do; the operations between them run
//! on the host, as they take a small part of the time.
#![forbid(unsafe_code)]

mod config;
mod encoder;
mod error;
mod image;
mod preprocess;
mod resize;
mod weights;

pub use config::{Config, Projector};
pub use encoder::VisionEncoder;
pub use error::VisionError;
pub use image::Image;
pub use preprocess::{ImageLayout, ImageToken};
