//! Rewriting a model with its weight matrices in another type.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvant_backend::limits;
use kvant_codec::DType;
use kvant_cpu::Pool;
use kvant_gguf::{Gguf, GgufWriter, TensorInfo};
use kvant_model::check_finite;

use crate::Error;

/// Values that are encoded together; a multiple of every block length.
const CHUNK: usize = 1 << 16;

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
        writer.add_tensor(&info.name, &info.shape, target(info, dtype))?;
    }
    let pool = Pool::new(limits::n_cores())?;
    writer.save(path, |sink| {
        for info in gguf.tensors() {
            let data = gguf.data(info);
            check_finite(info, data)?;
            match target(info, dtype) {
                same if same == info.dtype => sink.bytes(&info.name, data)?,
                to => sink.bytes(&info.name, &convert(&pool, info, data, to)?)?,
            }
            progress(info);
        }
        Ok::<(), Error>(())
    })?;
    let n_bytes = std::fs::metadata(path).map_or(0, |meta| meta.len());
    Ok(Quantized { n_bytes, types: types(gguf, dtype) })
}

/// See [`Quantized::types`].
fn types(gguf: &Gguf, dtype: DType) -> Vec<(DType, usize)> {
    let matrices = || gguf.tensors().iter().filter(|info| is_matrix(info));
    let counted = |to| (to, matrices().filter(|info| target(info, dtype) == to).count());
    let all = std::iter::successors(Some(dtype), |&dtype| fallback(dtype)).map(counted);
    all.filter(|&(to, n)| to == dtype || n > 0).collect()
}

fn is_matrix(info: &TensorInfo) -> bool {
    info.shape.len() == 2 && info.rows() > 1
}

/// What a tensor becomes.
fn target(info: &TensorInfo, dtype: DType) -> DType {
    if !is_matrix(info) {
        return info.dtype;
    }
    let mut to = dtype;
    while !info.row_len().is_multiple_of(to.block_len()) {
        to = fallback(to).expect("a row is whole blocks of one value");
    }
    to
}

/// The type that stands in for one whose blocks do not fit the rows: llama.cpp's choice (where it takes iq4_nl, which is not
/// known here, its choice from before that), of blocks of 32 values; and f16 where those do not fit either.
fn fallback(dtype: DType) -> Option<DType> {
    match dtype {
        DType::Q2K | DType::Q3K => Some(DType::Q4_0),
        DType::Q4K => Some(DType::Q5_0),
        DType::Q5K => Some(DType::Q5_1),
        DType::Q6K => Some(DType::Q8_0),
        dtype if dtype.block_len() > 1 => Some(DType::F16),
        _ => None,
    }
}

/// Decodes and encodes a tensor, a chunk at a time on every thread.
fn convert(pool: &Pool, info: &TensorInfo, data: &[u8], to: DType) -> Result<Vec<u8>, Error> {
    let mut out = vec![0; to.row_bytes(info.elements())?];
    let (in_bytes, out_bytes) = (info.dtype.row_bytes(CHUNK)?, to.row_bytes(CHUNK)?);
    let jobs: Vec<_> =
        data.chunks(in_bytes).zip(out.chunks_mut(out_bytes)).map(std::sync::Mutex::new).collect();
    let failed = std::sync::Mutex::new(None);
    let next = AtomicUsize::new(0);
    pool.run(&|_| {
        let mut values = vec![0.0; CHUNK];
        while let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
            let mut job = job.lock().expect("each job is taken once");
            let (from, out) = &mut *job;
            let n = out.len() / to.block_bytes() * to.block_len();
            let values = &mut values[..n];
            let result = kvant_codec::decode(info.dtype, from, values)
                .and_then(|()| kvant_codec::encode(to, values, out));
            if let Err(error) = result {
                *failed.lock().expect("nobody panics with it") = Some(error);
            }
        }
    });
    drop(jobs);
    match failed.into_inner().expect("nobody panics with it") {
        Some(error) => Err(error.into()),
        None => Ok(out),
    }
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
        DType::BF16 => 32,
        DType::TQ3_1S => 43,
        DType::TQ4_1S => 44,
        _ => return None,
    })
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

    fn path(name: &str) -> std::path::PathBuf {
        std::env::temp_dir().join(format!("kvant-quantize-{name}-{}.gguf", std::process::id()))
    }

    #[test]
    fn rows_that_are_no_whole_blocks_become_the_next_best_type_and_are_counted() {
        use DType::{F16, Q2K, Q3K, Q4_0, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0};
        let gguf = file(&[512, 96, 288, 100], 0.5);
        for (dtype, instead) in [(Q2K, Q4_0), (Q3K, Q4_0), (Q4K, Q5_0), (Q5K, Q5_1), (Q6K, Q8_0)] {
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
