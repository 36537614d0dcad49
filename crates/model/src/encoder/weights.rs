//! Weights of an encoder, on a device. Tensors have llama.cpp's names.

use std::collections::HashSet;
use std::ops::Range;

use kvant_backend::{Backend, WeightSource};
use kvant_codec::DType;
use kvant_gguf::{Gguf, TensorInfo};

use super::config::{EncoderConfig, Positions};
use crate::linear::{Linear, upload};
use crate::retype::{convert, retyped};
use crate::{ModelError, check_finite, decode_values};

/// LayerNorm with a bias, `[n_embd]` each.
pub(super) struct Norm {
    pub weight: Vec<f32>,
    pub bias: Vec<f32>,
}

pub(super) struct Layer<B: Backend> {
    pub qkv: [Linear<B>; 3],
    pub out: Linear<B>,
    /// After attention.
    pub attn_norm: Norm,
    pub gate: Option<Linear<B>>,
    pub up: Linear<B>,
    pub down: Linear<B>,
    /// After the feed-forward layer.
    pub ffn_norm: Norm,
}

/// The head of a model that ranks: `y = W_2 tanh(W_1 x + b_1) + b_2`, without the first where
/// the file lacks it.
pub(super) struct Classifier<B: Backend> {
    pub dense: Option<Linear<B>>,
    pub output: Linear<B>,
}

pub(super) struct Weights<B: Backend> {
    pub tokens: B::Matrix,
    /// `[n_types, n_embd]`; empty where the model has none.
    pub types: Vec<f32>,
    /// `[n_ctx, n_embd]`; empty with RoPE.
    pub positions: Vec<f32>,
    /// Biases by bucket of the distance, `[n_buckets, n_heads]`.
    pub relative: Vec<f32>,
    pub embedding_norm: Norm,
    pub layers: Vec<Layer<B>>,
    pub classifier: Option<Classifier<B>>,
    /// Bytes in the file's types, or those to which they are converted.
    pub n_bytes: usize,
}

impl<B: Backend> Weights<B> {
    /// Loads all tensors, matrices as `dtype` if it is given.
    pub fn load(
        gguf: &Gguf,
        c: &EncoderConfig,
        dtype: Option<DType>,
        device: &B,
    ) -> Result<Self, ModelError> {
        let mut loader = Loader { gguf, device, dtype, used: HashSet::new(), n_bytes: 0 };
        let weights = loader.all(c)?;
        match gguf.tensors().iter().find(|info| !loader.used.contains(&info.name)) {
            Some(info) => Err(ModelError::Unsupported { what: format!("tensor '{}'", info.name) }),
            None => Ok(Self { n_bytes: loader.n_bytes, ..weights }),
        }
    }
}

struct Loader<'a, B: Backend> {
    gguf: &'a Gguf,
    device: &'a B,
    dtype: Option<DType>,
    /// Names of the tensors read so far.
    used: HashSet<String>,
    n_bytes: usize,
}

