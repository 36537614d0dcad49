//! Rewrites a model with its weight matrices in other types.

use std::borrow::Cow;
use std::path::Path;

use kvant_codec::{CodecError, DType};
use kvant_gguf::{Gguf, GgufWriter, LoadOnlyType, TensorInfo, TensorSink, encode_iq3_s, printable_path};
use kvant_model::retype::{for_rows, is_matrix, recode};
use kvant_model::{ModelError, check_finite};

use crate::balance::{Balance, Factors};
use crate::error::QuantizeError;
use crate::importance::ImportanceMatrix;
use crate::recipe::Recipe;

/// How to quantize: [`from`](Self::from) a recipe or one type, nothing is known of the inputs.
#[derive(Debug, Clone)]
pub struct QuantizeOptions<'a> {
    /// The type of each matrix.
    pub recipe: Recipe,
    /// How much an error in each column counts, for the matrices that it covers.
    pub importance: Option<&'a ImportanceMatrix>,
}

impl From<Recipe> for QuantizeOptions<'_> {
    fn from(recipe: Recipe) -> Self {
        Self { recipe, importance: None }
    }
}

impl From<DType> for QuantizeOptions<'_> {
    fn from(dtype: DType) -> Self {
        Recipe::from(dtype).into()
    }
}

/// Result of a quantization.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Quantized {
    /// Size of the file in bytes.
    pub n_bytes: u64,
    /// Types of the weight matrices: first the type of most of them; each requested type is
    /// followed by its substitutes.
    pub types: Vec<TypeCount>,
    /// Matrices whose importance was known.
    pub n_weighted: usize,
}

/// Number of weight matrices of one type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TypeCount {
    /// The requested type.
    pub requested: DType,
    /// The actual type; a substitute where rows are not whole blocks of `requested`.
    pub used: DType,
    /// Number of matrices.
    pub n: usize,
}

/// Writes `gguf` to `path` with weight matrices in the types of a recipe (a [`DType`] applies to
/// all of them), or in the next best type where rows are not whole blocks; norms, biases and other
/// tensors stay unchanged. Replaces the file at `path` atomically.
///
/// # Errors
/// A type that GGUF files cannot hold, a tensor with NaN or an infinity (it is named), importance
/// of another model, a `path` that is one of several files of the model itself, or a file that
/// cannot be written.
pub fn quantize<'a>(
    gguf: &Gguf,
    path: &Path,
    options: impl Into<QuantizeOptions<'a>>,
    progress: &mut dyn FnMut(&TensorInfo),
) -> Result<Quantized, QuantizeError> {
    let QuantizeOptions { recipe, importance } = options.into();
    let file_type = recipe.file_type().ok_or_else(|| QuantizeError::Setting {
        name: "type",
        expected: "a weight type that GGUF files hold".to_owned(),
        got: recipe.to_string(),
    })?;
    refuse_shard(gguf, path)?;
    refuse_integers(gguf)?;
    let requested = recipe.types(gguf, importance.is_some());
    let becomes: Vec<Option<DType>> = gguf
        .tensors()
        .iter()
        .zip(&requested)
        .map(|(info, requested)| converted_type(info, *requested))
        .collect();
    let tensors = || gguf.tensors().iter().zip(becomes.iter().copied());
    let mut writer = GgufWriter::with_meta(gguf.meta())?;
    writer.set("general.quantization_version", 2_u32)?;
    writer.set("general.file_type", file_type)?;
    for (info, becomes) in tensors() {
        match becomes {
            Some(DType::IQ3) => writer.add_packed(&info.name, &info.shape, LoadOnlyType::Iq3S)?,
            Some(dtype) => writer.add_tensor(&info.name, &info.shape, dtype)?,
            None => writer.add_stored(info)?,
        }
        if let (None, Some((name, scales))) = (becomes, gguf.scale_tensor(info)) {
            writer.add_tensor(&name, &[scales.len()], DType::F32)?;
        }
    }
    let balance =
        importance.map_or(Ok(Balance::default()), |importance| Balance::of(gguf, &becomes, importance))?;
    let mut n_weighted = 0;
    writer.save(path, |sink| {
        for (info, becomes) in tensors() {
            let factors = balance.factors(&info.name);
            match becomes.or(factors.map(|_| info.dtype)) {
                Some(dtype) => {
                    let of = importance.map_or(Ok(None), |importance| importance.mean_squares(info))?;
                    n_weighted += usize::from(of.is_some());
                    let encoded = |part: Part<'_>| Ok(encoded(info, &part, of.as_deref(), factors, dtype)?);
                    write_parts(gguf, info, sink, encoded)?;
                }
                None if gguf.n_parts(info) > 1 => {
                    write_parts(gguf, info, sink, |part| Ok(part.bytes.into_owned()))?;
                }
                None => {
                    check_finite(info, &gguf.data(info))?;
                    sink.bytes(&info.name, &gguf.stored_data(info))?;
                }
            }
            if let (None, Some((name, scales))) = (becomes, gguf.scale_tensor(info)) {
                let bytes: Vec<u8> = scales.into_iter().flat_map(f32::to_le_bytes).collect();
                sink.bytes(&name, &bytes)?;
            }
            progress(info);
        }
        Ok::<(), QuantizeError>(())
    })?;
    let n_bytes = std::fs::metadata(path).map_or(0, |meta| meta.len());
    Ok(Quantized { n_bytes, types: counts(gguf, &recipe, &requested), n_weighted })
}

