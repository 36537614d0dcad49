//! Vision encoder files with invalid numbers or missing tensors: a one-line error that names the
//! fault, never a crash.

use std::path::Path;
use std::sync::Arc;

use kvant_cpu::CpuDevice;
use kvant_gguf::{Gguf, GgufError, GgufWriter, TensorSink, Value};
use kvant_vision::{Image, ImageLayout, VisionEncoder, VisionError};

const MODELS: [&str; 8] =
    ["smolvlm", "internvl", "pixtral", "mistral3", "lfm2vl", "qwen25vl", "qwen3vl", "paddleocr"];

fn folder() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests"))
}

fn named(name: &str) -> Gguf {
    Gguf::open(folder().join(format!("models/{name}/mmproj.gguf"))).unwrap()
}

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

/// Encodes an image; returns the number of its rows.
fn encode(gguf: &Gguf, device: &Arc<CpuDevice>, image: &Image) -> Result<usize, VisionError> {
    let encoder = VisionEncoder::load(gguf, Arc::clone(device))?;
    let layout = ImageLayout::new(encoder.config(), image)?;
    // The first tile suffices: faulty numbers can produce many tiles.
    encoder.rows(&layout.tiles[0])?;
    Ok(layout.n_rows())
}

fn is_a_line(error: &VisionError) -> bool {
    let line = error.to_string();
    !line.is_empty() && line.lines().count() == 1 && line.len() < 400
}

fn wide() -> Image {
    Image::decode(&std::fs::read(folder().join("images/wide.png")).unwrap()).unwrap()
}

#[test]
fn numbers_that_make_no_sense_are_refused_or_harmless() {
    let (device, image) = (Arc::new(CpuDevice::from_env(Some(1)).unwrap()), wide());
    for name in MODELS {
        let gguf = named(name);
        let numbers = gguf.meta().iter().filter_map(|(key, value)| match value {
            Value::U32(n) if key.starts_with("clip.") => Some((key, n)),
            _ => None,
        });
        for (key, n) in numbers {
            for value in [0, 1, n / 2, n.saturating_sub(1), n + 1, 2 * n + 1, 3 * n, u32::MAX] {
                let changed = rewritten(&gguf, |writer| writer.set(key, value).unwrap(), "");
                if let Err(error) = encode(&changed, &device, &image) {
                    assert!(is_a_line(&error), "{name} with {key} = {value}: {error}");
                }
            }
        }
    }
}

#[test]
fn a_missing_encoder_tensor_is_reported_or_optional() {
    let (device, image) = (Arc::new(CpuDevice::from_env(Some(1)).unwrap()), wide());
    for name in MODELS {
        let gguf = named(name);
        for info in gguf.tensors() {
            let changed = rewritten(&gguf, |_| (), &info.name);
            // Biases, optional norms and scales; never a matrix of a product.
            let may_lack = [
                ".bias",
                "ls1.weight",
                "ls2.weight",
                "_ln.weight",
                "input_norm.weight",
                "class_embd",
                "img_break",
                "ffn_gate.weight",
            ];
            match encode(&changed, &device, &image) {
                Ok(_) => assert!(
                    may_lack.iter().any(|end| info.name.ends_with(end)),
                    "{name} without {}",
                    info.name
                ),
                Err(error) => assert!(is_a_line(&error), "{name} without {}: {error}", info.name),
            }
        }
    }
}

#[test]
fn images_of_any_shape_are_encoded_or_refused() {
    let device = Arc::new(CpuDevice::from_env(Some(1)).unwrap());
    for name in MODELS {
        let encoder = VisionEncoder::load(&named(name), Arc::clone(&device)).unwrap();
        for [width, height] in [[1, 1], [1, 2000], [2000, 1], [31, 33], [640, 480], [3, 700]] {
            let rgb = (0..3 * width * height).map(|i| (i * 7 % 251) as u8).collect();
            let image = Image::from_rgb(width as u32, height as u32, rgb).unwrap();
            match ImageLayout::new(encoder.config(), &image) {
                Ok(layout) => {
                    assert!(layout.n_rows() > 0, "{name}, {width} x {height}");
                    let rows = encoder.rows(&layout.tiles[layout.tiles.len() - 1]).unwrap();
                    assert!(rows.iter().flatten().all(|x| x.is_finite()));
                }
                Err(error) => assert!(is_a_line(&error) && width.min(height) < 20, "{name}: {error}"),
            }
        }
    }
}
