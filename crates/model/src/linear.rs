//! Products with a bias, for encoders.

use kvant_backend::{Backend, BackendError, Input, Matrix, Output};

/// `y = W x + b`.
pub struct Linear<B: Backend> {
    /// W, `[n_out, n_in]`.
    pub w: B::Matrix,
    /// b, `[n_out]`.
    pub bias: Option<B::Buffer>,
}

impl<B: Backend> Linear<B> {
    /// Describes this product as an output of a projection; `accumulate` adds it to `y`.
    pub fn output<'a>(&'a self, y: &'a mut B::Buffer, accumulate: bool) -> Output<'a, B> {
        Output { w: &self.w, bias: self.bias.as_ref(), y, accumulate }
    }

    /// Computes `W x + b` for rows on the host, `[rows, n_in]`.
    ///
    /// # Errors
    /// Those of the device.
    pub fn forward(&self, device: &B, rows: &[f32]) -> Result<Vec<f32>, BackendError> {
        let n = rows.len() / self.w.n_in();
        let mut out = vec![0.0; n * self.w.n_out()];
        let (x, mut y) = (upload(device, rows)?, device.buffer(out.len())?);
        device.project(all_rows(&x, n), &mut [self.output(&mut y, false)])?;
        device.read(&y, 0, &mut out)?;
        Ok(out)
    }
}

/// Describes rows as input of a projection, without a norm.
pub fn all_rows<B: Backend>(x: &B::Buffer, rows: usize) -> Input<'_, B> {
    Input { x, norm: None, first_row: 0, rows }
}

/// Returns a new buffer with these values.
///
/// # Errors
/// Those of the device.
pub fn upload<B: Backend>(device: &B, values: &[f32]) -> Result<B::Buffer, BackendError> {
    let mut buffer = device.buffer(values.len())?;
    device.write(&mut buffer, values)?;
    Ok(buffer)
}