/// Rows of a tensor that are in memory together.
struct Part<'a> {
    /// The first of them.
    first_row: usize,
    bytes: Cow<'a, [u8]>,
}

/// Writes a tensor a part at a time, each converted.
fn write_parts(
    gguf: &Gguf,
    info: &TensorInfo,
    sink: &mut TensorSink<'_>,
    convert: impl Fn(Part<'_>) -> Result<Vec<u8>, QuantizeError>,
) -> Result<(), QuantizeError> {
    let row_bytes = info.n_bytes / info.rows();
    let mut next_row = 0;
    let part = |index: usize| {
        let part = Part { first_row: next_row, bytes: gguf.part(info, index) };
        check_finite(info, &part.bytes).map_err(|error| match error {
            ModelError::NotFinite { name, row } => ModelError::NotFinite { name, row: next_row + row },
            other => other,
        })?;
        next_row += part.bytes.len() / row_bytes;
        convert(part)
    };
    sink.parts(&info.name, (0..gguf.n_parts(info)).map(part))
}

/// Returns the values of a part of a tensor, times `factors`, in another type. `importance` is that
/// of the columns of each of the tensor's matrices, `[n_matrices, n_in]`.
fn encoded(
    info: &TensorInfo,
    part: &Part<'_>,
    importance: Option<&[f32]>,
    factors: Option<&Factors>,
    dtype: DType,
) -> Result<Vec<u8>, CodecError> {
    let block = stored_block(dtype);
    let (n_in, per_matrix) = (info.row_len(), info.row_len() * info.shape.get(1).copied().unwrap_or(1));
    let (before, n) =
        (part.first_row * n_in, part.bytes.len() / info.dtype.block_bytes() * info.dtype.block_len());
    let of = |value: usize| {
        let column = value % n_in;
        let before = importance?[value / per_matrix * n_in + column];
        Some(factors.map_or(before, |factors| factors.importance(column, before)))
    };
    recode(info.dtype, &part.bytes, n, block, |first, values, out| {
        let first = before + first;
        let scaled = factors.map(|factors| {
            let mut scaled = values.to_vec();
            factors.apply(n_in, first, &mut scaled);
            scaled
        });
        let values = scaled.as_deref().unwrap_or(values);
        let weights: Option<Vec<f32>> = (first..first + values.len()).map(of).collect();
        match (dtype, &weights) {
            (DType::IQ3, weights) => encode_iq3_s(values, weights.as_deref(), out),
            (dtype, Some(weights)) => kvant_codec::encode_weighted(dtype, values, weights, out),
            (dtype, None) => kvant_codec::encode(dtype, values, out),
        }
    })
}

/// Returns the resulting type of a tensor with a requested type; its own type for `None`.
fn resulting_type(info: &TensorInfo, requested: Option<DType>) -> DType {
    requested.map_or(info.dtype, |dtype| for_rows(info.row_len(), dtype))
}

/// Returns the type to which a tensor is converted; `None` where it is copied unchanged.
fn converted_type(info: &TensorInfo, requested: Option<DType>) -> Option<DType> {
    let dtype = resulting_type(info, Some(requested?));
    let is_there = match info.packed {
        None => dtype == info.dtype,
        Some(LoadOnlyType::ScaledNvfp4) => dtype == DType::NVFP4,
        Some(LoadOnlyType::Iq3S) => dtype == DType::IQ3,
        Some(_) => false,
    };
    (!is_there).then_some(dtype)
}

/// Rejects overwriting one shard of a split model with the whole model: the other shards would lose
/// their first one.
fn refuse_shard(gguf: &Gguf, path: &Path) -> Result<(), QuantizeError> {
    let is_same =
        |shard: &Path| matches!((shard.canonicalize(), path.canonicalize()), (Ok(a), Ok(b)) if a == b);
    let n = gguf.shard_paths().count();
    if n > 1 && gguf.shard_paths().flatten().any(is_same) {
        return Err(QuantizeError::Setting {
            name: "file to write",
            expected: format!("another one than the {n} files that the model is read from"),
            got: printable_path(path),
        });
    }
    Ok(())
}

/// Rejects a draft head of a folder with a vocabulary of its own: other readers of GGUF files
/// expect its tokens in integers, which are not written.
fn refuse_integers(gguf: &Gguf) -> Result<(), QuantizeError> {
    match gguf.find_info("d2t") {
        Some(info) if info.packed.is_none() => {
            let what = "'d2t' of a draft head as integers: use the head from its folder".to_owned();
            Err(ModelError::Unsupported { what }.into())
        }
        _ => Ok(()),
    }
}

/// Returns the name of a type in files, where iq3 is packed as iq3_s.
pub fn stored_name(dtype: DType) -> &'static str {
    if dtype == DType::IQ3 { LoadOnlyType::Iq3S.name() } else { dtype.name() }
}

