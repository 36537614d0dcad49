//! Products with quantized weights, without a model.

use std::ffi::c_char;

use kvant::{DType, Gguf};
use kvant_linear::{Activations, Call, CpuDevice, Products, QuantizedMatrix, RmsNorm};

use crate::ffi::{
    CallError, KvantStatus, borrowed, call, copy, out_ptr, text, text_or_null, values, values_mut,
};

/// Computes products on the CPU, for any number of threads that call it.
pub struct KvantLinear(Products<CpuDevice>);

/// A matrix of quantized weights, `[n_out, n_in]`, for the products that loaded it.
pub struct KvantMatrix(QuantizedMatrix<CpuDevice>);

/// One product of `kvant_linear_run`: `y = W x`, or `y = W norm(x)`.
#[repr(C)]
pub struct KvantCall {
    /// W, `[n_out, n_in]`.
    pub matrix: *const KvantMatrix,
    /// x, `[rows, n_in]`.
    pub x: *const f32,
    /// Number of rows.
    pub rows: usize,
    /// Gain of the norm `x / sqrt(mean(x^2) + eps) * gain`, `[n_in]`; NULL for none.
    pub gain: *const f32,
    /// Added to the mean square.
    pub eps: f32,
    /// y, `[rows, n_out]`.
    pub y: *mut f32,
}

impl KvantCall {
    /// # Safety
    /// Its pointers are NULL, or valid for the lengths that their comments state; no two outputs
    /// overlap.
    unsafe fn borrowed<'a>(&self) -> Result<Call<'a, CpuDevice>, CallError> {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let w = &borrowed(self.matrix, "matrix")?.0;
            let [n_out, n_in] = w.shape();
            let x = values(self.x, length(self.rows, n_in)?, "x")?;
            let gain = if self.gain.is_null() { None } else { Some(values(self.gain, n_in, "gain")?) };
            let y = values_mut(self.y, length(self.rows, n_out)?, "y")?;
            Ok(Call { w, x, norm: gain.map(|gain| RmsNorm { gain, eps: self.eps }), y })
        }
    }
}

/// Returns the values of rows.
fn length(rows: usize, len: usize) -> Result<usize, CallError> {
    let fail = || CallError::Argument(format!("rows: expected a size within the address space, got {rows}"));
    rows.checked_mul(len).filter(|&n| n <= isize::MAX as usize / size_of::<f32>()).ok_or_else(fail)
}

/// # Safety
/// `name` is NULL or a text.
unsafe fn weight_type(name: *const c_char) -> Result<DType, CallError> {
    // SAFETY: guaranteed by the caller.
    Ok(unsafe { text(name, "type") }?.parse::<DType>()?)
}

/// Writes the bytes of a matrix `[n_out, n_in]` of a type (`q4_0`, `q8_0`, `q4_K` ...) to `size`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvant_quantized_size(
    type_name: *const c_char,
    n_out: usize,
    n_in: usize,
    size: *mut usize,
    error: *mut *mut c_char,
) -> KvantStatus {
    // SAFETY: the pointers satisfy the contract of this library.
    unsafe {
        call(error, || {
            let out_ptr = out_ptr(size, "size")?;
            out_ptr.write(kvant_linear::quantized_size(weight_type(type_name)?, [n_out, n_in])?);
            Ok(())
        })
    }
}

/// Encodes the weights of a matrix, `[n_out, n_in]`: writes `kvant_quantized_size` bytes, for which
/// there must be `capacity`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvant_quantize_weights(
    type_name: *const c_char,
    weights: *const f32,
    n_out: usize,
    n_in: usize,
    bytes: *mut u8,
    capacity: usize,
    error: *mut *mut c_char,
) -> KvantStatus {
    // SAFETY: the pointers satisfy the contract of this library.
    unsafe {
        call(error, || {
            let dtype = weight_type(type_name)?;
            let size = kvant_linear::quantized_size(dtype, [n_out, n_in])?;
            if capacity < size {
                let line = format!("capacity: expected at least {size}, got {capacity}");
                return Err(CallError::Argument(line));
            }
            let weights = values(weights, length(n_out, n_in)?, "weights")?;
            let encoded = kvant_linear::quantize_weights(dtype, weights, [n_out, n_in])?;
            copy(&encoded, bytes, capacity, "bytes")
        })
    }
}

/// Opens the CPU for products with `n_threads` threads; 0 are as many as it runs at once. With
/// `activations` of `float` (or NULL), inputs are multiplied in f32; with `eight_bit`, they are
/// rounded to 8 bits in blocks of 32, as in models, several times as fast.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvant_linear_new(
    activations: *const c_char,
    n_threads: usize,
    linear: *mut *mut KvantLinear,
    error: *mut *mut c_char,
) -> KvantStatus {
    // SAFETY: the pointers satisfy the contract of this library.
    unsafe {
        call(error, || {
            let out_ptr = out_ptr(linear, "linear")?;
            let activations = match text_or_null(activations, "activations")? {
                None | Some("float") => Activations::Float,
                Some("eight_bit") => Activations::EightBit,
                Some(other) => {
                    let line = format!("activations: expected float or eight_bit, got {other:?}");
                    return Err(CallError::Argument(line));
                }
            };
            let products = Products::on_cpu(activations, Some(n_threads).filter(|&n| n > 0))?;
            out_ptr.write(Box::into_raw(Box::new(KvantLinear(products))));
            Ok(())
        })
    }
}

