//! The bundled model, for a first run and for tests.

/// A GGUF file.
pub(crate) static POCKET: &[u8] = include_bytes!("../assets/pocket-q8_0.gguf");