impl<B: Backend> Loader<'_, B> {
    fn all(&mut self, c: &EncoderConfig) -> Result<Weights<B>, ModelError> {
        const TYPES: &str = "token_types.weight";
        let n = c.n_embd;
        let n_vocab = self.gguf.tensor("token_embd.weight")?.info.rows();
        let tokens = self.source("token_embd.weight", [n, n_vocab], 0..n_vocab)?;
        let tokens = self.device.table(tokens)?;
        let types = match self.gguf.find_info(TYPES).map(TensorInfo::rows) {
            Some(n_types) => self.values(TYPES, &[n, n_types])?,
            None => Vec::new(),
        };
        let positions = match c.positions {
            Positions::Rotary { .. } => Vec::new(),
            _ => self.values("position_embd.weight", &[n, c.n_ctx])?,
        };
        let relative = match c.positions {
            Positions::LearnedAndRelative { n_buckets } => {
                self.values("attn_rel_b.weight", &[c.n_heads, n_buckets])?
            }
            _ => Vec::new(),
        };
        let embedding_norm = self.norm("token_embd_norm", n)?;
        let layers = (0..c.n_layers).map(|index| self.layer(c, index)).collect::<Result<_, _>>()?;
        let classifier = self.classifier(n)?;
        Ok(Weights { tokens, types, positions, relative, embedding_norm, layers, classifier, n_bytes: 0 })
    }

    fn layer(&mut self, c: &EncoderConfig, index: usize) -> Result<Layer<B>, ModelError> {
        let name = |of: &str| format!("blk.{index}.{of}");
        let (n, n_ff) = (c.n_embd, c.n_ff);
        let fused = name("attn_qkv");
        let qkv = match self.has(&fused) {
            true => [0, 1, 2].map(|part| self.rows_of(&fused, [n, 3 * n], part * n..(part + 1) * n)),
            false => ["attn_q", "attn_k", "attn_v"].map(|part| self.linear(&name(part), [n, n])),
        };
        let [q, k, v] = qkv;
        let gate = match c.positions {
            Positions::Rotary { .. } => Some(self.linear(&name("ffn_gate"), [n, n_ff])?),
            _ => None,
        };
        Ok(Layer {
            qkv: [q?, k?, v?],
            out: self.linear(&name("attn_output"), [n, n])?,
            attn_norm: self.norm(&name("attn_output_norm"), n)?,
            gate,
            up: self.linear(&name("ffn_up"), [n, n_ff])?,
            down: self.linear(&name("ffn_down"), [n_ff, n])?,
            ffn_norm: self.norm(&name("layer_output_norm"), n)?,
        })
    }

    fn classifier(&mut self, n: usize) -> Result<Option<Classifier<B>>, ModelError> {
        if !self.has("cls.output") {
            return Ok(None);
        }
        let dense = if self.has("cls") { Some(self.linear("cls", [n, n])?) } else { None };
        Ok(Some(Classifier { dense, output: self.linear("cls.output", [n, 1])? }))
    }

    /// Whether the file has the matrix of a product.
    fn has(&self, name: &str) -> bool {
        self.gguf.find_info(&format!("{name}.weight")).is_some()
    }

    fn values(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>, ModelError> {
        let tensor = self.gguf.tensor(name)?;
        self.used.insert(name.to_owned());
        self.n_bytes += tensor.bytes.len();
        decode_values(&tensor, shape)
    }

    fn norm(&mut self, name: &str, n: usize) -> Result<Norm, ModelError> {
        let weight = self.values(&format!("{name}.weight"), &[n])?;
        Ok(Norm { weight, bias: self.values(&format!("{name}.bias"), &[n])? })
    }

    fn linear(&mut self, name: &str, shape: [usize; 2]) -> Result<Linear<B>, ModelError> {
        self.rows_of(name, shape, 0..shape[1])
    }

    /// Loads a range of rows of a matrix `[n_in, n_rows]`, and of its bias.
    fn rows_of(
        &mut self,
        name: &str,
        [n_in, n_rows]: [usize; 2],
        rows: Range<usize>,
    ) -> Result<Linear<B>, ModelError> {
        let source = self.source(&format!("{name}.weight"), [n_in, n_rows], rows.clone())?;
        let w = self.device.upload_matrix(source)?;
        let bias = format!("{name}.bias");
        let bias = match self.gguf.find_info(&bias) {
            Some(_) => {
                let values = self.values(&bias, &[n_rows])?;
                Some(upload(self.device, &values[rows])?)
            }
            None => None,
        };
        Ok(Linear { w, bias })
    }

    /// Reads a range of rows of a matrix.
    fn source(
        &mut self,
        name: &str,
        [n_in, n_rows]: [usize; 2],
        rows: Range<usize>,
    ) -> Result<WeightSource, ModelError> {
        let tensor = self.gguf.tensor(name)?;
        let info = tensor.info;
        // Writers differ in trailing dimensions of 1.
        if info.row_len() != n_in || info.elements() != n_in * n_rows {
            let (name, expected) = (name.to_owned(), vec![n_in, n_rows]);
            return Err(ModelError::TensorShape { name, expected, got: info.shape.clone() });
        }
        self.used.insert(name.to_owned());
        check_finite(info, &tensor.bytes)?;
        let row_bytes = tensor.bytes.len() / n_rows;
        let own = &tensor.bytes[rows.start * row_bytes..rows.end * row_bytes];
        let (n_out, dtype) = (rows.len(), self.dtype.map_or(info.dtype, |dtype| retyped(info, dtype)));
        let bytes = match dtype == info.dtype {
            true => own.to_vec(),
            false => convert(info.dtype, own, n_in * n_out, dtype).map_err(|error| ModelError::Value {
                key: name.to_owned(),
                expected: format!("values that become {dtype}"),
                got: error.to_string(),
            })?,
        };
        self.n_bytes += bytes.len();
        Ok(WeightSource { dtype, n_out, n_in, bytes: bytes.into() })
    }
}
