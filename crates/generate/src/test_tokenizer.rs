//! Tokenizer for tests.

use kvant_gguf::Gguf;
use kvant_text::tokenizer::Tokenizer;

/// Returns the tokenizer of the bundled model.
pub(crate) fn bundled_tokenizer() -> Tokenizer {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../engine/assets/pocket-q8_0.gguf");
    Tokenizer::from_gguf(&Gguf::open(file).unwrap()).unwrap()
}
