//! Spectrograms and rows against `transformers`: see `tools/reference/audio.py`.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use kvant_audio::{AudioClip, AudioEncoder};
use kvant_cpu::CpuDevice;

use super::{MODELS, clip_of, encoder_file, folder};

/// Maximum error of the spectrogram, whose range is 2 (Whisper): `transformers` transforms in f32,
/// whose errors reach 1e-4 of the weakest bins.
const MEL: f32 = 1e-4;
/// Maximum error of rows, for values with a deviation of up to 1: f32 sums in another order.
const ROWS: f32 = 2e-5;

/// The outputs of `transformers` for a clip.
struct Golden {
    mel: Vec<f32>,
    rows: Vec<f32>,
}

impl Golden {
    fn read(path: &Path) -> Self {
        let bytes = fs::read(path).unwrap();
        assert_eq!(&bytes[..4], b"KVPA");
        let words: Vec<u32> =
            bytes[4..].chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect();
        let [n_tokens, _, n_mels, n_frames, n_rows, n_hidden] =
            [0, 1, 2, 3, 4, 5].map(|at| words[at] as usize);
        let values: Vec<f32> = words[7 + n_tokens..].iter().map(|&bits| f32::from_bits(bits)).collect();
        let (mel, rest) = values.split_at(n_frames * n_mels);
        Self { mel: mel.to_vec(), rows: rest[..n_rows * n_hidden].to_vec() }
    }
}

/// Calls `check` with the encoder of each model, and each clip with its golden outputs.
fn for_each(check: impl Fn(&str, &AudioEncoder<CpuDevice>, &AudioClip, &Golden)) {
    let device = Arc::new(CpuDevice::from_env(None).unwrap());
    for name in MODELS {
        let encoder = AudioEncoder::load(&encoder_file(name), Arc::clone(&device)).unwrap();
        let mut n_clips = 0;
        for entry in fs::read_dir(folder().join("models").join(name)).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|end| end == "golden") {
                let n: usize = path.file_stem().unwrap().to_str().unwrap().parse().unwrap();
                check(&format!("{name}, {n} samples"), &encoder, &clip_of(n), &Golden::read(&path));
                n_clips += 1;
            }
        }
        assert!(n_clips >= 2, "{name}");
    }
}

/// Returns the largest difference; NaN of NaN.
fn furthest(got: &[f32], want: &[f32]) -> f32 {
    let differences = got.iter().zip(want).map(|(a, b)| (a - b).abs());
    differences.fold(0.0, |max, off| if off <= max { max } else { off })
}

#[test]
fn spectrograms_equal_those_of_transformers() {
    for_each(|name, encoder, clip, golden| {
        let mel = encoder.config().features(clip).unwrap();
        let off = furthest(&mel, &golden.mel);
        eprintln!("{name}: values are off by {off} at most");
        assert!(mel.len() == golden.mel.len() && off <= MEL, "{name}: {off}");
    });
}

#[test]
fn rows_equal_those_of_transformers() {
    for_each(|name, encoder, clip, golden| {
        let rows = encoder.rows(clip, &|| true).unwrap();
        let off = furthest(&rows, &golden.rows);
        eprintln!("{name}: rows are off by {off} at most");
        assert!(rows.len() == golden.rows.len() && off <= ROWS, "{name}: {off}");
    });
}
