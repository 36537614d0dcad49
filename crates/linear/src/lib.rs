//! Products with quantized weights, without a model: quantize a matrix, load it, multiply it.
//!
//! ```
//! use kvant_linear::{Activations, DType, Products, quantize_weights, quantized_size};
//!
//! let (n_out, n_in) = (48, 64);
//! let weights: Vec<f32> = (0..n_out * n_in).map(|i| (i as f32).sin()).collect();
//! let bytes = quantize_weights(DType::Q4_0, &weights, [n_out, n_in])?;
//! assert_eq!(bytes.len(), quantized_size(DType::Q4_0, [n_out, n_in])?);
//!
//! let products = Products::on_cpu(Activations::Float, None)?;
//! let w = products.load(DType::Q4_0, [n_out, n_in], bytes)?;
//! let x = vec![0.5; 2 * n_in]; // two rows
//! let mut y = vec![0.0; 2 * n_out];
//! products.gemv_quantized(&w, &x, &mut y)?;
//! # Ok::<(), kvant_linear::LinearError>(())
//! ```
//!
//! | item | does |
//! |---|---|
//! | [`quantized_size`], [`quantize_weights`] | bytes of a matrix in a type |
//! | [`Products::load`], [`Products::load_gguf`] | a matrix, repacked for the device |
//! | [`Products::gemv_quantized`] | `y = W x` for any number of rows |
//! | [`Products::fused_rmsnorm_gemv_quantized`] | `y = W norm(x)` in one pass |
//! | [`Products::run`] | many calls in their order; neighbours share the preparation of one input |
//!
//! Matrices are `[n_out, n_in]`, rows contiguous; activations `[rows, n_in]`, outputs `[rows,
//! n_out]`, all row by row without padding. Types are those of [`DType::weights`], their layouts in
//! `docs/formats.md`. Any [`Backend`] computes products; [`Products::on_cpu`] opens the CPU.
//!
//! # Errors of results
//!
//! Against sums in f64 over the decoded weights, relative to the root mean square of the exact
//! results: at most 2e-5 with [`Activations::Float`], whose products and sums are in f32. With
//! [`Activations::EightBit`], the kernels of models, inputs are rounded to 8 bits in blocks of 32:
//! about 5e-3 on Gaussian inputs, several times as fast.
//!
//! [`Backend`]: kvant_backend::Backend
//! [`DType::weights`]: kvant_codec::DType::weights
#![forbid(unsafe_code)]

mod error;
mod products;
mod weights;

pub use error::LinearError;
pub use kvant_codec::DType;
pub use kvant_cpu::CpuDevice;
pub use products::{Activations, Call, Products, QuantizedMatrix, RmsNorm};
pub use weights::{quantize_weights, quantized_size};
