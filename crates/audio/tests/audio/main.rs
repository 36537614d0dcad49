//! Audio encoders against `transformers`, and hostile files.

mod clips;
mod golden;
mod hostile;

use std::path::{Path, PathBuf};

use kvant_audio::AudioClip;
use kvant_gguf::Gguf;

const MODELS: [&str; 6] = ["voxtral", "qwen2audio", "qwen3asr", "gemma3n", "gemma4", "gemma4unified"];

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests")
}

fn clip_file(name: &str) -> Vec<u8> {
    std::fs::read(folder().join("clips").join(name)).unwrap()
}

fn encoder_file(model: &str) -> Gguf {
    Gguf::open(folder().join(format!("models/{model}/mmproj.gguf"))).unwrap()
}

/// Returns the first `n` samples of the repeated clip.
fn clip_of(n: usize) -> AudioClip {
    let clip = AudioClip::decode(&clip_file("clip.wav")).unwrap();
    let samples: Vec<f32> = clip.samples().iter().copied().cycle().take(n).collect();
    AudioClip::from_samples(&samples, 16_000).unwrap()
}
