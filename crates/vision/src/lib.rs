//! Vision encoders: images as soft tokens of a language model.
//!
//! A [`Tower`] is a vision encoder from llama.cpp's file `mmproj-*.gguf`: a bidirectional
//! transformer over the patches of an image, and a projector that maps its outputs to rows as wide
//! as the hidden size of the text model. [`Layout::new`] preprocesses an image as in training, and
//! places marker tokens of the vocabulary around and between its rows.
//!
//! Matrix products run on a device, as those of the text model do; the operations between them run
//! on the host, as they take a small part of the time.
#![forbid(unsafe_code)]

mod config;
mod error;
mod host;
mod layout;
mod picture;
mod resize;
mod tower;
mod weights;

pub use config::{Config, Projector};
pub use error::VisionError;
pub use layout::{Layout, Piece};
pub use picture::Picture;
pub use tower::Tower;
