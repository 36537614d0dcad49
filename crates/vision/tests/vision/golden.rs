//! Vision encoders and preprocessing against `transformers`: see `tools/reference/images.py`.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use kvant_cpu::CpuDevice;
use kvant_gguf::Gguf;
use kvant_vision::{Image, ImageLayout, ImageToken, VisionEncoder};

/// Maximum error of rows, for values with a deviation of up to 1: f32 sums in another order.
const ROWS: f32 = 2e-5;

const MODELS: [&str; 8] =
    ["smolvlm", "internvl", "pixtral", "mistral3", "lfm2vl", "qwen25vl", "qwen3vl", "paddleocr"];

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests")
}

/// The outputs of `transformers` for an image.
struct Golden {
    n_hidden: usize,
    /// Sides and colours `[3, height, width]`.
    tiles: Vec<([usize; 2], Vec<f32>)>,
    rows: Vec<f32>,
}

impl Golden {
    fn read(path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap();
        assert_eq!(&bytes[..4], b"KVPI");
        let mut words = bytes[4..].chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap()));
        let mut number = || words.next().unwrap() as usize;
        let [n_tokens, _, n_tiles, n_rows, n_hidden] = [(); 5].map(|()| number());
        (0..1 + n_tokens).for_each(|_| _ = number());
        let mut tiles = Vec::new();
        for _ in 0..n_tiles {
            let [height, width] = [(); 2].map(|()| number());
            let values = (0..3 * height * width).map(|_| f32::from_bits(number() as u32)).collect();
            tiles.push(([width, height], values));
        }
        let rows = (0..n_rows * n_hidden).map(|_| f32::from_bits(number() as u32)).collect();
        Self { n_hidden, tiles, rows }
    }
}

/// Calls `check` with the encoder of each model, and each image with its golden outputs.
fn for_each(check: impl Fn(&str, &VisionEncoder<CpuDevice>, &Image, &Golden)) {
    let device = Arc::new(CpuDevice::from_env(None).unwrap());
    for name in MODELS {
        let model = folder().join("models").join(name);
        let gguf = Gguf::open(model.join("mmproj.gguf")).unwrap();
        let encoder = VisionEncoder::load(&gguf, Arc::clone(&device)).unwrap();
        for image in ["wide", "tall"] {
            let file = std::fs::read(folder().join(format!("images/{image}.png"))).unwrap();
            let golden = Golden::read(&model.join(format!("{image}.golden")));
            check(&format!("{name}, {image}"), &encoder, &Image::decode(&file).unwrap(), &golden);
        }
    }
}

#[test]
fn preprocessing_equals_that_of_transformers() {
    for_each(|name, encoder, image, golden| {
        let (config, layout) = (encoder.config(), ImageLayout::new(encoder.config(), image).unwrap());
        let sides: Vec<_> = layout.tiles.iter().map(|tile| [tile.width(), tile.height()]).collect();
        assert_eq!(sides, golden.tiles.iter().map(|(sides, _)| *sides).collect::<Vec<_>>(), "{name}");
        for (tile, (sides, values)) in layout.tiles.iter().zip(&golden.tiles) {
            let want: Vec<u8> = (0..tile.rgb().len())
                .map(|i| colour(config, values[i % 3 * sides[0] * sides[1] + i / 3], i % 3))
                .collect();
            assert!(tile.rgb() == want, "{name}: other colours");
        }
        assert_eq!(layout.n_rows() * golden.n_hidden, golden.rows.len(), "{name}");
    });
}

/// Returns the byte of a normalized colour value.
fn colour(config: &kvant_vision::Config, value: f32, colour: usize) -> u8 {
    ((value * config.std[colour] + config.mean[colour]) * 255.0).round() as u8
}

#[test]
fn encoder_rows_equal_those_of_transformers() {
    for_each(|name, encoder, image, golden| {
        let config = encoder.config();
        let mut rows = Vec::new();
        for (sides @ [width, height], values) in &golden.tiles {
            let rgb = (0..3 * width * height)
                .map(|i| colour(config, values[i % 3 * sides[0] * sides[1] + i / 3], i % 3))
                .collect();
            let tile = Image::from_rgb(*width as u32, *height as u32, rgb).unwrap();
            rows.push(encoder.rows(&tile).unwrap());
        }
        let layout = ImageLayout::new(config, image).unwrap();
        let width = config.n_embd_text;
        let mut got: Vec<f32> = Vec::new();
        for piece in &layout.pieces {
            let ImageToken::Rows { tile, rows: of_tile } = piece else { continue };
            for row in of_tile.clone() {
                // DeepStack rows come behind.
                rows[*tile].iter().for_each(|part| got.extend(&part[row * width..(row + 1) * width]));
            }
        }
        let furthest = got.iter().zip(&golden.rows).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        eprintln!("{name}: rows are off by {furthest} at most");
        assert!(got.len() == golden.rows.len() && furthest < ROWS, "{name}: {furthest}");
        assert!(got.iter().all(|x| x.is_finite()));
    });
}
