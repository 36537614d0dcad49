//! Products on a device.

use kvant_backend::{Backend, Input, Matrix, Norm, Output, SharedBytes, WeightSource, limits};
use kvant_codec::DType;
use kvant_codec::finite::find_non_finite_block;
use kvant_cpu::{CpuDevice, Isa};
use kvant_gguf::Gguf;

use crate::error::LinearError;
use crate::weights::quantized_size;

/// What kernels of the CPU multiply weights with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activations {
    /// Inputs as they are, in f32; sums in f32.
    Float,
    /// Inputs rounded to 8 bits in blocks of 32 with a scale each, as in models: several times as
    /// fast. Weights in f32, f16 and bf16 are multiplied in f32 all the same.
    EightBit,
}

/// Computes products on a device.
pub struct Products<B: Backend> {
    device: B,
}

/// A matrix `[n_out, n_in]` on a device.
pub struct QuantizedMatrix<B: Backend> {
    w: B::Matrix,
    dtype: DType,
}

/// A root mean square norm: `x / sqrt(mean(x^2) + eps) * gain`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RmsNorm<'a> {
    /// `[n_in]`
    pub gain: &'a [f32],
    /// Added to the mean square.
    pub eps: f32,
}

/// One call of [`Products::run`]: `y = W x`, or `y = W norm(x)`.
pub struct Call<'a, B: Backend> {
    /// W, `[n_out, n_in]`.
    pub w: &'a QuantizedMatrix<B>,
    /// x, `[rows, n_in]`.
    pub x: &'a [f32],
    /// The norm of each row of x.
    pub norm: Option<RmsNorm<'a>>,
    /// y, `[rows, n_out]`.
    pub y: &'a mut [f32],
}

impl<B: Backend> QuantizedMatrix<B> {
    /// Returns the type of the weights.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns `[n_out, n_in]`.
    pub fn shape(&self) -> [usize; 2] {
        [self.w.n_out(), self.w.n_in()]
    }
}

impl Products<CpuDevice> {
    /// Opens the CPU with `n_threads` threads, or as many as it runs at once.
    ///
    /// # Errors
    /// No threads or too many, or those that the system does not start; `KVANT_ISA` with another
    /// set than this CPU has.
    pub fn on_cpu(activations: Activations, n_threads: Option<usize>) -> Result<Self, LinearError> {
        let device = match activations {
            Activations::EightBit => CpuDevice::from_env(n_threads)?,
            Activations::Float => {
                let n_threads = n_threads.unwrap_or_else(limits::n_cores);
                limits::check_size("threads", n_threads, 1..=limits::max_threads())?;
                CpuDevice::new(Isa::Scalar, n_threads)?
            }
        };
        Ok(Self { device })
    }
}

impl<B: Backend> Products<B> {
    /// Computes products on an open device.
    pub fn on(device: B) -> Self {
        Self { device }
    }

    /// Takes a matrix `[n_out, n_in]` of [`quantized_size`] bytes and repacks it for the kernels.
    ///
    /// # Errors
    /// As [`quantized_size`]; another number of bytes, a scale that is not finite, memory that the
    /// device lacks.
    pub fn load(
        &self,
        dtype: DType,
        shape: [usize; 2],
        bytes: impl Into<SharedBytes>,
    ) -> Result<QuantizedMatrix<B>, LinearError> {
        let (bytes, expected) = (bytes.into(), quantized_size(dtype, shape)?);
        let [n_out, n_in] = shape;
        if bytes.len() != expected {
            let expected = format!("{expected} bytes for [{n_out}, {n_in}] of {dtype}");
            return Err(LinearError::size("weights", expected, format!("{} bytes", bytes.len())));
        }
        if let Some(block) = find_non_finite_block(dtype, &bytes) {
            return Err(LinearError::NotFinite { row: block * dtype.block_len() / n_in });
        }
        let w = self.device.upload_matrix(WeightSource { dtype, n_out, n_in, bytes })?;
        Ok(QuantizedMatrix { w, dtype })
    }

    /// Loads a tensor of a GGUF file, whose shape there is `[n_in, n_out]`, innermost first: the
    /// same bytes are the rows of a matrix `[n_out, n_in]`. Types without kernels are converted as
    /// in models.
    ///
    /// # Errors
    /// As [`Products::load`]; a missing tensor, or one that is not a matrix.
    pub fn load_gguf(&self, gguf: &Gguf, tensor: &str) -> Result<QuantizedMatrix<B>, LinearError> {
        let tensor = gguf.tensor(tensor)?;
        let &[n_in, n_out] = &tensor.info.shape[..] else {
            let got = format!("{:?}", tensor.info.shape);
            return Err(LinearError::size("tensor", "a matrix, [n_in, n_out]", got));
        };
        self.load(tensor.info.dtype, [n_out, n_in], tensor.bytes.into_owned())
    }

