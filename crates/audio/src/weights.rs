//! Weights of an audio encoder, on a device.

use std::collections::HashSet;

use kvant_backend::{Backend, WeightSource};
use kvant_gguf::Gguf;
use kvant_model::linear::{Linear, upload};
use kvant_model::{ModelError, check_finite, decode_values};

use crate::config::{Config, Projector};

/// LayerNorm.
pub(crate) struct Norm<B: Backend> {
    pub weight: B::Buffer,
    pub bias: B::Buffer,
}

/// One layer.
pub(crate) struct Layer<B: Backend> {
    pub attn_norm: Norm<B>,
    /// Projections of queries, keys and values.
    pub qkv: [Linear<B>; 3],
    pub out: Linear<B>,
    pub ffn_norm: Norm<B>,
    pub up: Linear<B>,
    pub down: Linear<B>,
}

/// Layers between the spectrogram and the transformer.
pub(crate) enum Front<B: Backend> {
    /// Whisper: two convolutions over time, the second with stride 2.
    Whisper([Linear<B>; 2]),
    /// Qwen3: three convolutions over mel bins and time with stride 2, and a product that joins
    /// channels and bins.
    Qwen3 { convolutions: [Linear<B>; 3], out: Linear<B> },
}

/// All weights, from the convolutions to the projector.
pub(crate) struct Weights<B: Backend> {
    pub front: Front<B>,
    /// Position embeddings, `[n_positions, n_embd]`.
    pub positions: Vec<f32>,
    pub layers: Vec<Layer<B>>,
    /// Behind the last layer.
    pub post_norm: Norm<B>,
    /// The matrices of the projector, with an activation between two.
    pub projector: Vec<Linear<B>>,
}

impl<B: Backend> Weights<B> {
    pub fn load(gguf: &Gguf, config: &Config, device: &B) -> Result<Self, ModelError> {
        let mut loader = Loader { gguf, device, used: HashSet::new() };
        let weights = loader.encoder(config)?;
        let is_ours = |name: &str| name.starts_with("a.") || name.starts_with("mm.a.");
        let mut unused = gguf.tensors().iter().filter(|info| !loader.used.contains(&info.name));
        match unused.find(|info| is_ours(&info.name)) {
            Some(info) => Err(ModelError::Unsupported { what: format!("tensor '{}'", info.name) }),
            None => Ok(weights),
        }
    }
}

struct Loader<'a, B: Backend> {
    gguf: &'a Gguf,
    device: &'a B,
    /// Names of the tensors read so far.
    used: HashSet<String>,
}

impl<B: Backend> Loader<'_, B> {
    fn encoder(&mut self, c: &Config) -> Result<Weights<B>, ModelError> {
        let (n, n_text) = (c.n_embd, c.n_embd_text);
        let front = match c.projector {
            Projector::Voxtral | Projector::Qwen2 => Front::Whisper([
                self.linear("a.conv1d.1", [3 * c.n_mels, n])?,
                self.linear("a.conv1d.2", [3 * n, n])?,
            ]),
            Projector::Qwen3 => self.qwen3_front(c)?,
        };
        let projector = match c.projector {
            Projector::Voxtral => self.mlp([c.n_stacked * n, n_text, n_text])?,
            Projector::Qwen2 => vec![self.linear("mm.a.fc", [n, n_text])?],
            Projector::Qwen3 => self.mlp([n, n, n_text])?,
        };
        Ok(Weights {
            front,
            positions: self.values("a.position_embd.weight", &[n, c.n_positions])?,
            layers: (0..c.n_layers).map(|index| self.layer(c, index)).collect::<Result<_, _>>()?,
            post_norm: self.norm("a.post_ln", n)?,
            projector,
        })
    }

    /// Loads the convolutions of Qwen3: the number of channels is that of the first one's outputs.
    fn qwen3_front(&mut self, c: &Config) -> Result<Front<B>, ModelError> {
        let channels = self.gguf.tensor("a.conv2d.1.weight")?.info.shape.last().copied().unwrap_or(0);
        let convolutions = [
            self.linear("a.conv2d.1", [9, channels])?,
            self.linear("a.conv2d.2", [9 * channels, channels])?,
            self.linear("a.conv2d.3", [9 * channels, channels])?,
        ];
        let n_bins = c.n_mels.div_ceil(8);
        Ok(Front::Qwen3 { convolutions, out: self.linear("a.conv_out", [channels * n_bins, c.n_embd])? })
    }

    /// Loads the two matrices of an MLP between these widths.
    fn mlp(&mut self, [n_in, n_hidden, n_out]: [usize; 3]) -> Result<Vec<Linear<B>>, ModelError> {
        Ok(vec![self.linear("mm.a.mlp.1", [n_in, n_hidden])?, self.linear("mm.a.mlp.2", [n_hidden, n_out])?])
    }

    fn layer(&mut self, c: &Config, index: usize) -> Result<Layer<B>, ModelError> {
        let name = |of: &str| format!("a.blk.{index}.{of}");
        let n = c.n_embd;
        Ok(Layer {
            attn_norm: self.norm(&name("ln1"), n)?,
            qkv: [
                self.linear(&name("attn_q"), [n, n])?,
                self.linear(&name("attn_k"), [n, n])?,
                self.linear(&name("attn_v"), [n, n])?,
            ],
            out: self.linear(&name("attn_out"), [n, n])?,
            ffn_norm: self.norm(&name("ln2"), n)?,
            up: self.linear(&name("ffn_up"), [n, c.n_ff])?,
            down: self.linear(&name("ffn_down"), [c.n_ff, n])?,
        })
    }

    fn values(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>, ModelError> {
        let tensor = self.gguf.tensor(name)?;
        self.used.insert(name.to_owned());
        decode_values(&tensor, shape)
    }

    fn norm(&mut self, name: &str, len: usize) -> Result<Norm<B>, ModelError> {
        let [weight, bias] = ["weight", "bias"].map(|of| self.values(&format!("{name}.{of}"), &[len]));
        Ok(Norm { weight: upload(self.device, &weight?)?, bias: upload(self.device, &bias?)? })
    }

    /// Loads a matrix, or the kernels of a convolution as one, and its bias if there is one.
    fn linear(&mut self, name: &str, [n_in, n_out]: [usize; 2]) -> Result<Linear<B>, ModelError> {
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

    /// Loads a bias. Those of convolutions have the axes of the convolution.
    fn bias(&mut self, name: &str, n: usize) -> Result<Option<B::Buffer>, ModelError> {
        let Some(info) = self.gguf.find_info(name) else { return Ok(None) };
        let shape = if info.elements() == n { info.shape.clone() } else { vec![n] };
        let values = self.values(name, &shape)?;
        Ok(Some(upload(self.device, &values)?))
    }
}
