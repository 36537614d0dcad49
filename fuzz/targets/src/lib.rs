//! Properties that must hold for arbitrary bytes. cargo-fuzz drives these functions on a nightly
//! compiler; tests (for seconds) and `kvant-fuzz` (for the requested time) run on the stable one.
#![forbid(unsafe_code)]

mod arguments;
mod audio;
mod base;
mod codec;
mod context;
mod http;
mod image;
mod media;
mod mutate;
mod runner;
mod template;
mod tokenizer;

use kvant::Gguf;

pub use arguments::arguments;
pub use audio::audio;
pub use base::base;
pub use codec::codec;
pub use context::context;
pub use http::http;
pub use image::image;
pub use mutate::Mutator;
pub use runner::{Tried, run};
pub use template::template;
pub use tokenizer::tokenizer;

/// A fuzz target.
pub struct Target {
    /// Its name, as in `fuzz/fuzz_targets`.
    pub name: &'static str,
    /// Panics if the property is violated. Returns whether the input passed the first checks, and
    /// so is worth mutating further.
    pub check: fn(&[u8]) -> bool,
    /// Initial inputs.
    pub seeds: fn() -> Vec<Vec<u8>>,
}

/// Every target.
pub const TARGETS: [Target; 10] = [
    Target {
        name: "gguf",
        check: gguf,
        seeds: || vec![include_bytes!("../../seeds/gguf/sample.gguf").to_vec()],
    },
    Target { name: "codec", check: codec, seeds: codec::seeds },
    Target { name: "context", check: context, seeds: context::seeds },
    Target { name: "tokenizer", check: tokenizer, seeds: tokenizer::seeds },
    Target { name: "template", check: template, seeds: template::seeds },
    Target { name: "base", check: base, seeds: base::seeds },
    Target { name: "arguments", check: arguments, seeds: arguments::seeds },
    Target { name: "audio", check: audio, seeds: audio::seeds },
    Target { name: "image", check: image, seeds: image::seeds },
    Target { name: "http", check: http, seeds: http::seeds },
];

/// Tests the GGUF parser; [`kvant::gguf::oracle`] defines the properties.
///
/// # Panics
///
/// If a property is violated.
pub fn gguf(bytes: &[u8]) -> bool {
    kvant::gguf::oracle::check(bytes);
    Gguf::from_bytes(bytes.to_vec()).is_ok()
}
