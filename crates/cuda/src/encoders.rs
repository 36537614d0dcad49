//! Tiny encoders of texts, images and audio on the emulator, compared with the CPU.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use kvant_audio::{AudioClip, AudioEncoder};
use kvant_backend::Backend;
use kvant_cpu::{CpuDevice, Isa};
use kvant_gguf::Gguf;
use kvant_model::encoder::{Encoder, EncoderConfig, EncoderText};
use kvant_vision::{Config, Image, ImageLayout, VisionEncoder};

use crate::emulator;

fn cpu() -> CpuDevice {
    CpuDevice::new(Isa::Scalar, 1).unwrap()
}

fn tests_of(package: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(package).join("tests")
}

/// Checks values that follow `n_layers` layers. Every operand of a product is rounded to 2^-11: in
/// a layer those of six products and of attention, on values of the size of the largest.
fn check(name: &str, got: &[f32], want: &[f32], n_layers: usize) {
    assert_eq!(got.len(), want.len(), "{name}");
    let largest = want.iter().fold(0f32, |largest, x| largest.max(x.abs()));
    let tol = 8.0 * n_layers as f32 * largest / 2048.0;
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert!((got - want).abs() <= tol, "{name}, value {i}: {got} for {want} within {tol}");
    }
}

fn hidden_states<B: Backend>(file: &Gguf, device: B) -> Vec<f32> {
    let encoder = Encoder::load(file, None, Arc::new(device)).unwrap();
    let tokens: Vec<u32> = (0..70).map(|i| i * 29 % 60).collect();
    let texts = [(20, 7), (1, 1), (70, 70)];
    let texts = texts.map(|(n, n_first)| EncoderText { tokens: &tokens[..n], n_first });
    encoder.hidden_states(&texts).unwrap()
}

/// LayerNorm and RMS norms, before and behind layers; learned, relative, linear and rotary
/// positions; local layers, grouped heads, gates and experts.
#[test]
fn hidden_states_of_texts_match_the_cpu() {
    for name in ["bert", "mpnet", "gemma-embedding", "modern-bert", "jina-bert-v2", "nomicmoe"] {
        let Some(device) = emulator::device(80) else { return };
        let folder = tests_of("engine").join("encoders").join(name);
        let file = match folder.join("model.gguf") {
            file if file.exists() => Gguf::open(file).unwrap(),
            _ => kvant_hf::open(folder).unwrap(),
        };
        let n_layers = EncoderConfig::from_gguf(&file).unwrap().reaches.len();
        check(name, &hidden_states(&file, device), &hidden_states(&file, cpu()), n_layers);
    }
}

fn rows_of_image<B: Backend>(file: &Gguf, device: B) -> Vec<f32> {
    let encoder = VisionEncoder::load(file, Arc::new(device)).unwrap();
    let image = Image::decode(&std::fs::read(tests_of("vision").join("images/tall.png")).unwrap()).unwrap();
    let layout = ImageLayout::new(encoder.config(), &image).unwrap();
    encoder.rows(&layout.tiles[0]).unwrap().concat()
}

/// A class token; windows, RMS norms, RoPE and gates; and rows for several layers.
#[test]
fn rows_of_images_match_the_cpu() {
    for name in ["internvl", "qwen25vl", "qwen3vl"] {
        let Some(device) = emulator::device(80) else { return };
        let file = Gguf::open(tests_of("vision").join("models").join(name).join("mmproj.gguf")).unwrap();
        // And the projector.
        let n_layers = Config::from_gguf(&file).unwrap().n_layers + 1;
        check(name, &rows_of_image(&file, device), &rows_of_image(&file, cpu()), n_layers);
    }
}

fn rows_of_clip<B: Backend>(file: &Gguf, device: B) -> Vec<f32> {
    let encoder = AudioEncoder::load(file, Arc::new(device)).unwrap();
    let clip = AudioClip::decode(&std::fs::read(tests_of("audio").join("clips/clip.wav")).unwrap()).unwrap();
    encoder.rows(&clip, &|| true).unwrap()
}

/// Transformers behind convolutions of one and of two dims, and a conformer.
#[test]
fn rows_of_audio_match_the_cpu() {
    for name in ["qwen2audio", "qwen3asr", "gemma4"] {
        let Some(device) = emulator::device(80) else { return };
        let file = Gguf::open(tests_of("audio").join("models").join(name).join("mmproj.gguf")).unwrap();
        // Convolutions and the projector beside the layers.
        let n_layers = kvant_audio::Config::from_gguf(&file).unwrap().n_layers + 2;
        check(name, &rows_of_clip(&file, device), &rows_of_clip(&file, cpu()), n_layers);
    }
}
