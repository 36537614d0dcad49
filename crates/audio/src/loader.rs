//! Tensors of an encoder's file, as weights on a device.

use std::collections::HashSet;

use kvant_backend::{Backend, WeightSource};
use kvant_codec::DType;
use kvant_gguf::Gguf;
use kvant_model::linear::{Linear, upload};
use kvant_model::{ModelError, check_finite, decode_values};

pub(crate) struct Loader<'a, B: Backend> {
    pub gguf: &'a Gguf,
    pub device: &'a B,
    /// Names of the tensors read so far.
    used: HashSet<String>,
}

impl<'a, B: Backend> Loader<'a, B> {
    pub fn new(gguf: &'a Gguf, device: &'a B) -> Self {
        Self { gguf, device, used: HashSet::new() }
    }

    /// Rejects a file with a tensor of an audio encoder that has not been read.
    pub fn finish(self) -> Result<(), ModelError> {
        let is_ours = |name: &str| name.starts_with("a.") || name.starts_with("mm.a.");
        let mut unused = self.gguf.tensors().iter().filter(|info| !self.used.contains(&info.name));
        match unused.find(|info| is_ours(&info.name)) {
            Some(info) => Err(ModelError::Unsupported { what: format!("tensor '{}'", info.name) }),
            None => Ok(()),
        }
    }

    /// Returns the last axis of a tensor: the outputs of a matrix or a convolution.
    pub fn n_out(&self, name: &str) -> Result<usize, ModelError> {
        Ok(self.gguf.tensor(name)?.info.shape.last().copied().unwrap_or(0))
    }

    pub fn values(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>, ModelError> {
        let tensor = self.gguf.tensor(name)?;
        self.used.insert(name.to_owned());
        decode_values(&tensor, shape)
    }

    /// Loads a matrix, or the kernels of a convolution as one, and its bias if there is one.
    pub fn linear(&mut self, name: &str, [n_in, n_out]: [usize; 2]) -> Result<Linear<B>, ModelError> {
        let weight = format!("{name}.weight");
        let tensor = self.gguf.tensor(&weight)?;
        let info = tensor.info;
        if info.elements() != n_in * n_out || info.shape.last() != Some(&n_out) {
            let (expected, got) = (vec![n_in, n_out], info.shape.clone());
            return Err(ModelError::TensorShape { name: weight, expected, got });
        }
        check_finite(info, &tensor.bytes)?;
        let bytes = tensor.bytes.to_vec().into();
        let w = self.device.upload_matrix(WeightSource { dtype: info.dtype, n_out, n_in, bytes })?;
        self.used.insert(weight);
        Ok(Linear { w, bias: self.bias(&format!("{name}.bias"), n_out)? })
    }

    /// Loads a value that may be absent, or an infinity.
    pub fn limit(&mut self, name: &str, default: f32) -> Result<f32, ModelError> {
        let Some(info) = self.gguf.find_info(name) else { return Ok(default) };
        let invalid = |got: String| {
            let expected = "one value of type f32, which is a number".to_owned();
            Err(ModelError::Value { key: name.to_owned(), expected, got })
        };
        let data = self.gguf.data(info);
        let value = match (info.dtype, <[u8; 4]>::try_from(&data[..])) {
            (DType::F32, Ok(bytes)) => f32::from_le_bytes(bytes),
            (dtype, _) => return invalid(format!("{} of type {dtype}", info.elements())),
        };
        if value.is_nan() {
            return invalid(value.to_string());
        }
        self.used.insert(name.to_owned());
        Ok(value)
    }

    /// Loads a bias. Those of convolutions have the axes of the convolution.
    fn bias(&mut self, name: &str, n: usize) -> Result<Option<B::Buffer>, ModelError> {
        let Some(info) = self.gguf.find_info(name) else { return Ok(None) };
        let shape = if info.elements() == n { info.shape.clone() } else { vec![n] };
        let values = self.values(name, &shape)?;
        Ok(Some(upload(self.device, &values)?))
    }
}
