//! What must hold for any bytes. cargo-fuzz drives these functions where a nightly compiler is; tests, for seconds, and
//! `kvant-fuzz`, for as long as is asked, need none.
#![forbid(unsafe_code)]

mod arguments;
mod base;
mod codec;
mod context;
mod http;
mod mutate;
mod picture;
mod runner;
mod template;
mod tokenizer;

use kvant::Gguf;

pub use arguments::arguments;
pub use base::base;
pub use codec::codec;
pub use context::context;
pub use http::http;
pub use mutate::Mutator;
pub use picture::picture;
pub use runner::{Tried, run};
pub use template::template;
pub use tokenizer::tokenizer;

/// A function to be fed with anything.
pub struct Target {
    /// Its name, that of its file in `fuzz/fuzz_targets` too.
    pub name: &'static str,
    /// Panics if what must hold does not. Whether the input got past the first checks, and so is worth changing further.
    pub check: fn(&[u8]) -> bool,
    /// Inputs to begin with.
    pub seeds: fn() -> Vec<Vec<u8>>,
}

/// Every target.
pub const TARGETS: [Target; 9] = [
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
    Target { name: "picture", check: picture, seeds: picture::seeds },
    Target { name: "http", check: http, seeds: http::seeds },
];

/// The GGUF parser; what must hold is [`kvant::gguf::oracle`]'s to say.
///
/// # Panics
/// If it does not.
pub fn gguf(bytes: &[u8]) -> bool {
    kvant::gguf::oracle::check(bytes);
    Gguf::from_bytes(bytes.to_vec()).is_ok()
}
