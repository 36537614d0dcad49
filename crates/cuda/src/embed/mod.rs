//! Looks up token embeddings: rows of a table, decoded on the device and scaled.
//!
//! The tokens of a step travel in the kernel parameters. A table that is also the output matrix is
//! on the device; of another, which takes no device memory, the rows of the step are copied there
//! first, in the type of the file: 2.3 KB for 4,096 weights in q4_0, where decoded ones take 16.

use std::sync::{Mutex, PoisonError};

use bytemuck::NoUninit;
use kvant_codec::DType;

use crate::constants::Constants;
use crate::matmul::{self, HEADERS, Levels, Weights};
use crate::memory::Block;
use crate::module::Build;
use crate::{Context, CudaError, Define, DevicePtr, Launch, Source};

static SOURCE: Source =
    Source { name: "embed.cu", text: include_str!("embed.cu"), headers: &HEADERS, constants, options: &[] };

/// Rows of a launch, whose tokens are in its parameters.
const MAX_TOKENS: usize = 512;
const THREADS: u32 = 128;
/// Weights that a thread decodes.
const GROUP: usize = 32;

fn constants() -> Constants {
    matmul::constants().whole("MAX_TOKENS", MAX_TOKENS)
}

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct KernelParams {
    table: DevicePtr,
    out: DevicePtr,
    row_bytes: u64,
    n: u32,
    scale: f32,
    book: Levels,
    tokens: [u32; MAX_TOKENS],
}

/// A table of embeddings `[tokens, n]`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Table<'a> {
    pub dtype: DType,
    pub n: usize,
    /// The rows as in the file.
    pub file_rows: &'a [u8],
    /// The rows on the device, if they are there.
    pub on_device: Option<&'a Weights>,
}

/// Types that kernels decode with other results than the codec: levels are rounded to two bytes
/// (tq3_1s, tq4_1s), and E4M3 has no NaN (the others).
const INEXACT: [DType; 5] = [DType::TQ3_1S, DType::TQ4_1S, DType::NVFP4, DType::NVFP4G256, DType::FP8G128];

/// Returns whether rows of this type are decoded on the device; the host decodes the others.
pub(crate) fn decodes(dtype: DType) -> bool {
    matmul::TYPES.contains(&dtype) && !INEXACT.contains(&dtype)
}

fn defines(dtype: DType) -> [Define; 1] {
    [("TYPE", matmul::number_of(dtype))]
}

/// Returns every variant to compile.
pub(crate) fn builds() -> impl Iterator<Item = Build> {
    let types = matmul::TYPES.into_iter().filter(|&dtype| decodes(dtype));
    types.map(|dtype| Build { source: &SOURCE, defines: defines(dtype).to_vec() })
}

/// Writes the rows of `tokens`, times `scale`, to `out` `[tokens, n]`. The caller has checked the
/// tokens. `staged` receives rows on their way to the device.
pub(crate) fn embed(
    cx: &Context,
    table: Table<'_>,
    tokens: &[u32],
    scale: f32,
    out: DevicePtr,
    staged: &Mutex<Vec<u8>>,
) -> Result<(), CudaError> {
    let Table { dtype, n, on_device, .. } = table;
    let kernel = cx.kernel_with(&SOURCE, &defines(dtype), "embed")?;
    for (index, tokens) in tokens.chunks(MAX_TOKENS).enumerate() {
        let mut params = KernelParams {
            table: on_device.map_or(0, Weights::ptr),
            out: out + (index * MAX_TOKENS * n * size_of::<f32>()) as u64,
            row_bytes: matmul::row_bytes(dtype, n) as u64,
            n: n as u32,
            scale,
            book: Levels::of(dtype),
            tokens: std::array::from_fn(|row| row as u32),
        };
        // It lives until the launch is queued.
        let copied;
        match on_device {
            Some(_) => params.tokens[..tokens.len()].copy_from_slice(tokens),
            None => {
                copied = copy_rows(cx, &table, tokens, staged)?;
                params.table = copied.ptr();
            }
        }
        let groups = n.div_ceil(GROUP) as u32;
        let grid = [groups.div_ceil(THREADS), tokens.len() as u32, 1];
        cx.launch(kernel, Launch { grid, block: [THREADS, 1, 1], shared_bytes: 0 }, &params)?;
    }
    Ok(())
}

/// Copies the rows of `tokens` to the device, by way of `staged`.
fn copy_rows(
    cx: &Context,
    table: &Table<'_>,
    tokens: &[u32],
    staged: &Mutex<Vec<u8>>,
) -> Result<Block, CudaError> {
    let staged = &mut *staged.lock().unwrap_or_else(PoisonError::into_inner);
    staged.resize(tokens.len() * matmul::row_bytes(table.dtype, table.n), 0);
    matmul::lay_out_rows(table.dtype, table.n, table.file_rows, tokens, staged);
    let rows = cx.scratch(staged.len())?;
    cx.gpu().write(rows.ptr(), staged)?;
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use kvant_backend::{Backend, WeightSource};

    use super::*;
    use crate::emulator;

    #[test]
    fn rows_of_several_launches_are_those_of_their_tokens() {
        let Some(device) = emulator::device(80) else { return };
        let (n_vocab, n) = (300, 2);
        let bytes: Vec<u8> = (0..n_vocab * n).flat_map(|i| (i as f32).to_le_bytes()).collect();
        let source =
            || WeightSource { dtype: DType::F32, n_out: n_vocab, n_in: n, bytes: bytes.clone().into() };
        let tokens: Vec<u32> = (0..MAX_TOKENS as u32 + 3).map(|i| i * 7 % n_vocab as u32).collect();
        let want: Vec<f32> =
            tokens.iter().flat_map(|&token| [4 * token, 4 * token + 2]).map(|x| x as f32).collect();
        for table in [device.table(source()), device.upload_tied(source())] {
            let mut out = device.buffer(want.len()).unwrap();
            device.embed(&table.unwrap(), &tokens, 2.0, &mut out).unwrap();
            let mut got = vec![0.0; want.len()];
            device.read(&out, 0, &mut got).unwrap();
            assert_eq!(got, want);
        }
    }
}
