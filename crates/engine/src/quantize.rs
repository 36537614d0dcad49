//! Rewriting a model with its weight matrices in another type.

use std::path::Path;

use kvant_codec::DType;
use kvant_gguf::{Gguf, GgufWriter, TensorInfo};
use kvant_model::check_finite;
use kvant_model::retype::{convert, is_matrix, next_best, retyped};

use crate::Error;

/// What was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Quantized {
    /// Size of the file in bytes.
    pub n_bytes: u64,
    /// What the weight matrices have become, and how many of them: the type asked for first, then those that stand in for it
    /// where rows are no whole blocks of it.
    pub types: Vec<(DType, usize)>,
}

/// Writes `gguf` to `path` with every weight matrix as `dtype`, or, where its rows are no whole blocks of that, as the
/// next best type whose blocks they are; norms, biases and other tensors stay as they are. The file at `path` is
/// replaced whole or not at all.
///
/// # Errors
/// A type that GGUF files cannot hold, a tensor that holds NaN or an infinity (it is named), or a file that cannot be written.
pub fn quantize(
    gguf: &Gguf,
    path: &Path,
    dtype: DType,
    progress: &mut dyn FnMut(&TensorInfo),
) -> Result<Quantized, Error> {
    let file_type = file_type(dtype).ok_or_else(|| Error::Setting {
        name: "type",
        expected: "a weight type that GGUF files hold".to_owned(),
        got: dtype.name().to_owned(),
    })?;
    let mut writer = GgufWriter::with_meta(gguf.meta())?;
    writer.set("general.quantization_version", 2_u32)?;
    writer.set("general.file_type", file_type)?;
    for info in gguf.tensors() {
        writer.add_tensor(&info.name, &info.shape, retyped(info, dtype))?;
    }
    writer.save(path, |sink| {
        for info in gguf.tensors() {
            let data = gguf.data(info);
            check_finite(info, &data)?;
            match retyped(info, dtype) {
                same if same == info.dtype => sink.bytes(&info.name, &data)?,
                to => sink.bytes(&info.name, &convert(info.dtype, &data, info.elements(), to)?)?,
            }
            progress(info);
        }
        Ok::<(), Error>(())
    })?;
    let n_bytes = std::fs::metadata(path).map_or(0, |meta| meta.len());
    Ok(Quantized { n_bytes, types: types(gguf, dtype) })
}

/// The type that most values of a model's matrices have.
pub fn usual_type(gguf: &Gguf) -> DType {
    let matrices = || gguf.tensors().iter().filter(|info| is_matrix(info));
    let values =
        |dtype| -> usize { matrices().filter(|info| info.dtype == dtype).map(TensorInfo::elements).sum() };
    DType::ALL.into_iter().max_by_key(|dtype| values(*dtype)).unwrap_or(DType::F32)
}

/// See [`Quantized::types`].
fn types(gguf: &Gguf, dtype: DType) -> Vec<(DType, usize)> {
    let matrices = || gguf.tensors().iter().filter(|info| is_matrix(info));
    let counted = |to| (to, matrices().filter(|info| retyped(info, dtype) == to).count());
    let all = std::iter::successors(Some(dtype), |&dtype| next_best(dtype)).map(counted);
    all.filter(|&(to, n)| to == dtype || n > 0).collect()
}

