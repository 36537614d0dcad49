//! Weights of an encoder, on a device. Tensors have llama.cpp's names.

use std::collections::HashSet;
use std::ops::Range;
use std::{iter, slice};

use kvant_backend::{Backend, WeightSource};
use kvant_codec::DType;
use kvant_gguf::{Gguf, TensorInfo};

use super::config::{EncoderConfig, Positions};
use super::family::SublayerNorms;
use crate::linear::{Linear, upload};
use crate::retype::{convert, retyped};
use crate::{ModelError, check_finite, decode_values};

/// A norm of rows, or of parts of them, as long as the weight.
pub(super) struct Norm<B: Backend> {
    pub weight: B::Buffer,
    /// As long.
    pub bias: Option<B::Buffer>,
    pub eps: f32,
}

impl<B: Backend> Norm<B> {
    /// Returns the norm without its bias.
    pub fn scaling(&self) -> kvant_backend::Norm<'_, B::Buffer> {
        kvant_backend::Norm { weight: &self.weight, eps: self.eps }
    }
}

pub(super) struct Layer<B: Backend> {
    pub attn_norms: SublayerNorms<Norm<B>>,
    pub qkv: [Linear<B>; 3],
    /// Of queries and keys.
    pub qk_norms: Option<[Norm<B>; 2]>,
    pub out: Linear<B>,
    pub ffn_norms: SublayerNorms<Norm<B>>,
    pub ffn: FeedForward<B>,
}

/// A feed-forward layer, or the experts in its place.
pub(super) enum FeedForward<B: Backend> {
    Dense { gate: Option<Linear<B>>, up: Linear<B>, down: Linear<B> },
    Experts { router: Linear<B>, experts: Vec<Expert<B>> },
}

/// An expert: a feed-forward layer without a gate.
pub(super) struct Expert<B: Backend> {
    pub up: Linear<B>,
    pub down: Linear<B>,
}

/// The first products of a feed-forward layer.
struct GatedUp<B: Backend> {
    gate: Option<Linear<B>>,
    up: Linear<B>,
}

