//! Ops of a device.

use kvant_backend::{Backend, Input, Output, WeightSource};
use kvant_conformance::DeviceUnderTest;
use kvant_conformance::kv::{Batch, Tokens};

use super::Link;
use crate::case::{Append, Attend, Product, Read};
use crate::exam;
use crate::wire::{to_bytes, to_values};

/// Tokens that are appended at once while a cache is filled.
const CHUNK: usize = 512;

/// Attends to a cache of keys and values `[depth, kv_heads, dim]`: inputs are queries, `[steps,
/// rows, heads, dim]`, and so are answers.
pub(super) fn attend<B: Backend>(
    device: &DeviceUnderTest<B>,
    case: &Attend,
    state: &[u8],
    link: &mut Link<'_>,
) -> Result<(), String> {
    let failed = |error| format!("attend: {error}");
    let shape = exam::attend_shape(case);
    let [k, v] = halves(state, case.depth * case.kv_heads * case.dim)?;
    let tokens = Tokens::to_feed(shape, k, v);
    let before = case.depth.checked_sub(case.rows).ok_or("rows: expected at most depth")?;
    let mut batch = Batch::fed(device, &tokens, before, CHUNK).map_err(failed)?;
    batch.append(&[case.rows]).map_err(failed)?;
    let step = case.rows * shape.n_heads() * case.dim;
    link.serve(|inputs| {
        let mut answers = Vec::with_capacity(inputs.len());
        for q in inputs.chunks(step) {
            answers.extend(batch.attend(q, &|| "attend".to_owned()).map_err(failed)?);
        }
        Ok(to_bytes(&answers))
    })
}

/// Multiplies with a matrix `[n_out, n_in]` in its file format: inputs are rows, `[steps, rows,
/// n_in]`, answers `[steps, rows, n_out]`.
pub(super) fn product<B: Backend>(
    device: &DeviceUnderTest<B>,
    case: &Product,
    state: &[u8],
    link: &mut Link<'_>,
) -> Result<(), String> {
    let failed = |error| format!("project: {error}");
    let &Product { dtype, n_out, n_in, rows, copies } = case;
    let bytes = kvant_backend::SharedBytes::from(state.to_vec());
    let upload = |_| {
        let source = WeightSource { dtype, n_out, n_in, bytes: bytes.clone() };
        device.device().upload_matrix(source).map_err(failed)
    };
    let matrices = (0..copies).map(upload).collect::<Result<Vec<_>, _>>()?;
    let mut turn = (0..copies).cycle();
    link.serve(|inputs| {
        let mut answers = Vec::with_capacity(inputs.len() / n_in * n_out);
        for x in inputs.chunks(rows * n_in) {
            let w = &matrices[turn.next().ok_or("copies: expected one or more")?];
            let (x, mut y) = (device.upload(x), device.poisoned(rows * n_out));
            let input = Input { x: &x, norm: None, first_row: 0, rows };
            let mut outputs = [Output { w, bias: None, y: &mut y, accumulate: false }];
            device.device().project(input, &mut outputs).map_err(failed)?;
            answers.extend(device.results(&y, rows * n_out, &|| "project".to_owned()));
        }
        Ok(to_bytes(&answers))
    })
}

/// Appends to a cache with keys and values `[start, kv_heads, dim]`: inputs are `[steps][keys,
/// values][rows, kv_heads, dim]`, answers the bytes of the cache, or the appended tokens as
/// decoded, `[tensors][tokens, dim]`.
pub(super) fn append<B: Backend>(
    device: &DeviceUnderTest<B>,
    case: &Append,
    state: &[u8],
    link: &mut Link<'_>,
) -> Result<(), String> {
    let failed = |error| format!("kv_append: {error}");
    let [k, v] = halves(state, case.start * case.kv_heads * case.dim)?;
    let tokens = Tokens::to_feed(exam::append_shape(case), k, v);
    let half = case.rows * case.kv_heads * case.dim;
    link.serve(|inputs| {
        let mut batch = Batch::fed(device, &tokens, case.start, CHUNK).map_err(failed)?;
        for step in inputs.chunks(2 * half) {
            let (k, v) = step.split_at_checked(half).ok_or("inputs: expected whole steps")?;
            batch.append_from(&[case.rows], k, v).map_err(failed)?;
        }
        Ok(match case.read {
            Read::Bytes => batch.memory_bytes(0).concat(),
            Read::Rows => {
                let appended = |tensor: &Vec<Vec<f32>>| tensor[case.start..].concat();
                to_bytes(&batch.stored_tokens(0).iter().flat_map(appended).collect::<Vec<_>>())
            }
        })
    })
}

/// Returns keys and values of `len` numbers each.
fn halves(state: &[u8], len: usize) -> Result<[Vec<f32>; 2], String> {
    let values = to_values(state).filter(|values| values.len() == 2 * len);
    let values = values.ok_or_else(|| format!("state: expected {len} keys and as many values"))?;
    let (k, v) = values.split_at(len);
    Ok([k.to_vec(), v.to_vec()])
}
