//! Encoder files with invalid numbers or missing tensors, and damaged audio files: a one-line error
//! that names the fault, never a crash.

use std::cell::Cell;
use std::sync::Arc;

use kvant_audio::{AudioClip, AudioEncoder, AudioError, Config};
use kvant_cpu::CpuDevice;
use kvant_gguf::{Gguf, GgufError, GgufWriter, TensorSink, Value};

use super::{MODELS, clip_file, clip_of, encoder_file};

/// Rewrites the file with changed keys, and without one tensor.
fn rewritten(gguf: &Gguf, set: impl FnOnce(&mut GgufWriter), without: &str) -> Gguf {
    let mut writer = GgufWriter::with_meta(gguf.meta()).unwrap();
    set(&mut writer);
    let left = || gguf.tensors().iter().filter(|info| info.name != without);
    left().for_each(|info| writer.add_tensor(&info.name, &info.shape, info.dtype).unwrap());
    let mut bytes = Vec::new();
    let fill =
        |sink: &mut TensorSink<'_>| left().try_for_each(|info| sink.bytes(&info.name, &gguf.data(info)));
    writer.write_to::<GgufError>(&mut bytes, fill).unwrap();
    Gguf::from_bytes(bytes).unwrap()
}

fn encode(gguf: &Gguf, device: &Arc<CpuDevice>, clip: &AudioClip) -> Result<Vec<f32>, AudioError> {
    AudioEncoder::load(gguf, Arc::clone(device))?.rows(clip, &|| true)
}

fn is_a_line(error: &AudioError) -> bool {
    let line = error.to_string();
    !line.is_empty() && line.lines().count() == 1 && line.len() < 400
}

#[test]
fn numbers_that_make_no_sense_are_refused_or_harmless() {
    let (device, clip) = (Arc::new(CpuDevice::from_env(Some(1)).unwrap()), clip_of(5_003));
    for name in MODELS {
        let gguf = encoder_file(name);
        let numbers = gguf.meta().iter().filter_map(|(key, value)| match value {
            Value::U32(n) if key.starts_with("clip.") => Some((key, n)),
            _ => None,
        });
        for (key, n) in numbers {
            for value in [0, 1, n / 2, n.saturating_sub(1), n + 1, 2 * n + 1, 3 * n, u32::MAX] {
                let changed = rewritten(&gguf, |writer| writer.set(key, value).unwrap(), "");
                if let Err(error) = encode(&changed, &device, &clip) {
                    assert!(is_a_line(&error), "{name} with {key} = {value}: {error}");
                }
            }
        }
        if name.starts_with("gemma") {
            continue; // whose files have no true epsilon
        }
        let eps = "clip.audio.attention.layer_norm_epsilon";
        for value in [0.0, -1.0, f32::NAN, f32::INFINITY] {
            let changed = rewritten(&gguf, |writer| writer.set(eps, value).unwrap(), "");
            let error = encode(&changed, &device, &clip).unwrap_err();
            assert!(error.to_string().starts_with(eps), "{error}");
        }
    }
}

#[test]
fn a_missing_encoder_tensor_is_reported_or_optional() {
    let (device, clip) = (Arc::new(CpuDevice::from_env(Some(1)).unwrap()), clip_of(5_003));
    for name in MODELS {
        let gguf = encoder_file(name);
        for info in gguf.tensors() {
            let changed = rewritten(&gguf, |_| (), &info.name);
            let is_bias = info.name.ends_with(".bias") && !info.name.contains("ln");
            let may_lack = is_bias || info.name.ends_with("_min") || info.name.ends_with("_max");
            match encode(&changed, &device, &clip) {
                Ok(_) => assert!(may_lack, "{name} without {}", info.name),
                Err(error) => {
                    assert!(is_a_line(&error) && !may_lack, "{name} without {}: {error}", info.name)
                }
            }
        }
    }
}

