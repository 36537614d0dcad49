//! Per-tensor scales of nvfp4, stored as separate tensors.

use kvant_codec::DType;
use kvant_gguf::{Gguf, GgufError, GgufWriter, LoadOnlyType, TensorSink};

const ROWS: [usize; 3] = [64, 2, 3];

/// Returns the weights of three matrices.
fn weights() -> Vec<u8> {
    let values: Vec<f32> =
        (0..ROWS.iter().product()).map(|i| ((i * 37 % 101) as f32 - 50.0) / 16.0).collect();
    let mut bytes = vec![0; values.len() / 64 * 36];
    kvant_codec::encode(DType::NVFP4, &values, &mut bytes).unwrap();
    bytes
}

/// Builds a file of these weights with the given scales.
fn file(scales: &[f32], input: bool) -> Gguf {
    let (mut writer, mut bytes, weights) = (GgufWriter::new(), Vec::new(), weights());
    writer.add_tensor("blk.0.ffn_up_exps.scale", &[scales.len()], DType::F32).unwrap();
    writer.add_tensor("blk.0.ffn_up_exps.weight", &ROWS, DType::NVFP4).unwrap();
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
    let mut values = vec![0.0; ROWS.iter().product()];
    kvant_codec::decode(dtype, bytes, &mut values).unwrap();
    values
}

#[test]
fn weights_are_scaled_and_scale_tensors_are_removed() {
    let plain = values(DType::NVFP4, &weights());
    for (scales, input) in [(&[0.37][..], true), (&[0.5, -3.0, 0.125], false)] {
        let gguf = file(scales, input);
        let names: Vec<&str> = gguf.tensors().iter().map(|info| info.name.as_str()).collect();
        assert_eq!(names, ["blk.0.ffn_up_exps.weight", "other.scale"]);
        let view = gguf.tensor(names[0]).unwrap();
        assert_eq!((view.info.dtype, view.info.packed), (DType::Q8_0, Some(LoadOnlyType::ScaledNvfp4)));
        assert_eq!(view.info.stored_bytes, weights().len());
        let each = plain.len() / scales.len();
        for (block, got) in values(DType::Q8_0, &view.bytes).chunks(32).enumerate() {
            let want: Vec<f32> = (block * 32..block * 32 + 32).map(|i| plain[i] * scales[i / each]).collect();
            let max = want.iter().fold(0.0_f32, |max, value| max.max(value.abs()));
            for (got, want) in got.iter().zip(&want) {
                // Half a step of 127 to the largest, whose f16 is rounded too.
                assert!((got - want).abs() <= max * (0.5 / 127.0 + 1.0 / 2048.0), "{got}, {want}");
            }
        }
    }
}

#[test]
fn invalid_scales_stay_tensors() {
    for scales in [&[1.0, 2.0][..], &[f32::NAN], &[1.0, f32::INFINITY, 1.0]] {
        let gguf = file(scales, false);
        assert!(gguf.find_info("blk.0.ffn_up_exps.scale").is_some());
        let info = gguf.find_info("blk.0.ffn_up_exps.weight").unwrap();
        assert_eq!((info.dtype, info.packed), (DType::NVFP4, None));
    }
}
