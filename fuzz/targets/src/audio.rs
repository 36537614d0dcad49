//! Target: arbitrary bytes as an audio file.

use std::sync::LazyLock;

use kvant::Model;

use crate::media::{is_encoded, open};

/// A tiny model of audio of at most one second.
static MODEL: LazyLock<Model> = LazyLock::new(|| {
    open(
        include_bytes!("../../../crates/audio/tests/models/qwen2audio/text.gguf"),
        include_bytes!("../../../crates/audio/tests/models/qwen2audio/mmproj.gguf"),
    )
});

/// Returns whether the bytes are accepted as audio. They must be rejected in one line, or be
/// encoded to tokens.
///
/// # Panics
///
/// If the property is violated.
pub fn audio(bytes: &[u8]) -> bool {
    is_encoded(&MODEL, MODEL.encode_audio(bytes), |n_rows| {
        assert!((1..=25).contains(&n_rows), "{n_rows} rows of a second");
    })
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