#[test]
fn other_encoders_are_refused_and_known_ones_named() {
    let gguf = encoder_file("voxtral");
    let unknown = rewritten(&gguf, |writer| writer.set("clip.projector_type", "glma").unwrap(), "");
    let error = Config::from_gguf(&unknown).unwrap_err().to_string();
    let known = "voxtral, qwen2a, qwen3a, gemma3na, gemma4a, gemma4ua";
    assert_eq!(error, format!("clip.projector_type: expected one of {known}, for audio, got glma"));
    let silent = rewritten(&gguf, |writer| writer.set("clip.has_audio_encoder", false).unwrap(), "");
    let error = Config::from_gguf(&silent).unwrap_err().to_string();
    assert!(error.contains("an encoder of another modality than audio"), "{error}");
}

#[test]
fn clips_of_any_length_are_encoded_or_refused() {
    let device = Arc::new(CpuDevice::from_env(Some(1)).unwrap());
    for name in MODELS {
        let encoder = AudioEncoder::load(&encoder_file(name), Arc::clone(&device)).unwrap();
        let width = encoder.config().n_embd_text;
        for n in [
            1, 159, 160, 161, 200, 201, 320, 321, 401, 512, 513, 7_999, 8_001, 15_359, 15_361, 16_000,
            16_001, 40_000,
        ] {
            let clip = clip_of(n);
            match encoder.rows(&clip, &|| true) {
                Ok(rows) => {
                    assert!(rows.len() >= width, "{name}, {n} samples");
                    assert_eq!(rows.len(), encoder.config().n_rows(&clip) * width, "{name}, {n} samples");
                    assert!(rows.iter().all(|x| x.is_finite()), "{name}, {n} samples");
                }
                Err(error) => {
                    let is_outside = match name {
                        "qwen2audio" => !(321..=16_000).contains(&n),
                        "gemma3n" => n < 513,
                        "gemma4" => n < 161,
                        _ => false,
                    };
                    assert!(is_a_line(&error) && is_outside, "{name}, {n} samples: {error}");
                }
            }
        }
        let cancelled = encoder.rows(&clip_of(8_000), &|| false).unwrap_err();
        assert!(matches!(cancelled, AudioError::Cancelled));
        let silence = AudioClip::from_samples(&[0.0; 4_000], 16_000).unwrap();
        assert!(encoder.rows(&silence, &|| true).unwrap().iter().all(|x| x.is_finite()));
    }
}

/// Gemma's clips are encoded in windows of 30 s; a rest too short for a frame is left out.
#[test]
fn long_clips_are_encoded_in_windows() {
    let device = Arc::new(CpuDevice::from_env(None).unwrap());
    for (name, first, rest, n_rows) in [("gemma4", 750, 640, 1), ("gemma3n", 188, 640, 188)] {
        let encoder = AudioEncoder::load(&encoder_file(name), Arc::clone(&device)).unwrap();
        let width = encoder.config().n_embd_text;
        let rows = |n: usize| {
            let (clip, n_windows) = (clip_of(n), Cell::new(0));
            let rows = encoder.rows(&clip, &|| n_windows.replace(n_windows.get() + 1) < 9).unwrap();
            assert_eq!(rows.len(), encoder.config().n_rows(&clip) * width, "{name}, {n} samples");
            (rows, n_windows.get())
        };
        let n_end = usize::from(name == "gemma3n");
        let (one, n_windows) = rows(480_000);
        assert_eq!((one.len() / width, n_windows), (first + n_end, 1), "{name}");
        assert!(rows(480_100) == (one.clone(), 1), "{name}");
        let (two, n_windows) = rows(480_000 + rest);
        assert_eq!((two.len() / width, n_windows), (first + n_rows + n_end, 2), "{name}");
        assert!(two.starts_with(&one[..first * width]), "{name}");
    }
}