/// Returns the values and the bytes of a block in files.
pub(crate) fn stored_block(dtype: DType) -> [usize; 2] {
    match dtype {
        DType::IQ3 => [LoadOnlyType::Iq3S.block_len(), LoadOnlyType::Iq3S.block_bytes()],
        dtype => [dtype.block_len(), dtype.block_bytes()],
    }
}

/// Returns the type of most values of a model's matrices.
pub fn main_type(gguf: &Gguf) -> DType {
    let matrices = || gguf.tensors().iter().filter(|info| is_matrix(info));
    let values =
        |dtype| -> usize { matrices().filter(|info| info.dtype == dtype).map(TensorInfo::elements).sum() };
    DType::ALL.into_iter().max_by_key(|dtype| values(*dtype)).unwrap_or(DType::F32)
}

/// See [`Quantized::types`].
fn counts(gguf: &Gguf, recipe: &Recipe, requested: &[Option<DType>]) -> Vec<TypeCount> {
    let mut counts: Vec<TypeCount> = Vec::new();
    for (info, requested) in gguf.tensors().iter().zip(requested) {
        let Some(requested) = *requested else { continue };
        let used = resulting_type(info, Some(requested));
        match counts.iter_mut().find(|count| (count.requested, count.used) == (requested, used)) {
            Some(count) => count.n += 1,
            None => counts.push(TypeCount { requested, used, n: 1 }),
        }
    }
    counts.sort_by_key(|count| {
        (count.requested != recipe.dtype(), count.requested, count.used != count.requested, count.used)
    });
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

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

    /// Counts as `(requested, used, n)`.
    fn type_counts(written: &Quantized) -> Vec<(DType, DType, usize)> {
        written.types.iter().map(|count| (count.requested, count.used, count.n)).collect()
    }

    fn path(name: &str) -> std::path::PathBuf {
        std::env::temp_dir().join(format!("kvant-quantize-{name}-{}.gguf", std::process::id()))
    }

    #[test]
    fn rows_of_partial_blocks_get_the_next_best_type() {
        use DType::{F16, IQ4NL, IQ4XS, Q2K, Q3K, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0};
        let gguf = file(&[512, 96, 288, 100], 0.5);
        let pairs = [(Q2K, IQ4NL), (Q3K, IQ4NL), (IQ4XS, IQ4NL), (Q4K, Q5_0), (Q5K, Q5_1), (Q6K, Q8_0)];
        for (dtype, instead) in pairs {
            let path = path(dtype.name());
            let written = quantize(&gguf, &path, dtype, &mut |_| ()).unwrap();
            let mut stand_ins = [(dtype, instead, 2), (dtype, F16, 1)];
            stand_ins.sort();
            assert_eq!(type_counts(&written)[0], (dtype, dtype, 1), "{dtype}");
            assert_eq!(type_counts(&written)[1..], stand_ins, "{dtype}");
            let types: Vec<_> = Gguf::open(&path).unwrap().tensors().iter().map(|info| info.dtype).collect();
            assert_eq!(types, [dtype, instead, instead, F16, DType::F32], "{dtype}");
            assert_eq!(written.n_bytes, std::fs::metadata(&path).unwrap().len());
            std::fs::remove_file(path).unwrap();
        }
        let path = path("whole");
        let written = quantize(&file(&[64, 96], 0.5), &path, Q8_0, &mut |_| ()).unwrap();
        assert_eq!(type_counts(&written), [(Q8_0, Q8_0, 2)]);
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn experts_are_quantized_and_routers_are_not() {
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
        assert_eq!(type_counts(&written), [(DType::Q8_0, DType::Q8_0, 1)]);
        let gguf = Gguf::open(&path).unwrap();
        let got: Vec<_> = gguf.tensors().iter().map(|info| (info.shape.clone(), info.dtype)).collect();
        let biases = (vec![64, 3], DType::F32);
        assert_eq!(got, [(vec![64, 3], DType::F32), (vec![64, 5, 3], DType::Q8_0), biases]);
        let mut decoded = vec![0.0; values.len()];
        kvant_codec::decode(DType::Q8_0, &gguf.data(&gguf.tensors()[1]), &mut decoded).unwrap();
        // Half a quantization step of the largest value.
        assert!(decoded.iter().zip(&values).all(|(got, want)| (got - want).abs() <= 0.52 * 8.0 / 127.0));
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn unquantized_tensors_are_copied_byte_for_byte() {
        // A file that this crate cannot write: one 32-bit integer per token.
        let mut bytes = b"GGUF".to_vec();
        let string = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
        bytes.extend([3u32.to_le_bytes(), [1, 0, 0, 0], [0; 4], [0; 4], [0; 4]].concat());
        bytes.extend(string("blk.0.ffn_gate_tid2eid.weight"));
        bytes.extend(
            [2u32.to_le_bytes(), [2, 0, 0, 0], [0; 4], [2, 0, 0, 0], [0; 4], 26u32.to_le_bytes()].concat(),
        );
        bytes.extend(0u64.to_le_bytes());
        bytes.resize(bytes.len().next_multiple_of(32), 0);
        let numbers = [7i32, -1, 16_777_217, 3].map(i32::to_le_bytes).concat();
        bytes.extend(&numbers);
        let path = path("copied");
        quantize(&Gguf::from_bytes(bytes).unwrap(), &path, DType::Q8_0, &mut |_| ()).unwrap();
        let gguf = Gguf::open(&path).unwrap();
        let info = &gguf.tensors()[0];
        assert_eq!((info.packed, &*gguf.stored_data(info)), (Some(LoadOnlyType::I32), &numbers[..]));
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn nvfp4_with_a_scale_of_the_tensor_stays_so() {
        let mut writer = GgufWriter::new();
        writer.set("general.architecture", "llama").unwrap();
        writer.add_tensor("blk.0.ffn_up.weight", &[64, 4], DType::NVFP4).unwrap();
        writer.add_tensor("blk.0.ffn_up.scale", &[1], DType::F32).unwrap();
        // Scales of 1 and codes of all kinds.
        let block: Vec<u8> = [0x38; 4].into_iter().chain((0..32).map(|i| i * 7)).collect();
        let mut bytes = Vec::new();
        let written = writer.write_to(&mut bytes, |sink| {
            sink.bytes("blk.0.ffn_up.weight", &block.repeat(4))?;
            sink.bytes("blk.0.ffn_up.scale", &0.001f32.to_le_bytes())
        });
        written.unwrap();
        let (gguf, path) = (Gguf::from_bytes(bytes).unwrap(), path("scaled"));
        quantize(&gguf, &path, DType::NVFP4, &mut |_| ()).unwrap();
        let again = Gguf::open(&path).unwrap();
        let info = &again.tensors()[0];
        assert_eq!((info.packed, again.tensors().len()), (Some(LoadOnlyType::ScaledNvfp4), 1));
        assert_eq!(*again.stored_data(info), block.repeat(4));
        assert_eq!(again.data(info), gguf.data(&gguf.tensors()[0]));
        quantize(&gguf, &path, DType::F32, &mut |_| ()).unwrap();
        assert_eq!(Gguf::open(&path).unwrap().tensors()[0].dtype, DType::F32);
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn quantizing_does_not_overwrite_a_shard_of_the_model() {
        let folder = path("parts");
        std::fs::create_dir(&folder).unwrap();
        let part = |no: u16| folder.join(format!("m-{:05}-of-00002.gguf", no + 1));
        for no in 0..2 {
            let mut writer = GgufWriter::new();
            writer.set("split.no", no).unwrap();
            writer.set("split.count", 2_u16).unwrap();
            writer.set("split.tensors.count", 2_i32).unwrap();
            let name = format!("blk.{no}.ffn_up.weight");
            writer.add_tensor(&name, &[32, 2], DType::F32).unwrap();
            writer.save::<QuantizeError>(part(no), |sink| Ok(sink.bytes(&name, &[0; 256])?)).unwrap();
        }
        let gguf = Gguf::open(part(0)).unwrap();
        for no in 0..2 {
            let before = std::fs::read(part(no)).unwrap();
            let refused = quantize(&gguf, &part(no), DType::Q8_0, &mut |_| ()).unwrap_err().to_string();
            assert!(
                refused.contains("another one than the 2 files that the model is read from"),
                "{refused}"
            );
            assert_eq!(std::fs::read(part(no)).unwrap(), before);
        }
        quantize(&gguf, &folder.join("whole.gguf"), DType::Q8_0, &mut |_| ()).unwrap();
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn non_finite_weights_are_refused_by_tensor_name() {
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
