//! Rewriting a model with its weight matrices in another type.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvant_backend::limits;
use kvant_codec::DType;
use kvant_cpu::Pool;
use kvant_gguf::{Gguf, GgufWriter, TensorInfo};

use crate::Error;

/// Values that are encoded together; a multiple of every block length.
const CHUNK: usize = 1 << 16;

/// Writes `gguf` to `path` with every weight matrix whose rows fit the type's blocks as `dtype`; norms, biases and
/// other tensors stay as they are. The file at `path` is replaced whole or not at all. Returns its size in bytes.
///
/// # Errors
/// A type that GGUF files cannot hold, or a file that cannot be written.
pub fn quantize(
    gguf: &Gguf,
    path: &Path,
    dtype: DType,
    progress: &mut dyn FnMut(&TensorInfo),
) -> Result<u64, Error> {
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
            match target(info, dtype) {
                same if same == info.dtype => sink.bytes(&info.name, data)?,
                to => sink.bytes(&info.name, &convert(&pool, info, data, to)?)?,
            }
            progress(info);
        }
        Ok::<(), Error>(())
    })?;
    Ok(std::fs::metadata(path).map_or(0, |meta| meta.len()))
}

/// What a tensor becomes: matrices change where their rows are whole blocks.
fn target(info: &TensorInfo, dtype: DType) -> DType {
    let is_matrix = info.shape.len() == 2 && info.rows() > 1;
    if is_matrix && info.row_len().is_multiple_of(dtype.block_len()) { dtype } else { info.dtype }
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