#[test]
fn senseless_limits_are_refused_with_a_line() {
    let device = Arc::new(CpuDevice::from_env(Some(1)).unwrap());
    let gguf = encoder_file("gemma4");
    let limit = |value: f32| {
        let mut writer = GgufWriter::with_meta(gguf.meta()).unwrap();
        let infos = || gguf.tensors().iter();
        infos().for_each(|info| writer.add_tensor(&info.name, &info.shape, info.dtype).unwrap());
        let mut bytes = Vec::new();
        let fill = |sink: &mut TensorSink<'_>| {
            infos().try_for_each(|info| match &info.name[..] {
                "a.blk.1.attn_q.input_max" => sink.bytes(&info.name, &value.to_le_bytes()),
                name => sink.bytes(name, &gguf.data(info)),
            })
        };
        writer.write_to::<GgufError>(&mut bytes, fill).unwrap();
        encode(&Gguf::from_bytes(bytes).unwrap(), &device, &clip_of(5_003))
    };
    assert!(limit(f32::INFINITY).is_ok());
    for value in [f32::NAN, f32::NEG_INFINITY, -100.0] {
        let error = limit(value).unwrap_err();
        assert!(is_a_line(&error) && error.to_string().starts_with("a.blk.1.attn_q.input_max"), "{error}");
    }
}

/// Returns a WAV file of 32-bit floats.
fn wav(rate: u32, n_channels: u16, samples: &[f32]) -> Vec<u8> {
    let n_bytes = 4 * samples.len() as u32;
    let mut file = b"RIFF".to_vec();
    file.extend((36 + n_bytes).to_le_bytes());
    file.extend(b"WAVEfmt \x10\0\0\0\x03\0");
    file.extend(n_channels.to_le_bytes());
    file.extend(rate.to_le_bytes());
    file.extend(rate.wrapping_mul(4 * u32::from(n_channels)).to_le_bytes());
    file.extend(n_channels.wrapping_mul(4).to_le_bytes());
    file.extend(b"\x20\0data");
    file.extend(n_bytes.to_le_bytes());
    samples.iter().for_each(|sample| file.extend(sample.to_le_bytes()));
    file
}

#[test]
fn senseless_audio_is_refused_with_a_line() {
    let tone: Vec<f32> = (0..4_000).map(|i| (i as f32 / 9.0).sin()).collect();
    assert_eq!(AudioClip::decode(&wav(16_000, 1, &tone)).unwrap().samples(), tone);
    assert_eq!(AudioClip::decode(&wav(8_000, 2, &tone)).unwrap().samples().len(), 4_000);
    let mut spoiled = tone.clone();
    let mut with = |value: f32| {
        spoiled[1_234] = value;
        wav(16_000, 1, &spoiled)
    };
    let cases = [
        (with(f32::NAN), "samples of the audio: expected finite ones up to 32768, got NaN"),
        (with(f32::INFINITY), "samples of the audio"),
        (with(1e30), "samples of the audio"),
        (wav(16_000, 1, &[]), "length of the audio: expected 1 to"),
        (wav(0, 1, &tone), ""),
        (wav(1, 1, &tone), "rate of the audio: expected 4000 to 384000 Hz, got 1 Hz"),
        (wav(u32::MAX, 1, &tone), "rate of the audio"),
        (wav(16_000, 0, &tone), ""),
        (wav(16_000, u16::MAX, &tone), ""),
        (b"no audio".to_vec(), "not readable audio (WAV, MP3, FLAC or Ogg Vorbis)"),
        (Vec::new(), "not readable audio"),
    ];
    for (file, line) in cases {
        let error = AudioClip::decode(&file).unwrap_err();
        assert!(is_a_line(&error) && error.to_string().starts_with(line), "{error}, expected {line}");
    }
}

#[test]
fn truncated_and_damaged_files_are_decoded_or_refused() {
    for name in ["clip.wav", "clip.flac", "stereo.mp3", "stereo.ogg"] {
        let file = clip_file(name);
        let check = |bytes: &[u8]| match AudioClip::decode(bytes) {
            Ok(clip) => assert!(clip.samples().iter().all(|x| x.is_finite()) && clip.seconds() < 60.0),
            Err(error) => assert!(is_a_line(&error), "{name}: {error}"),
        };
        for n in (0..120).chain((120..file.len()).step_by(997)) {
            check(&file[..n]);
        }
        // Every byte of the headers, and some of the data.
        for at in (0..100).chain((100..file.len()).step_by(997)) {
            for value in [0, 0xff, file[at] ^ 0x10] {
                let mut damaged = file.clone();
                damaged[at] = value;
                check(&damaged);
            }
        }
    }
}
