//! Target: arbitrary bytes as an image file.

use std::sync::LazyLock;

use kvant::Model;

use crate::media::{is_encoded, open};

/// A tiny model that splits every image in tiles.
static MODEL: LazyLock<Model> = LazyLock::new(|| {
    open(
        include_bytes!("../../../crates/vision/tests/models/smolvlm/text.gguf"),
        include_bytes!("../../../crates/vision/tests/models/smolvlm/mmproj.gguf"),
    )
});

/// Returns whether the bytes are accepted as an image. They must be rejected in one line, or be
/// encoded to tokens.
///
/// # Panics
///
/// If the property is violated.
pub fn image(bytes: &[u8]) -> bool {
    is_encoded(&MODEL, MODEL.encode_image(bytes), |n_rows| {
        assert!(n_rows > 0 && n_rows.is_multiple_of(4), "{n_rows} rows of tiles of four");
    })
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