/// Frees it. Matrices that it loaded stay valid, to be freed. NULL is ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvant_linear_free(linear: *mut KvantLinear) {
    if !linear.is_null() {
        // SAFETY: it was made by `Box::into_raw` above and has not been freed.
        drop(unsafe { Box::from_raw(linear) });
    }
}

/// Loads a matrix from the bytes of `kvant_quantize_weights`, which are copied.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvant_matrix_new(
    linear: *const KvantLinear,
    type_name: *const c_char,
    n_out: usize,
    n_in: usize,
    bytes: *const u8,
    n_bytes: usize,
    matrix: *mut *mut KvantMatrix,
    error: *mut *mut c_char,
) -> KvantStatus {
    // SAFETY: the pointers satisfy the contract of this library.
    unsafe {
        call(error, || {
            let out_ptr = out_ptr(matrix, "matrix")?;
            let products = &borrowed(linear, "linear")?.0;
            let bytes = values(bytes, n_bytes, "bytes")?.to_vec();
            let matrix = products.load(weight_type(type_name)?, [n_out, n_in], bytes)?;
            out_ptr.write(Box::into_raw(Box::new(KvantMatrix(matrix))));
            Ok(())
        })
    }
}

/// Loads a tensor of a GGUF file, whose shape there is `[n_in, n_out]`, as a matrix `[n_out,
/// n_in]`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvant_matrix_from_gguf(
    linear: *const KvantLinear,
    path: *const c_char,
    tensor: *const c_char,
    matrix: *mut *mut KvantMatrix,
    error: *mut *mut c_char,
) -> KvantStatus {
    // SAFETY: the pointers satisfy the contract of this library.
    unsafe {
        call(error, || {
            let out_ptr = out_ptr(matrix, "matrix")?;
            let products = &borrowed(linear, "linear")?.0;
            let gguf = Gguf::open(text(path, "path")?)?;
            let matrix = products.load_gguf(&gguf, text(tensor, "tensor")?)?;
            out_ptr.write(Box::into_raw(Box::new(KvantMatrix(matrix))));
            Ok(())
        })
    }
}

/// Reads the shape of a matrix.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvant_matrix_shape(
    matrix: *const KvantMatrix,
    n_out: *mut usize,
    n_in: *mut usize,
    error: *mut *mut c_char,
) -> KvantStatus {
    // SAFETY: the pointers satisfy the contract of this library.
    unsafe {
        call(error, || {
            let (rows, cols) = (out_ptr(n_out, "n_out")?, out_ptr(n_in, "n_in")?);
            let [n_out, n_in] = borrowed(matrix, "matrix")?.0.shape();
            rows.write(n_out);
            cols.write(n_in);
            Ok(())
        })
    }
}

/// Frees a matrix. NULL is ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvant_matrix_free(matrix: *mut KvantMatrix) {
    if !matrix.is_null() {
        // SAFETY: it was made by `Box::into_raw` above and has not been freed.
        drop(unsafe { Box::from_raw(matrix) });
    }
}

/// Computes `y = W x` for each row: `x` `[rows, n_in]`, `y` `[rows, n_out]`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvant_gemv_quantized(
    linear: *const KvantLinear,
    matrix: *const KvantMatrix,
    x: *const f32,
    rows: usize,
    y: *mut f32,
    error: *mut *mut c_char,
) -> KvantStatus {
    let one = KvantCall { matrix, x, rows, gain: std::ptr::null(), eps: 0.0, y };
    // SAFETY: the pointers satisfy the contract of this library.
    unsafe { kvant_linear_run(linear, &raw const one, 1, error) }
}

/// Computes `y = W norm(x)` for each row, with `norm(x) = x / sqrt(mean(x^2) + eps) * gain`: `x`
/// `[rows, n_in]`, `gain` `[n_in]`, `y` `[rows, n_out]`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvant_fused_rmsnorm_gemv_quantized(
    linear: *const KvantLinear,
    matrix: *const KvantMatrix,
    gain: *const f32,
    eps: f32,
    x: *const f32,
    rows: usize,
    y: *mut f32,
    error: *mut *mut c_char,
) -> KvantStatus {
    // SAFETY: the pointers satisfy the contract of this library.
    unsafe {
        if gain.is_null() {
            return call(error, || values(gain, 1, "gain").map(|_| ()));
        }
        let one = KvantCall { matrix, x, rows, gain, eps, y };
        kvant_linear_run(linear, &raw const one, 1, error)
    }
}

/// Runs products in their order. Neighbours with the same `x`, `rows`, `gain` and `eps` are one
/// step: the input is prepared once. Outputs must not overlap. If an argument is wrong, none has
/// run.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvant_linear_run(
    linear: *const KvantLinear,
    calls: *const KvantCall,
    n_calls: usize,
    error: *mut *mut c_char,
) -> KvantStatus {
    // SAFETY: the pointers satisfy the contract of this library.
    unsafe {
        call(error, || {
            let products = &borrowed(linear, "linear")?.0;
            let calls = values(calls, n_calls, "calls")?.iter();
            let mut calls = calls.map(|one| one.borrowed()).collect::<Result<Vec<_>, _>>()?;
            Ok(products.run(&mut calls)?)
        })
    }
}

/// Checks the header's guarantees about threads.
const _: () = {
    const fn shared<T: Send + Sync>() {}
    shared::<KvantLinear>();
    shared::<KvantMatrix>();
};
