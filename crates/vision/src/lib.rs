//! Pictures as rows of a language model.
//!
//! A [`Tower`] is what a file `mmproj-*.gguf` of llama.cpp holds: a transformer over the patches of a picture, in which each sees all others, and
//! a projector that makes rows of its results, as wide as those of the text model that it belongs to. [`Layout::new`] cuts a picture as the model was
//! trained to have it, and says which marks of the vocabulary stand around and between its rows.
//!
//! The products run on a device, as those of the text model do; what lies between them does not, as it is a small part of the time.
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
