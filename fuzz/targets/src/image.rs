//! Target: arbitrary bytes as an image file.

use std::sync::{Arc, LazyLock};

use kvant::{DeviceChoice, Gguf, Model, OpenOptions};

/// A tiny model that splits every image in tiles.
static MODEL: LazyLock<Model> = LazyLock::new(|| {
    let text: &'static [u8] = include_bytes!("../../../crates/vision/tests/models/smolvlm/text.gguf");
    let mmproj: &'static [u8] = include_bytes!("../../../crates/vision/tests/models/smolvlm/mmproj.gguf");
    let [text, mmproj] = [text, mmproj].map(|file| Gguf::from_bytes(file).expect("a sound file"));
    let options = OpenOptions {
        device: DeviceChoice::Cpu.into(),
        n_threads: Some(1),
        mmproj: Some(Arc::new(mmproj)),
        ..OpenOptions::default()
    };
    Model::from_gguf(text, options).expect("a model that sees")
});

/// Returns whether the bytes are accepted as an image. They must be rejected in one line, or be
/// encoded to tokens.
///
/// # Panics
///
/// If the property is violated.
pub fn image(bytes: &[u8]) -> bool {
    match MODEL.encode_image(bytes) {
        Ok(image) => {
            let n_rows = image.tokens().iter().filter(|&&token| token as usize >= MODEL.n_vocab()).count();
            assert!(n_rows > 0 && n_rows.is_multiple_of(4), "{n_rows} rows of tiles of four");
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
    let files: [&[u8]; 5] = [
        include_bytes!("../../seeds/image/small.png"),
        include_bytes!("../../seeds/image/small.jpg"),
        include_bytes!("../../seeds/image/small.webp"),
        include_bytes!("../../seeds/image/small.gif"),
        include_bytes!("../../seeds/image/small.bmp"),
    ];
    files.map(<[u8]>::to_vec).to_vec()
}
