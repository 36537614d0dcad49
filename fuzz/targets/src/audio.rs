//! Target: arbitrary bytes as an audio file.

use std::sync::{Arc, LazyLock};

use kvant::{DeviceChoice, Gguf, Model, OpenOptions};

/// A tiny model of audio of at most one second.
static MODEL: LazyLock<Model> = LazyLock::new(|| {
    let text: &'static [u8] = include_bytes!("../../../crates/audio/tests/models/qwen2audio/text.gguf");
    let mmproj: &'static [u8] = include_bytes!("../../../crates/audio/tests/models/qwen2audio/mmproj.gguf");
    let [text, mmproj] = [text, mmproj].map(|file| Gguf::from_bytes(file).expect("a sound file"));
    let options = OpenOptions {
        device: DeviceChoice::Cpu.into(),
        n_threads: Some(1),
        mmproj: Some(Arc::new(mmproj)),
        ..OpenOptions::default()
    };
    Model::from_gguf(text, options).expect("a model with an audio encoder")
});

/// Returns whether the bytes are accepted as audio. They must be rejected in one line, or be
/// encoded to tokens.
///
/// # Panics
///
/// If the property is violated.
pub fn audio(bytes: &[u8]) -> bool {
    match MODEL.encode_audio(bytes) {
        Ok(clip) => {
            let n_rows = clip.tokens().iter().filter(|&&token| token as usize >= MODEL.n_vocab()).count();
            assert!((1..=25).contains(&n_rows), "{n_rows} rows of a second");
            true
        }
        Err(error) => {
            let line = error.to_string();
            assert!(line.lines().count() == 1 && line.len() < 400, "{line}");
            false
        }
    }
}

/// Returns one file of each format.
pub(crate) fn seeds() -> Vec<Vec<u8>> {
    let files: [&[u8]; 4] = [
        include_bytes!("../../../crates/audio/tests/clips/clip.wav"),
        include_bytes!("../../../crates/audio/tests/clips/clip.flac"),
        include_bytes!("../../../crates/audio/tests/clips/stereo.mp3"),
        include_bytes!("../../../crates/audio/tests/clips/stereo.ogg"),
    ];
    files.map(<[u8]>::to_vec).to_vec()
}
