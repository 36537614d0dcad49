//! The weights of a model: from tensors of a GGUF file to matrices on a device.

use std::collections::HashSet;
use std::sync::Arc;

use kvant_backend::{Backend, SharedBytes, WeightSource};
use kvant_gguf::{Gguf, TensorInfo, TensorView};

use crate::{Config, ModelError};

/// The weights of one decoder layer. Matrices are `[n_out, n_in]`.
pub struct Layer<B: Backend> {
    pub(crate) attn_norm: B::Buffer,
    pub(crate) wq: B::Matrix,
    pub(crate) wk: B::Matrix,
    pub(crate) wv: B::Matrix,
    pub(crate) wo: B::Matrix,
    pub(crate) bq: Option<B::Buffer>,
    pub(crate) bk: Option<B::Buffer>,
    pub(crate) bv: Option<B::Buffer>,
    pub(crate) bo: Option<B::Buffer>,
    pub(crate) q_norm: Option<B::Buffer>,
    pub(crate) k_norm: Option<B::Buffer>,
    pub(crate) ffn_norm: B::Buffer,
    pub(crate) gate: B::Matrix,
    pub(crate) up: B::Matrix,
    pub(crate) down: B::Matrix,
}

/// All weights of a model.
pub struct Weights<B: Backend> {
    pub(crate) embedding: B::Matrix,
    pub(crate) layers: Vec<Layer<B>>,
    pub(crate) output_norm: B::Buffer,
    /// The output matrix; `None` when it is the embedding.
    pub(crate) output: Option<B::Matrix>,
    pub(crate) n_vocab: usize,
    pub(crate) n_bytes: usize,
    /// Bytes of an embedding that is not the output matrix as well.
    pub(crate) lookup_bytes: usize,
}

impl<B: Backend> Weights<B> {
    /// Loads every tensor of the model. `progress` is told the fraction done after each layer.
    ///
    /// # Errors
    /// A missing tensor, a shape that does not fit the hyper-parameters, or a device error.
    pub fn load(
        gguf: &Arc<Gguf>,
        config: &Config,
        backend: &B,
        progress: &mut dyn FnMut(f32),
    ) -> Result<Self, ModelError> {
        let mut loader =
            Loader { gguf, backend, n_bytes: 0, used: HashSet::from(["rope_freqs.weight".to_owned()]) };
        let n_embd = config.n_embd;
        let n_vocab = gguf.tensor("token_embd.weight")?.info.rows();
        let embedding = match loader.has("output.weight") {
            true => backend.table(loader.source("token_embd.weight", n_embd, n_vocab)?)?,
            false => loader.matrix("token_embd.weight", n_embd, n_vocab)?,
        };
        let embedding_bytes = loader.n_bytes;
        let mut layers = Vec::with_capacity(config.n_layers);
        for index in 0..config.n_layers {
            layers.push(loader.layer(config, index)?);
            // What the device has repacked need not stay in memory twice.
            gguf.release();
            progress((index + 1) as f32 / (config.n_layers + 1) as f32);
        }
        let output_norm = loader.vector("output_norm.weight", n_embd)?;
        let output = match loader.has("output.weight") {
            true => Some(loader.matrix("output.weight", n_embd, n_vocab)?),
            false => None,
        };
        loader.refuse_unused()?;
        gguf.release();
        progress(1.0);
        let lookup_bytes = if output.is_some() { embedding_bytes } else { 0 };
        Ok(Self { embedding, layers, output_norm, output, n_vocab, n_bytes: loader.n_bytes, lookup_bytes })
    }
}

struct Loader<'a, B: Backend> {
    gguf: &'a Arc<Gguf>,
    backend: &'a B,
    n_bytes: usize,
    used: HashSet<String>,
}

