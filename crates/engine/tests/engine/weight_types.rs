//! Models in 4-bit types: written, read, and rejected where a scale is not a number.

use std::sync::atomic::{AtomicUsize, Ordering};

use kvant::gguf::{GgufError, GgufWriter, LoadOnlyType, TensorSink};
use kvant::{DType, DeviceChoice, Gguf, Model, OpenOptions, Session, SessionOptions};
use kvant_codec::random::Random;
use kvant_quantize::{ImportanceMatrix, InputSums, QuantizeOptions, quantize};

const BUNDLED: &[u8] = include_bytes!("../../assets/pocket-q8_0.gguf");

/// Returns the bundled model with its matrices in this type.
fn written(dtype: DType) -> Vec<u8> {
    quantized(dtype, None)
}

/// Returns the bundled model with its matrices in this type, and errors weighted by importance.
fn quantized(dtype: DType, importance: Option<&ImportanceMatrix>) -> Vec<u8> {
    // Tests of one process run concurrently.
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let (process, n) = (std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let path = std::env::temp_dir().join(format!("kvant-weight-types-{process}-{n}.gguf"));
    let options = QuantizeOptions { importance, ..dtype.into() };
    let done = quantize(&Gguf::from_bytes(BUNDLED).unwrap(), &path, options, &mut |_| ()).unwrap();
    assert_eq!(done.types[0].used, dtype);
    assert!(done.types[0].n > 0, "{dtype}: {:?}", done.types);
    let bytes = std::fs::read(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    bytes
}

fn open(bytes: Vec<u8>) -> Result<Model, String> {
    let options = OpenOptions { n_threads: Some(1), ..Default::default() };
    Model::from_gguf(Gguf::from_bytes(bytes).unwrap(), options).map_err(|error| error.to_string())
}

/// Returns the probabilities of the token after a few tokens.
fn probabilities(model: &Model) -> Vec<f64> {
    let mut session = model.session(SessionOptions::default()).unwrap();
    session.feed(&[1, 300, 17, 42, 260, 9, 511, 77], &mut |_| true).unwrap();
    let logits = session.logits().unwrap();
    let max = logits.iter().fold(f32::MIN, |max, &logit| max.max(logit));
    let powers: Vec<f64> = logits.iter().map(|&logit| f64::from(logit - max).exp()).collect();
    let sum: f64 = powers.iter().sum();
    powers.into_iter().map(|power| power / sum).collect()
}

/// As close to q8_0 as q4_0 is, within a factor of 1.5: mxfp4 has power-of-two scales only.
#[test]
fn four_bit_types_are_as_close_as_q4_0() {
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

/// Columns are scaled by up to e^2, at random; a division that the layer before does not absorb
/// would leave nothing of the model.
#[test]
fn balanced_columns_leave_the_model_what_it_is() {
    let gguf = Gguf::from_bytes(BUNDLED).unwrap();
    let (mut importance, mut random) = (ImportanceMatrix::new(512), Random::new(1));
    for info in gguf.tensors().iter().filter(|info| info.shape.len() == 2 && info.name.starts_with("blk.")) {
        let sums = (0..info.row_len()).map(|_| (3.0 * random.gaussian()).exp() as f32).collect();
        importance.add(&info.name, InputSums { sums, counts: vec![1.0] }).unwrap();
    }
    let want = probabilities(&open(BUNDLED.to_vec()).unwrap());
    for dtype in [DType::TQ4_1S, DType::TQ3T] {
        let divergence = |bytes| {
            let got = probabilities(&open(bytes).unwrap());
            want.iter().zip(&got).map(|(p, q)| p * (p / q).ln()).sum::<f64>()
        };
        let bytes = quantized(dtype, Some(&importance));
        let balanced = Gguf::from_bytes(bytes.clone()).unwrap();
        for name in ["blk.0.attn_norm.weight", "blk.2.ffn_norm.weight"] {
            let of = |gguf: &Gguf| gguf.tensor(name).unwrap().bytes.to_vec();
            assert_ne!(of(&balanced), of(&gguf), "{name}");
        }
        let [plain, balanced] = [written(dtype), bytes].map(divergence);
        assert!(balanced <= 4.0 * plain, "{dtype}: {balanced}, in plain columns {plain}");
    }
}

#[test]
fn weights_converted_on_load_equal_those_of_a_quantized_file() {
    let context = std::env::temp_dir().join(format!("kvant-retyped-context-{}", std::process::id()));
    let options = |weights| OpenOptions {
        device: DeviceChoice::Cpu.into(),
        n_threads: Some(2),
        weights,
        ..Default::default()
    };
    let session = |model: &Model| {
        let mut session = model.session(SessionOptions::default()).unwrap();
        session.feed(&[5, 6, 7, 8], &mut |_| true).unwrap();
        session
    };
    let bits = |session: &mut Session| {
        session.logits().unwrap().iter().map(|logit| logit.to_bits()).collect::<Vec<_>>()
    };
    let file = Gguf::from_bytes(written(DType::Q4_0)).unwrap();
    let written = Model::from_gguf(file, options(None)).unwrap();
    let retyped = Model::bundled(options(Some(DType::Q4_0))).unwrap();
    let plain = Model::bundled(options(None)).unwrap();
    assert_eq!(bits(&mut session(&retyped)), bits(&mut session(&written)));
    assert_ne!(bits(&mut session(&retyped)), bits(&mut session(&plain)));
    assert_eq!(retyped.weight_bytes(), written.weight_bytes());
    session(&retyped).save(&context).unwrap();
    assert!(retyped.load_session(&context, None).is_ok());
    let refused = plain.load_session(&context, None).unwrap_err().to_string();
    assert!(refused.contains("model"), "{refused}");
    let turbo = Model::bundled(options(Some(DType::Turbo3))).unwrap_err().to_string();
    assert_eq!(turbo, "weights: expected a weight type that GGUF files hold, got turbo3");
    std::fs::remove_file(context).unwrap();
}

/// The tensor that the tests of load-only types change.
const CHANGED: &str = "blk.1.ffn_up.weight";

/// Returns a file with an f32 tensor of this name and these bytes, replaced or added.
fn with_tensor(bytes: &[u8], name: &str, shape: &[usize], values: &[u8]) -> Vec<u8> {
    let gguf = Gguf::from_bytes(bytes.to_vec()).unwrap();
    let (mut writer, mut out) = (GgufWriter::new(), Vec::new());
    for (key, value) in gguf.meta() {
        writer.set(key, value).unwrap();
    }
    let others = || gguf.tensors().iter().filter(|info| info.name != name);
    for info in others() {
        writer.add_tensor(&info.name, &info.shape, info.dtype).unwrap();
    }
    writer.add_tensor(name, shape, DType::F32).unwrap();
    let fill = |sink: &mut TensorSink<'_>| {
        others().try_for_each(|info| sink.bytes(&info.name, &gguf.data(info)))?;
        sink.bytes(name, values)
    };
    writer.write_to::<GgufError>(&mut out, fill).unwrap();
    out
}

fn bytes_of(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Returns the bundled model with these blocks of a type that this crate cannot write: an f32
/// tensor of as many bytes, then patched to the shape and type.
fn with_blocks(packed: LoadOnlyType, shape: &[usize], blocks: &[u8]) -> Vec<u8> {
    let mut bytes = with_tensor(BUNDLED, CHANGED, &[blocks.len() / 4, 1], blocks);
    let place =
        bytes.windows(CHANGED.len()).position(|window| window == CHANGED.as_bytes()).unwrap() + CHANGED.len();
    // Behind the name: the number of dimensions, the dimensions, the type.
    for (at, size) in shape.iter().enumerate() {
        bytes[place + 4 + 8 * at..][..8].copy_from_slice(&(*size as u64).to_le_bytes());
    }
    bytes[place + 20..place + 24].copy_from_slice(&packed.ggml_id().unwrap().to_le_bytes());
    bytes
}

/// The output nearly equals that of the same values in f32: GEMMs of quantized types round their
/// activations. Values other than the model's own change the output.
#[test]
fn load_only_types_decode_to_their_values() {
    let own = probabilities(&open(BUNDLED.to_vec()).unwrap());
    let bundled = Gguf::from_bytes(BUNDLED).unwrap();
    let info = bundled.find_info(CHANGED).unwrap();
    // With the offset of d, an f16.
    for (packed, scale_at) in [
        (LoadOnlyType::Tq1_0, 52),
        (LoadOnlyType::Tq2_0, 64),
        (LoadOnlyType::Iq1S, 0),
        (LoadOnlyType::Iq2Xs, 0),
        (LoadOnlyType::Iq3S, 0),
        (LoadOnlyType::Iq3Xxs, 0),
    ] {
        let n_blocks = info.elements() / packed.block_len();
        let mut random = kvant_codec::random::Random::new(1);
        let mut blocks: Vec<u8> = (0..n_blocks * packed.block_bytes()).map(|_| random.bits() as u8).collect();
        for block in blocks.chunks_exact_mut(packed.block_bytes()) {
            // 2^-8, exactly.
            block[scale_at..scale_at + 2].copy_from_slice(&0x1c00u16.to_le_bytes());
        }
        let bytes = with_blocks(packed, &info.shape, &blocks);
        let read = Gguf::from_bytes(bytes.clone()).unwrap();
        let view = read.tensor(CHANGED).unwrap();
        let is_so = (Some(packed), packed.loaded_type(), blocks.len());
        assert_eq!((view.info.packed, view.info.dtype, view.info.stored_bytes), is_so);
        let mut values = vec![0.0; info.elements()];
        kvant_codec::decode(packed.loaded_type(), &view.bytes, &mut values).unwrap();
        let floats = with_tensor(BUNDLED, CHANGED, &info.shape, &bytes_of(&values));
        let want = probabilities(&open(floats).unwrap());
        let got = probabilities(&open(bytes).unwrap());
        let far = |q: &[f64]| want.iter().zip(q).map(|(p, q)| p * (p / q).ln()).sum::<f64>();
        let (same, other) = (far(&got), far(&own));
        assert!(same < other / 100.0, "{}: {same}, the model's own values {other}", packed.name());
    }
}

#[test]
fn nvfp4_tensor_scales_apply_and_faulty_ones_are_refused() {
    const NAME: &str = "blk.1.ffn_down.scale";
    let bytes = written(DType::NVFP4);
    let want = probabilities(&open(bytes.clone()).unwrap());
    let far = |scale| -> f64 {
        let got = probabilities(&open(with_tensor(&bytes, NAME, &[1], &bytes_of(&[scale]))).unwrap());
        want.iter().zip(&got).map(|(p, q)| p * (p / q).ln()).sum()
    };
    // The rounding of scales, and far more.
    let (same, other) = (far(1.0), far(-2.0));
    assert!(same < 1e-3 && other > 20.0 * same.max(1e-4), "{same}, {other}");
    for values in [&[1.0, 1.0][..], &[f32::NAN]] {
        let error =
            open(with_tensor(&bytes, NAME, &[values.len()], &bytes_of(values))).expect_err("it is refused");
        assert!(error.contains(NAME), "{error}");
    }
}

#[test]
fn a_non_finite_scale_is_refused_with_its_tensor() {
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
