//! A model in a type of 4 bits: written, read, and refused where a scale is no number.

use std::sync::atomic::{AtomicUsize, Ordering};

use kvant::gguf::{GgufError, GgufWriter, Packed, TensorSink};
use kvant::{DType, Gguf, Model, OpenOptions, SessionOptions, quantize};

const BUNDLED: &[u8] = include_bytes!("../assets/pocket-q8_0.gguf");

/// The bytes of the bundled model with its matrices in this type.
fn written(dtype: DType) -> Vec<u8> {
    // Tests of one process run at once.
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let (process, n) = (std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let path = std::env::temp_dir().join(format!("kvant-weight-types-{process}-{n}.gguf"));
    let done = quantize::quantize(&Gguf::from_bytes(BUNDLED).unwrap(), &path, dtype, &mut |_| ()).unwrap();
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

/// A file whose feed-forward layers are in a type that no kernel has, made by changing what a file in tq1_0's space says.
#[test]
fn a_type_without_kernels_is_read_as_what_it_stands_for() {
    const NAME: &str = "blk.1.ffn_up.weight";
    let gguf = Gguf::from_bytes(BUNDLED).unwrap();
    let packed = Packed::Tq2_0;
    // As many bytes in f32, row by row: a quarter of them values.
    let mut writer = GgufWriter::new();
    for (key, value) in gguf.meta() {
        writer.set(key, value).unwrap();
    }
    let info = gguf.find_info(NAME).unwrap();
    let n_bytes = info.elements() / packed.block_len() * packed.block_bytes();
    for info in gguf.tensors() {
        match &*info.name {
            NAME => writer.add_tensor(NAME, &[n_bytes / 4, 1], DType::F32).unwrap(),
            name => writer.add_tensor(name, &info.shape, info.dtype).unwrap(),
        }
    }
    // d of 1/32, codes of -1, 0 and 1.
    let block = |at: usize| -> Vec<u8> {
        let codes = (0..64).map(|i| [0x24, 0x92, 0x49, 0x06][(i * 7 + at) % 4]);
        codes.chain([0x00, 0x28]).collect()
    };
    let blocks: Vec<u8> = (0..info.elements() / packed.block_len()).flat_map(block).collect();
    let mut bytes = Vec::new();
    let fill = |sink: &mut TensorSink<'_>| {
        gguf.tensors().iter().try_for_each(|info| match &*info.name {
            NAME => sink.bytes(NAME, &blocks),
            name => sink.bytes(name, &gguf.data(info)),
        })
    };
    writer.write_to::<GgufError>(&mut bytes, fill).unwrap();
    // Behind the name: a count of dimensions, these, the type.
    let place = bytes.windows(NAME.len()).position(|window| window == NAME.as_bytes()).unwrap() + NAME.len();
    for (at, size) in info.shape.iter().enumerate() {
        bytes[place + 4 + 8 * at..][..8].copy_from_slice(&(*size as u64).to_le_bytes());
    }
    bytes[place + 20..place + 24].copy_from_slice(&packed.ggml_id().unwrap().to_le_bytes());
    let read = Gguf::from_bytes(bytes.clone()).unwrap();
    let view = read.tensor(NAME).unwrap();
    assert_eq!(
        (view.info.packed, view.info.dtype, view.info.stored_bytes),
        (Some(packed), DType::Q8_0, n_bytes)
    );
    // The same values in f32 say nearly the same; q8_0 holds them exactly, but products round what enters them.
    let mut values = vec![0.0; info.elements()];
    kvant_codec::decode(DType::Q8_0, &view.bytes, &mut values).unwrap();
    for (i, value) in values.iter().enumerate() {
        let code = blocks[i / 256 * 66 + i % 256 / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
        assert_eq!(*value, (f32::from(code) - 1.0) / 32.0, "value {i}");
    }
    let got = probabilities(&open(bytes).unwrap());
    let want = probabilities(&open(BUNDLED.to_vec()).unwrap());
    assert!(got.iter().all(|p| p.is_finite()) && got != want);
}

/// A file with a tensor of these values more.
fn with_scale(bytes: &[u8], name: &str, values: &[f32]) -> Vec<u8> {
    let gguf = Gguf::from_bytes(bytes.to_vec()).unwrap();
    let (mut writer, mut out) = (GgufWriter::new(), Vec::new());
    for (key, value) in gguf.meta() {
        writer.set(key, value).unwrap();
    }
    for info in gguf.tensors() {
        writer.add_tensor(&info.name, &info.shape, info.dtype).unwrap();
    }
    writer.add_tensor(name, &[values.len()], DType::F32).unwrap();
    let values: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let fill = |sink: &mut TensorSink<'_>| {
        gguf.tensors().iter().try_for_each(|info| sink.bytes(&info.name, &gguf.data(info)))?;
        sink.bytes(name, &values)
    };
    writer.write_to::<GgufError>(&mut out, fill).unwrap();
    out
}

#[test]
fn a_scale_of_a_whole_tensor_is_multiplied_with_and_one_that_cannot_be_its_own_is_refused_by_name() {
    const NAME: &str = "blk.1.ffn_down.scale";
    let bytes = written(DType::NVFP4);
    let want = probabilities(&open(bytes.clone()).unwrap());
    let far = |scale| -> f64 {
        let got = probabilities(&open(with_scale(&bytes, NAME, &[scale])).unwrap());
        want.iter().zip(&got).map(|(p, q)| p * (p / q).ln()).sum()
    };
    // As much as q8_0 rounds, and much more.
    let (same, other) = (far(1.0), far(-2.0));
    assert!(same < 1e-3 && other > 20.0 * same.max(1e-4), "{same}, {other}");
    for values in [&[1.0, 1.0][..], &[f32::NAN]] {
        let told = open(with_scale(&bytes, NAME, values)).expect_err("it is refused");
        assert!(told.contains(NAME), "{told}");
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