/// The head of a model that ranks: `y = W_2 norm(a(W_1 x + b_1)) + b_2`, without what the file
/// lacks.
pub(super) struct Classifier<B: Backend> {
    pub dense: Option<Linear<B>>,
    pub norm: Option<Norm<B>>,
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
    pub embedding_norm: Option<Norm<B>>,
    pub layers: Vec<Layer<B>>,
    pub output_norm: Option<Norm<B>>,
    pub classifier: Option<Classifier<B>>,
    /// Products behind pooling, one after the other (`Dense` of sentence-transformers).
    pub dense: Vec<Linear<B>>,
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
        let tokens = self.source("token_embd.weight", [n, n_vocab], slice::from_ref(&(0..n_vocab)))?;
        let tokens = self.device.table(tokens)?;
        let types = match self.gguf.find_info(TYPES).map(TensorInfo::rows) {
            Some(n_types) => self.values(TYPES, &[n, n_types])?,
            None => Vec::new(),
        };
        let positions = match c.positions {
            Positions::Rotary { .. } | Positions::Alibi => Vec::new(),
            Positions::Learned | Positions::LearnedAndRelative { .. } => {
                self.values("position_embd.weight", &[n, c.n_ctx])?
            }
        };
        let relative = match c.positions {
            Positions::LearnedAndRelative { n_buckets } => {
                self.values("attn_rel_b.weight", &[c.heads.n, n_buckets])?
            }
            _ => Vec::new(),
        };
        let has_norm = c.family.has_embedding_norm;
        let embedding_norm = if has_norm { Some(self.norm(c, "token_embd_norm", n)?) } else { None };
        let layers = (0..c.reaches.len()).map(|index| self.layer(c, index)).collect::<Result<_, _>>()?;
        let output_norm = c.family.output_norm.map(|name| self.norm(c, name, n)).transpose()?;
        let (classifier, dense) = (self.classifier(c)?, self.dense(n)?);
        Ok(Weights {
            tokens,
            types,
            positions,
            relative,
            embedding_norm,
            layers,
            output_norm,
            classifier,
            dense,
            n_bytes: 0,
        })
    }

    fn layer(&mut self, c: &EncoderConfig, index: usize) -> Result<Layer<B>, ModelError> {
        let name = |of: &str| format!("blk.{index}.{of}");
        let (n, n_ff, family) = (c.n_embd, c.n_ff, c.family);
        let width = c.heads.n * c.heads.dim;
        let mut attn_norms = family.attn_norms;
        let is_first = index == 0 && family.first_input_is_normed;
        attn_norms.input = attn_norms.input.filter(|of| !is_first || self.has(&name(of)));
        let qk_norms = match family.has_qk_norm {
            true => {
                let [q, k] = ["attn_q_norm", "attn_k_norm"].map(|of| self.norm(c, &name(of), c.heads.dim));
                Some([q?, k?])
            }
            false => None,
        };
        let ffn = match c.experts.filter(|experts| experts.are_in(index)) {
            Some(experts) => self.experts(&name, [n, n_ff], experts.n)?,
            None => {
                let GatedUp { gate, up } = self.gated_up(&name, [n, n_ff], family.is_gated)?;
                FeedForward::Dense { gate, up, down: self.linear(&name("ffn_down"), [n_ff, n])? }
            }
        };
        Ok(Layer {
            attn_norms: attn_norms.try_map(|of| self.norm(c, &name(of), n))?,
            qkv: self.qkv(c, &name)?,
            qk_norms,
            out: self.linear(&name("attn_output"), [width, n])?,
            ffn_norms: family.ffn_norms.try_map(|of| self.norm(c, &name(of), n))?,
            ffn,
        })
    }

    /// Loads the products of queries, keys and values: one below the other, as a whole or head by
    /// head, or each by itself.
    fn qkv(
        &mut self,
        c: &EncoderConfig,
        name: &impl Fn(&str) -> String,
    ) -> Result<[Linear<B>; 3], ModelError> {
        let (n, dim) = (c.n_embd, c.heads.dim);
        let fused = name("attn_qkv");
        let heads = [c.heads.n, c.n_kv_heads, c.n_kv_heads];
        if !self.has(&fused) {
            let parts = [("attn_q", heads[0]), ("attn_k", heads[1]), ("attn_v", heads[2])];
            let [q, k, v] = parts.map(|(part, heads)| self.linear(&name(part), [n, heads * dim]));
            return Ok([q?, k?, v?]);
        }
        if c.family.joins_heads && c.n_kv_heads != c.heads.n {
            let what = format!("'{fused}.weight' with {} KV heads for {} heads", c.n_kv_heads, c.heads.n);
            return Err(ModelError::Unsupported { what });
        }
        let rows_of_part = |part: usize| -> Vec<Range<usize>> {
            let first: usize = heads[..part].iter().sum();
            match c.family.joins_heads {
                true => {
                    (0..c.heads.n).map(|head| (3 * head + part) * dim..(3 * head + part + 1) * dim).collect()
                }
                false => iter::once(first * dim..(first + heads[part]) * dim).collect(),
            }
        };
        let all = heads.iter().sum::<usize>() * dim;
        let [q, k, v] = [0, 1, 2].map(|part| self.some_rows_of(&fused, [n, all], &rows_of_part(part)));
        Ok([q?, k?, v?])
    }

    /// Loads the product that is gated and that of its gate, which may be above it in one matrix.
    fn gated_up(
        &mut self,
        name: &impl Fn(&str) -> String,
        [n, n_ff]: [usize; 2],
        is_gated: bool,
    ) -> Result<GatedUp<B>, ModelError> {
        let (gate, up) = (name("ffn_gate"), name("ffn_up"));
        if !is_gated {
            return Ok(GatedUp { gate: None, up: self.linear(&up, [n, n_ff])? });
        }
        if self.has(&gate) {
            let gate = Some(self.linear(&gate, [n, n_ff])?);
            return Ok(GatedUp { gate, up: self.linear(&up, [n, n_ff])? });
        }
        let both = [n, n_ff.saturating_mul(2)];
        let gate = Some(self.rows_of(&up, both, 0..n_ff)?);
        Ok(GatedUp { gate, up: self.rows_of(&up, both, n_ff..both[1])? })
    }

    /// Loads a router and its experts, whose matrices are one below the other.
    fn experts(
        &mut self,
        name: &impl Fn(&str) -> String,
        [n, n_ff]: [usize; 2],
        n_experts: usize,
    ) -> Result<FeedForward<B>, ModelError> {
        let router = self.linear(&name("ffn_gate_inp"), [n, n_experts])?;
        let (up, down) = (name("ffn_up_exps"), name("ffn_down_exps"));
        let [all_up, all_down] = [n_ff, n].map(|rows| rows.saturating_mul(n_experts));
        let expert = |index: usize| {
            Ok(Expert {
                up: self.rows_of(&up, [n, all_up], index * n_ff..(index + 1) * n_ff)?,
                down: self.rows_of(&down, [n_ff, all_down], index * n..(index + 1) * n)?,
            })
        };
        let experts = (0..n_experts).map(expert).collect::<Result<_, ModelError>>()?;
        Ok(FeedForward::Experts { router, experts })
    }

    fn classifier(&mut self, c: &EncoderConfig) -> Result<Option<Classifier<B>>, ModelError> {
        const NORM: &str = "cls.norm";
        let n = c.n_embd;
        if !self.has("cls.output") {
            return Ok(None);
        }
        let dense = if self.has("cls") { Some(self.linear("cls", [n, n])?) } else { None };
        let norm = if self.has(NORM) { Some(self.norm(c, NORM, n)?) } else { None };
        Ok(Some(Classifier { dense, norm, output: self.linear("cls.output", [n, 1])? }))
    }

    /// Loads the products behind pooling, the first of which reads `n` values.
    fn dense(&mut self, mut n: usize) -> Result<Vec<Linear<B>>, ModelError> {
        let mut all = Vec::new();
        for name in ["dense_2", "dense_3"] {
            if let Some(info) = self.gguf.find_info(&format!("{name}.weight")) {
                let n_out = info.rows();
                all.push(self.linear(name, [n, n_out])?);
                n = n_out;
            }
        }
        Ok(all)
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

    fn norm(&mut self, c: &EncoderConfig, name: &str, n: usize) -> Result<Norm<B>, ModelError> {
        let weight = upload(self.device, &self.values(&format!("{name}.weight"), &[n])?)?;
        let bias = match c.family.has_norm_bias {
            true => Some(upload(self.device, &self.values(&format!("{name}.bias"), &[n])?)?),
            false => None,
        };
        Ok(Norm { weight, bias, eps: c.eps })
    }

    fn linear(&mut self, name: &str, shape: [usize; 2]) -> Result<Linear<B>, ModelError> {
        self.rows_of(name, shape, 0..shape[1])
    }

    /// Loads a range of rows of a matrix `[n_in, n_rows]`, and of its bias.
    fn rows_of(
        &mut self,
        name: &str,
        shape: [usize; 2],
        rows: Range<usize>,
    ) -> Result<Linear<B>, ModelError> {
        self.some_rows_of(name, shape, slice::from_ref(&rows))
    }

    /// Loads several ranges of rows of a matrix, and of its bias.
    fn some_rows_of(
        &mut self,
        name: &str,
        shape: [usize; 2],
        rows: &[Range<usize>],
    ) -> Result<Linear<B>, ModelError> {
        let source = self.source(&format!("{name}.weight"), shape, rows)?;
        let w = self.device.upload_matrix(source)?;
        let bias = format!("{name}.bias");
        let bias = match self.gguf.find_info(&bias) {
            Some(_) => {
                let values = self.values(&bias, &shape[1..])?;
                let own: Vec<f32> = rows.iter().flat_map(|rows| &values[rows.clone()]).copied().collect();
                Some(upload(self.device, &own)?)
            }
            None => None,
        };
        Ok(Linear { w, bias })
    }

    /// Reads some rows of a matrix.
    fn source(
        &mut self,
        name: &str,
        [n_in, n_rows]: [usize; 2],
        rows: &[Range<usize>],
    ) -> Result<WeightSource, ModelError> {
        let tensor = self.gguf.tensor(name)?;
        let info = tensor.info;
        // Writers differ in trailing dimensions of 1.
        if info.row_len() != n_in || info.elements() != n_in.saturating_mul(n_rows) {
            let (name, expected) = (name.to_owned(), vec![n_in, n_rows]);
            return Err(ModelError::TensorShape { name, expected, got: info.shape.clone() });
        }
        // A tensor of several matrices is checked once, completely.
        if self.used.insert(name.to_owned()) {
            check_finite(info, &tensor.bytes)?;
        }
        let row_bytes = tensor.bytes.len() / n_rows;
        let bytes_of = |rows: &Range<usize>| &tensor.bytes[rows.start * row_bytes..rows.end * row_bytes];
        let own = rows.iter().map(bytes_of).collect::<Vec<_>>().concat();
        let n_out = rows.iter().map(Range::len).sum();
        let dtype = self.dtype.map_or(info.dtype, |dtype| retyped(info, dtype));
        let bytes = match dtype == info.dtype {
            true => own,
            false => convert(info.dtype, &own, n_in * n_out, dtype).map_err(|error| ModelError::Value {
                key: name.to_owned(),
                expected: format!("values that become {dtype}"),
                got: error.to_string(),
            })?,
        };
        self.n_bytes += bytes.len();
        Ok(WeightSource { dtype, n_out, n_in, bytes: bytes.into() })
    }
}
