//! A model in a type of 4 bits: written, read, and refused where a scale is no number.

use std::sync::atomic::{AtomicUsize, Ordering};

use kvant::{DType, Gguf, Model, OpenOptions, SessionOptions, quantize};

const BUNDLED: &[u8] = include_bytes!("../assets/pocket-q8_0.gguf");

/// The bytes of the bundled model with its matrices in this type.
fn written(dtype: DType) -> Vec<u8> {
    // Tests of one process run at once.
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let (process, n) = (std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let path = std::env::temp_dir().join(format!("kvant-weight-types-{process}-{n}.gguf"));
    let done = quantize::quantize(&Gguf::from_bytes(BUNDLED).unwrap(), &path, dtype, &mut |_| ()).unwrap();
    assert_eq!(done.types[0].0, dtype);
    assert!(done.types[0].1 > 0, "{dtype}: {:?}", done.types);
    let bytes = std::fs::read(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    bytes
}

fn open(bytes: Vec<u8>) -> Result<Model, String> {
    let options = OpenOptions { n_threads: Some(1), ..Default::default() };
    Model::from_gguf(Gguf::from_bytes(bytes).unwrap(), options).map_err(|error| error.to_string())
}

/// Probabilities of what comes after a few tokens.
fn probabilities(model: &Model) -> Vec<f64> {
    let mut session = model.session(SessionOptions::default()).unwrap();
    session.feed(&[1, 300, 17, 42, 260, 9, 511, 77], &mut |_| true).unwrap();
    let logits = session.logits().unwrap();
    let most = logits.iter().fold(f32::MIN, |most, &logit| most.max(logit));
    let powers: Vec<f64> = logits.iter().map(|&logit| f64::from(logit - most).exp()).collect();
    let sum: f64 = powers.iter().sum();
    powers.into_iter().map(|power| power / sum).collect()
}

/// As far from q8_0 as q4_0 is, or half as far again: mxfp4 has scales that are powers of two alone.
#[test]
fn a_model_of_four_bits_says_nearly_what_it_said() {
    let want = probabilities(&open(BUNDLED.to_vec()).unwrap());
    let divergence = |dtype| {
        let got = probabilities(&open(written(dtype)).unwrap());
        want.iter().zip(&got).map(|(p, q)| p * (p / q).ln()).sum::<f64>()
    };
    let usual = divergence(DType::Q4_0);
    for dtype in [DType::IQ4NL, DType::IQ4XS, DType::MXFP4, DType::NVFP4] {
        let far = divergence(dtype);
        assert!(far <= 1.5 * usual, "{dtype}: {far}, q4_0 {usual}");
    }
}

#[test]
fn a_scale_that_is_no_number_is_refused_with_its_tensor() {
    let tensor = "blk.1.ffn_up.weight";
    let bad = [
        (DType::IQ4NL, &[0x00, 0x7c][..]),
        (DType::IQ4XS, &[0x01, 0xfe]),
        (DType::MXFP4, &[0xff]),
        (DType::NVFP4, &[0x38, 0x38, 0x7f]),
    ];
    for (dtype, scale) in bad {
        let mut bytes = written(dtype);
        let (row_bytes, offset) = {
            let gguf = Gguf::from_bytes(bytes.clone()).unwrap();
            let info = gguf.tensor(tensor).unwrap().info;
            assert_eq!(info.dtype, dtype);
            (info.n_bytes / info.rows(), info.offset as usize)
        };
        bytes[offset + 5 * row_bytes..][..scale.len()].copy_from_slice(scale);
        let error = open(bytes).unwrap_err();
        assert_eq!(error, format!("tensor '{tensor}': row 5 holds NaN or an infinity"), "{dtype}");
    }
}
