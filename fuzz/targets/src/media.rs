//! What the targets of images and of audio share.

use std::sync::Arc;

use kvant::{DeviceChoice, EncodedMedia, Error, Gguf, Model, OpenOptions};

/// Opens a tiny model with its encoder.
pub(crate) fn open(text: &'static [u8], mmproj: &'static [u8]) -> Model {
    let [text, mmproj] = [text, mmproj].map(|file| Gguf::from_bytes(file).expect("a sound file"));
    let options = OpenOptions {
        device: DeviceChoice::Cpu.into(),
        n_threads: Some(1),
        mmproj: Some(Arc::new(mmproj)),
        ..OpenOptions::default()
    };
    Model::from_gguf(text, options).expect("a model with an encoder")
}

/// Returns whether a file was encoded. `check` panics on an impossible row count; an error must be
/// one line.
pub(crate) fn is_encoded(model: &Model, result: Result<EncodedMedia, Error>, check: fn(usize)) -> bool {
    match result {
        Ok(media) => {
            check(media.tokens().iter().filter(|&&token| token as usize >= model.n_vocab()).count());
            true
        }
        Err(error) => {
            let line = error.to_string();
            assert!(line.lines().count() == 1 && line.len() < 400, "{line}");
            false
        }
    }
}
