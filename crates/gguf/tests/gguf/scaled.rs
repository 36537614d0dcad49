//! Per-tensor scales of nvfp4, stored as separate tensors.

use kvant_codec::DType;
use kvant_gguf::{Gguf, GgufError, GgufWriter, LoadOnlyType, TensorSink};

/// Rows that are whole blocks of nvfp4_g256, and others.
const SHAPES: [[usize; 3]; 2] = [[256, 2, 3], [64, 2, 3]];

/// Returns the weights of three matrices.
fn weights(shape: [usize; 3]) -> Vec<u8> {
    let values: Vec<f32> =
        (0..shape.iter().product()).map(|i| ((i * 37 % 101) as f32 - 50.0) / 16.0).collect();
    let mut bytes = vec![0; values.len() / 64 * 36];
    kvant_codec::encode(DType::NVFP4, &values, &mut bytes).unwrap();
    bytes
}

/// Builds a file of these weights with the given scales.
fn file(shape: [usize; 3], scales: &[f32], input: bool) -> Gguf {
    let (mut writer, mut bytes, weights) = (GgufWriter::new(), Vec::new(), weights(shape));
    writer.add_tensor("blk.0.ffn_up_exps.scale", &[scales.len()], DType::F32).unwrap();
    writer.add_tensor("blk.0.ffn_up_exps.weight", &shape, DType::NVFP4).unwrap();
    if input {
        writer.add_tensor("blk.0.ffn_up_exps.input_scale", &[1], DType::F32).unwrap();
    }
    writer.add_tensor("other.scale", &[1], DType::F32).unwrap();
    let scales: Vec<u8> = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
    let fill = |sink: &mut TensorSink<'_>| {
        sink.bytes("blk.0.ffn_up_exps.scale", &scales)?;
        sink.bytes("blk.0.ffn_up_exps.weight", &weights)?;
        if input {
            sink.bytes("blk.0.ffn_up_exps.input_scale", &[0; 4])?;
        }
        sink.bytes("other.scale", &[0; 4])
    };
    writer.write_to::<GgufError>(&mut bytes, fill).unwrap();
    kvant_gguf::oracle::check(&bytes);
    Gguf::from_bytes(bytes).unwrap()
}

fn values(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let mut values = vec![0.0; bytes.len() / dtype.block_bytes() * dtype.block_len()];
    kvant_codec::decode(dtype, bytes, &mut values).unwrap();
    values
}

#[test]
fn weights_are_scaled_and_scale_tensors_are_removed() {
    let cases = [(&[0.37][..], true), (&[0.5, -3.0, 0.125], false)];
    for (shape, (scales, input)) in SHAPES.into_iter().flat_map(|shape| cases.map(|case| (shape, case))) {
        let plain = values(DType::NVFP4, &weights(shape));
        let gguf = file(shape, scales, input);
        let names: Vec<&str> = gguf.tensors().iter().map(|info| info.name.as_str()).collect();
        assert_eq!(names, ["blk.0.ffn_up_exps.weight", "other.scale"]);
        let view = gguf.tensor(names[0]).unwrap();
        let is_whole = shape == SHAPES[0];
        let dtype = if is_whole { DType::NVFP4G256 } else { DType::Q8_0 };
        assert_eq!((view.info.dtype, view.info.packed), (dtype, Some(LoadOnlyType::ScaledNvfp4)));
        assert_eq!(view.info.stored_bytes, weights(shape).len());
        let each = plain.len() / scales.len();
        for (block, got) in values(dtype, &view.bytes).chunks(32).enumerate() {
            let want: Vec<f32> = (block * 32..block * 32 + 32).map(|i| plain[i] * scales[i / each]).collect();
            let max = want.iter().fold(0.0_f32, |max, value| max.max(value.abs()));
            for (got, want) in got.iter().zip(&want) {
                // Half a step of 127 to the largest, whose f16 is rounded too; or two roundings.
                let bound =
                    if is_whole { want.abs() * f32::EPSILON } else { max * (0.5 / 127.0 + 1.0 / 2048.0) };
                assert!((got - want).abs() <= bound, "{got}, {want}");
            }
        }
    }
}

#[test]
fn invalid_scales_stay_tensors() {
    for scales in [&[1.0, 2.0][..], &[f32::NAN], &[1.0, f32::INFINITY, 1.0]] {
        let gguf = file(SHAPES[0], scales, false);
        assert!(gguf.find_info("blk.0.ffn_up_exps.scale").is_some());
        let info = gguf.find_info("blk.0.ffn_up_exps.weight").unwrap();
        assert_eq!((info.dtype, info.packed), (DType::NVFP4, None));
    }
}