impl<B: Backend> Loader<'_, B> {
    fn layer(&mut self, c: &Config, index: usize) -> Result<Layer<B>, ModelError> {
        let name = |suffix: &str| format!("blk.{index}.{suffix}");
        let (n_q, n_k, n_v) =
            (c.n_heads * c.k_head_dim, c.n_kv_heads * c.k_head_dim, c.n_kv_heads * c.v_head_dim);
        Ok(Layer {
            attn_norm: self.vector(&name("attn_norm.weight"), c.n_embd)?,
            wq: self.matrix(&name("attn_q.weight"), c.n_embd, n_q)?,
            wk: self.matrix(&name("attn_k.weight"), c.n_embd, n_k)?,
            wv: self.matrix(&name("attn_v.weight"), c.n_embd, n_v)?,
            wo: self.matrix(&name("attn_output.weight"), c.n_heads * c.v_head_dim, c.n_embd)?,
            bq: self.optional_vector(&name("attn_q.bias"), n_q)?,
            bk: self.optional_vector(&name("attn_k.bias"), n_k)?,
            bv: self.optional_vector(&name("attn_v.bias"), n_v)?,
            bo: self.optional_vector(&name("attn_output.bias"), c.n_embd)?,
            q_norm: self.optional_vector(&name("attn_q_norm.weight"), c.k_head_dim)?,
            k_norm: self.optional_vector(&name("attn_k_norm.weight"), c.k_head_dim)?,
            ffn_norm: self.vector(&name("ffn_norm.weight"), c.n_embd)?,
            gate: self.matrix(&name("ffn_gate.weight"), c.n_embd, c.n_ff)?,
            up: self.matrix(&name("ffn_up.weight"), c.n_embd, c.n_ff)?,
            down: self.matrix(&name("ffn_down.weight"), c.n_ff, c.n_embd)?,
        })
    }

    fn has(&self, name: &str) -> bool {
        self.gguf.find_tensor(name).is_some()
    }

    fn matrix(&mut self, name: &str, n_in: usize, n_out: usize) -> Result<B::Matrix, ModelError> {
        let source = self.source(name, n_in, n_out)?;
        Ok(self.backend.matrix(source)?)
    }

    fn source(&mut self, name: &str, n_in: usize, n_out: usize) -> Result<WeightSource, ModelError> {
        let tensor = self.gguf.tensor(name)?;
        check_shape(&tensor, &[n_in, n_out])?;
        self.used.insert(name.to_owned());
        self.n_bytes += tensor.bytes.len();
        let bytes = shared_bytes(self.gguf, &tensor);
        Ok(WeightSource { dtype: tensor.info.dtype, n_out, n_in, bytes })
    }

    fn vector(&mut self, name: &str, len: usize) -> Result<B::Buffer, ModelError> {
        let tensor = self.gguf.tensor(name)?;
        self.used.insert(name.to_owned());
        self.n_bytes += tensor.bytes.len();
        let values = decode_vector(&tensor, len)?;
        let mut buffer = self.backend.buffer(len)?;
        self.backend.write(&mut buffer, &values)?;
        Ok(buffer)
    }

    fn optional_vector(&mut self, name: &str, len: usize) -> Result<Option<B::Buffer>, ModelError> {
        if self.has(name) { self.vector(name, len).map(Some) } else { Ok(None) }
    }

    /// A tensor that nobody asked for belongs to a feature that is not implemented; leaving it out would give
    /// other logits without a word.
    fn refuse_unused(&self) -> Result<(), ModelError> {
        match self.gguf.tensors().iter().find(|info| !self.used.contains(&info.name)) {
            Some(info) => Err(ModelError::Unsupported { what: format!("tensor '{}'", info.name) }),
            None => Ok(()),
        }
    }
}

/// The bytes of a tensor, kept alive by the file they lie in: a device can read a mapped matrix where it is.
fn shared_bytes(gguf: &Arc<Gguf>, tensor: &TensorView<'_>) -> SharedBytes {
    struct TensorBytes(Arc<Gguf>, TensorInfo);
    impl AsRef<[u8]> for TensorBytes {
        fn as_ref(&self) -> &[u8] {
            self.0.data(&self.1)
        }
    }
    let owner = TensorBytes(Arc::clone(gguf), tensor.info.clone());
    SharedBytes::new(Arc::new(owner), 0..tensor.bytes.len()).expect("a tensor is as long as it is")
}

/// A one-dimensional tensor of `len` values in f32.
pub(crate) fn decode_vector(tensor: &TensorView<'_>, len: usize) -> Result<Vec<f32>, ModelError> {
    check_shape(tensor, &[len])?;
    let mut values = vec![0.0; len];
    kvant_codec::decode(tensor.info.dtype, tensor.bytes, &mut values).map_err(|error| ModelError::Value {
        key: tensor.info.name.clone(),
        expected: format!("{len} values"),
        got: error.to_string(),
    })?;
    Ok(values)
}

/// Trailing dimensions of 1 are ignored, as writers differ in them.
fn check_shape(tensor: &TensorView<'_>, expected: &[usize]) -> Result<(), ModelError> {
    let got = &tensor.info.shape;
    let significant = got.len() - got.iter().rev().take_while(|&&n| n == 1).count();
    if got[..significant] == *expected || got == expected {
        return Ok(());
    }
    Err(ModelError::TensorShape {
        name: tensor.info.name.clone(),
        expected: expected.to_vec(),
        got: got.clone(),
    })
}