/// llama.cpp's number for a file of mostly this type.
fn file_type(dtype: DType) -> Option<u32> {
    Some(match dtype {
        DType::F32 => 0,
        DType::F16 => 1,
        DType::Q4_0 => 2,
        DType::Q4_1 => 3,
        DType::Q8_0 => 7,
        DType::Q5_0 => 8,
        DType::Q5_1 => 9,
        DType::Q2K => 10,
        DType::Q3K => 12,
        DType::Q4K => 15,
        DType::Q5K => 17,
        DType::Q6K => 18,
        DType::IQ4NL => 25,
        DType::IQ4XS => 30,
        DType::BF16 => 32,
        DType::MXFP4 => 38,
        DType::NVFP4 => 39,
        DType::TQ3_1S => 43,
        DType::TQ4_1S => 44,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DeviceChoice, Model, OpenOptions, Session, SessionOptions};

    /// A file with one vector and matrices of these row lengths, each of four rows.
    fn file(rows: &[usize], value: f32) -> Gguf {
        let mut writer = GgufWriter::new();
        writer.set("general.architecture", "llama").unwrap();
        let name = |i: usize| format!("blk.{i}.ffn_up.weight");
        rows.iter()
            .enumerate()
            .for_each(|(i, &len)| writer.add_tensor(&name(i), &[len, 4], DType::F32).unwrap());
        writer.add_tensor("output_norm.weight", &[5], DType::F32).unwrap();
        let mut bytes = Vec::new();
        let written = writer.write_to(&mut bytes, |sink| {
            for (i, &len) in rows.iter().enumerate() {
                sink.bytes(&name(i), &value.to_le_bytes().repeat(4 * len))?;
            }
            sink.bytes("output_norm.weight", &1_f32.to_le_bytes().repeat(5))
        });
        written.unwrap();
        Gguf::from_bytes(bytes).unwrap()
    }

    fn path(name: &str) -> std::path::PathBuf {
        std::env::temp_dir().join(format!("kvant-quantize-{name}-{}.gguf", std::process::id()))
    }

    #[test]
    fn rows_that_are_no_whole_blocks_become_the_next_best_type_and_are_counted() {
        use DType::{F16, IQ4NL, IQ4XS, Q2K, Q3K, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0};
        let gguf = file(&[512, 96, 288, 100], 0.5);
        let pairs = [(Q2K, IQ4NL), (Q3K, IQ4NL), (IQ4XS, IQ4NL), (Q4K, Q5_0), (Q5K, Q5_1), (Q6K, Q8_0)];
        for (dtype, instead) in pairs {
            let path = path(dtype.name());
            let written = quantize(&gguf, &path, dtype, &mut |_| ()).unwrap();
            assert_eq!(written.types, [(dtype, 1), (instead, 2), (F16, 1)], "{dtype}");
            let types: Vec<_> = Gguf::open(&path).unwrap().tensors().iter().map(|info| info.dtype).collect();
            assert_eq!(types, [dtype, instead, instead, F16, DType::F32], "{dtype}");
            assert_eq!(written.n_bytes, std::fs::metadata(&path).unwrap().len());
            std::fs::remove_file(path).unwrap();
        }
        let path = path("whole");
        let written = quantize(&file(&[64, 96], 0.5), &path, Q8_0, &mut |_| ()).unwrap();
        assert_eq!(written.types, [(Q8_0, 2)]);
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn weights_retyped_while_loading_are_those_of_a_file_written_so_and_keep_contexts_of_their_own() {
        let (path, context) = (path("retyped"), path("retyped-context"));
        let options = |weights| OpenOptions {
            device: DeviceChoice::Cpu,
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
        quantize(&Model::bundled_file().unwrap(), &path, DType::Q4_0, &mut |_| ()).unwrap();
        let written = Model::open_with(&path, options(None)).unwrap();
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
        [path, context].iter().for_each(|path| std::fs::remove_file(path).unwrap());
    }

    #[test]
    fn experts_are_matrices_and_what_chooses_among_them_stays_as_it_is() {
        let mut writer = GgufWriter::new();
        writer.set("general.architecture", "llama").unwrap();
        let tensors = [
            ("blk.0.ffn_gate_inp.weight", vec![64, 3]),
            ("blk.0.ffn_up_exps.weight", vec![64, 5, 3]),
            ("blk.0.ffn_up_exps.bias", vec![64, 3]),
        ];
        let values: Vec<f32> = (0..64 * 15).map(|i| (i % 17) as f32 - 8.0).collect();
        for (name, shape) in &tensors {
            writer.add_tensor(name, shape, DType::F32).unwrap();
        }
        let (mut bytes, path) = (Vec::new(), path("experts"));
        let of = |n: usize| values[..n].iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>();
        writer
            .write_to(&mut bytes, |sink| {
                tensors.iter().try_for_each(|(name, shape)| sink.bytes(name, &of(shape.iter().product())))
            })
            .unwrap();
        let written = quantize(&Gguf::from_bytes(bytes).unwrap(), &path, DType::Q8_0, &mut |_| ()).unwrap();
        assert_eq!(written.types, [(DType::Q8_0, 1)]);
        let gguf = Gguf::open(&path).unwrap();
        let got: Vec<_> = gguf.tensors().iter().map(|info| (info.shape.clone(), info.dtype)).collect();
        let biases = (vec![64, 3], DType::F32);
        assert_eq!(got, [(vec![64, 3], DType::F32), (vec![64, 5, 3], DType::Q8_0), biases]);
        let mut decoded = vec![0.0; values.len()];
        kvant_codec::decode(DType::Q8_0, &gguf.data(&gguf.tensors()[1]), &mut decoded).unwrap();
        // Half a step of the largest.
        assert!(decoded.iter().zip(&values).all(|(got, want)| (got - want).abs() <= 0.52 * 8.0 / 127.0));
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn weights_that_are_no_numbers_are_refused_with_the_tensor_and_nothing_is_written() {
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for dtype in [DType::Q8_0, DType::F32] {
                let path = path("refused");
                let error = quantize(&file(&[64], value), &path, dtype, &mut |_| ()).unwrap_err().to_string();
                assert_eq!(error, "tensor 'blk.0.ffn_up.weight': row 0 holds NaN or an infinity");
                assert!(!path.exists());
            }
        }
    }
}