    /// Computes `y = W x` for each row: `x` `[rows, n_in]`, `y` `[rows, n_out]`.
    ///
    /// # Errors
    /// An `x` that is not whole rows, another length of `y`, an error of the device.
    pub fn gemv_quantized(
        &self,
        w: &QuantizedMatrix<B>,
        x: &[f32],
        y: &mut [f32],
    ) -> Result<(), LinearError> {
        self.run(&mut [Call { w, x, norm: None, y }])
    }

    /// Computes `y = W norm(x)` for each row: `x` `[rows, n_in]`, `y` `[rows, n_out]`.
    ///
    /// # Errors
    /// As [`Products::gemv_quantized`]; a gain that does not have `n_in` values.
    pub fn fused_rmsnorm_gemv_quantized(
        &self,
        w: &QuantizedMatrix<B>,
        norm: RmsNorm<'_>,
        x: &[f32],
        y: &mut [f32],
    ) -> Result<(), LinearError> {
        self.run(&mut [Call { w, x, norm: Some(norm), y }])
    }

    /// Runs calls in their order. Neighbours that have the same rows (the same memory) and the same
    /// norm are one step on the device: the input is prepared once, and threads meet once.
    ///
    /// # Errors
    /// As of each call; none has run if one has operands of wrong sizes.
    pub fn run(&self, calls: &mut [Call<'_, B>]) -> Result<(), LinearError> {
        calls.iter().try_for_each(Call::check)?;
        calls.chunk_by_mut(Call::has_input_of).try_for_each(|calls| self.run_step(calls))
    }

    /// Runs calls of one input.
    fn run_step(&self, calls: &mut [Call<'_, B>]) -> Result<(), LinearError> {
        let Some(Call { w, x, norm, .. }) = calls.first() else { return Ok(()) };
        let rows = x.len() / w.w.n_in();
        if rows == 0 {
            return Ok(());
        }
        let x = self.uploaded(x)?;
        let gain =
            norm.map(|norm| Ok::<_, LinearError>((self.uploaded(norm.gain)?, norm.eps))).transpose()?;
        let norm = gain.as_ref().map(|(weight, eps)| Norm { weight, eps: *eps });
        let buffers = calls.iter().map(|call| self.device.buffer(call.y.len()));
        let mut buffers = buffers.collect::<Result<Vec<_>, _>>()?;
        let output = |(call, y)| {
            let Call { w, .. }: &Call<'_, B> = call;
            Output { w: &w.w, bias: None, y, accumulate: false }
        };
        let mut outputs: Vec<_> = calls.iter().zip(&mut buffers).map(output).collect();
        self.device.project(Input { x: &x, norm, first_row: 0, rows }, &mut outputs)?;
        for (call, buffer) in calls.iter_mut().zip(&buffers) {
            self.device.read(buffer, 0, call.y)?;
        }
        Ok(())
    }

    fn uploaded(&self, values: &[f32]) -> Result<B::Buffer, LinearError> {
        let mut buffer = self.device.buffer(values.len())?;
        self.device.write(&mut buffer, values)?;
        Ok(buffer)
    }
}

impl<B: Backend> Call<'_, B> {
    fn check(&self) -> Result<(), LinearError> {
        let [n_out, n_in] = self.w.shape();
        let (rows, rest) = (self.x.len() / n_in, self.x.len() % n_in);
        if rest != 0 {
            return Err(LinearError::size(
                "x",
                format!("rows of {n_in}"),
                format!("{} values", self.x.len()),
            ));
        }
        if self.y.len() != rows * n_out {
            return Err(LinearError::size(
                "y",
                format!("[{rows}, {n_out}]"),
                format!("{} values", self.y.len()),
            ));
        }
        match self.norm {
            Some(norm) if norm.gain.len() != n_in => {
                Err(LinearError::size("gain", n_in, format!("{} values", norm.gain.len())))
            }
            _ => Ok(()),
        }
    }

    fn has_input_of(&self, other: &Self) -> bool {
        let norm = |norm: RmsNorm<'_>| (norm.gain.as_ptr_range(), norm.eps.to_bits());
        self.w.w.n_in() == other.w.w.n_in()
            && self.x.as_ptr_range() == other.x.as_ptr_range()
            && self.norm.map(norm) == other.norm.map(norm)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::weights::quantize_weights;
    use kvant_codec::random::Random;
    use kvant_gguf::{GgufError, GgufWriter};

    const N_OUT: usize = 37;
    const N_IN: usize = 512;

    fn gaussian(seed: u64, n: usize, sigma: f64) -> Vec<f32> {
        let mut values = vec![0.0; n];
        Random::new(seed).fill_gaussian(&mut values, sigma);
        values
    }

    /// Returns the exact products with the decoded weights.
    fn exact(dtype: DType, bytes: &[u8], x: &[f32], norm: Option<RmsNorm<'_>>) -> Vec<f64> {
        let mut w = vec![0.0; N_OUT * N_IN];
        kvant_codec::decode(dtype, bytes, &mut w).unwrap();
        let normed = |row: &[f32]| -> Vec<f64> {
            let Some(RmsNorm { gain, eps }) = norm else { return row.iter().map(|&v| v.into()).collect() };
            let mean = row.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / N_IN as f64;
            let by = (mean + f64::from(eps)).sqrt().recip();
            row.iter().zip(gain).map(|(&v, &g)| f64::from(v) * by * f64::from(g)).collect()
        };
        let dot = |w: &[f32], x: &[f64]| w.iter().zip(x).map(|(&w, x)| f64::from(w) * x).sum::<f64>();
        let of_row = |row| {
            let x = normed(row);
            w.chunks_exact(N_IN).map(|w| dot(w, &x)).collect::<Vec<_>>()
        };
        x.chunks_exact(N_IN).flat_map(of_row).collect()
    }

    /// Returns the largest error relative to the root mean square of the exact results.
    fn error(got: &[f32], want: &[f64]) -> f64 {
        let rms = (want.iter().map(|v| v * v).sum::<f64>() / want.len() as f64).sqrt();
        got.iter().zip(want).map(|(&got, want)| (f64::from(got) - want).abs()).fold(0.0, |max, error| {
            // NaN is an error.
            if error <= max { max } else { error }
        }) / rms
    }

    #[test]
    fn products_with_float_activations_are_exact_to_f32_sums() {
        let products = Products::on_cpu(Activations::Float, Some(2)).unwrap();
        let fast = Products::on_cpu(Activations::EightBit, Some(2)).unwrap();
        let weights = gaussian(1, N_OUT * N_IN, 0.02);
        let gain = gaussian(2, N_IN, 1.0);
        for dtype in DType::weights() {
            let shape = [N_OUT, N_IN];
            let bytes = quantize_weights(dtype, &weights, shape).unwrap();
            let w = products.load(dtype, shape, bytes.clone()).unwrap();
            let w_fast = fast.load(dtype, shape, bytes.clone()).unwrap();
            assert_eq!((w.dtype(), w.shape()), (dtype, shape));
            for rows in [0, 1, 3, 17] {
                let x = gaussian(3, rows * N_IN, 1.0);
                for norm in [None, Some(RmsNorm { gain: &gain, eps: 1e-6 })] {
                    let want = exact(dtype, &bytes, &x, norm);
                    let mut y = vec![f32::NAN; rows * N_OUT];
                    products.run(&mut [Call { w: &w, x: &x, norm, y: &mut y }]).unwrap();
                    assert!(rows == 0 || error(&y, &want) <= 2e-5, "{dtype} {rows}: {}", error(&y, &want));
                    y.fill(f32::NAN);
                    fast.run(&mut [Call { w: &w_fast, x: &x, norm, y: &mut y }]).unwrap();
                    assert!(rows == 0 || error(&y, &want) <= 3e-2, "{dtype} {rows}: {}", error(&y, &want));
                }
            }
        }
    }

    #[test]
    fn calls_of_one_input_give_the_bits_of_single_calls() {
        let products = Products::on_cpu(Activations::EightBit, Some(2)).unwrap();
        let load = |seed, dtype| {
            let bytes = quantize_weights(dtype, &gaussian(seed, N_OUT * N_IN, 0.02), [N_OUT, N_IN]).unwrap();
            products.load(dtype, [N_OUT, N_IN], bytes).unwrap()
        };
        let ws = [load(1, DType::Q4_0), load(2, DType::Q8_0), load(3, DType::F16)];
        let (x, other, gain) = (gaussian(4, 2 * N_IN, 1.0), gaussian(5, N_IN, 1.0), gaussian(6, N_IN, 1.0));
        let norm = Some(RmsNorm { gain: &gain, eps: 1e-5 });
        let inputs = [(&ws[0], &x, norm), (&ws[1], &x, norm), (&ws[2], &x, None), (&ws[0], &other, None)];
        let mut together: Vec<Vec<f32>> =
            inputs.iter().map(|(_, x, _)| vec![f32::NAN; x.len() / N_IN * N_OUT]).collect();
        let mut single = together.clone();
        let mut calls: Vec<_> =
            inputs.iter().zip(&mut together).map(|(&(w, x, norm), y)| Call { w, x, norm, y }).collect();
        products.run(&mut calls).unwrap();
        for (&(w, x, norm), y) in inputs.iter().zip(&mut single) {
            match norm {
                Some(norm) => products.fused_rmsnorm_gemv_quantized(w, norm, x, y).unwrap(),
                None => products.gemv_quantized(w, x, y).unwrap(),
            }
        }
        assert_eq!(together, single);
    }

    #[test]
    fn tensors_of_gguf_files_are_matrices_of_rows() {
        let weights = gaussian(7, N_OUT * N_IN, 0.02);
        let bytes = quantize_weights(DType::Q5_1, &weights, [N_OUT, N_IN]).unwrap();
        let mut writer = GgufWriter::new();
        writer.add_tensor("a.weight", &[N_IN, N_OUT], DType::Q5_1).unwrap();
        writer.add_tensor("b.weight", &[32], DType::F32).unwrap();
        let mut file = Vec::new();
        let fill = |sink: &mut kvant_gguf::TensorSink<'_>| {
            sink.bytes("a.weight", &bytes)?;
            sink.bytes("b.weight", &[0; 128])
        };
        writer.write_to::<GgufError>(&mut file, fill).unwrap();
        let gguf = Gguf::from_bytes(file).unwrap();
        let products = Products::on_cpu(Activations::Float, Some(1)).unwrap();
        let w = products.load_gguf(&gguf, "a.weight").unwrap();
        assert_eq!(w.shape(), [N_OUT, N_IN]);
        let (x, mut y) = (gaussian(8, N_IN, 1.0), vec![f32::NAN; N_OUT]);
        products.gemv_quantized(&w, &x, &mut y).unwrap();
        assert!(error(&y, &exact(DType::Q5_1, &bytes, &x, None)) <= 2e-5);
        let refused = |name: &str| products.load_gguf(&gguf, name).err().unwrap().to_string();
        assert_eq!(refused("b.weight"), "tensor: expected a matrix, [n_in, n_out], got [32]");
        assert!(refused("c.weight").contains("c.weight"));
    }

    #[test]
    fn ragged_shapes_and_other_types_are_refused() {
        let size = |dtype, shape| quantized_size(dtype, shape).map_err(|error| error.to_string());
        assert_eq!(size(DType::Q4_0, [2, 64]), Ok(2 * 36));
        for (dtype, shape, want) in [
            (DType::Q4_0, [2, 33], "q4_0: 33 values are not a multiple of the block of 32"),
            (DType::Q4K, [2, 128], "q4_K: 128 values are not a multiple of the block of 256"),
            (DType::Turbo3, [2, 128], "expected a type of weights, got turbo3"),
            (DType::F32, [0, 32], "weights: expected rows and columns, got [0, 32]"),
            (DType::F32, [2, 0], "weights: expected rows and columns, got [2, 0]"),
        ] {
            assert_eq!(size(dtype, shape), Err(want.to_owned()));
        }
        assert!(size(DType::F32, [usize::MAX, 64]).is_err());
        let products = Products::on_cpu(Activations::EightBit, Some(1)).unwrap();
        let refused = |result: Result<(), LinearError>| result.unwrap_err().to_string();
        let w = products.load(DType::F32, [3, 2], vec![0; 24]).unwrap();
        let short = products.load(DType::F32, [3, 2], vec![0; 23]).map(|_| ());
        assert_eq!(refused(short), "weights: expected 24 bytes for [3, 2] of f32, got 23 bytes");
        let nan = products.load(DType::F32, [1, 2], f32::NAN.to_le_bytes().repeat(2)).map(|_| ());
        assert_eq!(refused(nan), "weights: row 0 holds NaN or an infinity");
        let inf = quantize_weights(DType::Q8_0, &[f32::INFINITY; 64], [2, 32]).map(|_| ());
        assert_eq!(refused(inf), "weights: row 0 holds NaN or an infinity");
        let few = quantize_weights(DType::Q8_0, &[0.0; 63], [2, 32]).map(|_| ());
        assert_eq!(refused(few), "weights: expected [2, 32], got 63");
        let mut y = [0.0; 3];
        assert_eq!(
            refused(products.gemv_quantized(&w, &[0.0; 3], &mut y)),
            "x: expected rows of 2, got 3 values"
        );
        let wrong = products.gemv_quantized(&w, &[0.0; 4], &mut y);
        assert_eq!(refused(wrong), "y: expected [2, 3], got 3 values");
        let norm = RmsNorm { gain: &[1.0], eps: 0.0 };
        let gain = products.fused_rmsnorm_gemv_quantized(&w, norm, &[0.0; 2], &mut y);
        assert_eq!(refused(gain), "gain: expected 2, got 1 values");
    }
}
