//! Weights of a vision encoder, on a device.

use std::collections::HashSet;
use std::ops::Range;

use kvant_backend::{Backend, WeightSource};
use kvant_codec::DType;
use kvant_gguf::Gguf;
use kvant_model::linear::{Linear, upload};
use kvant_model::{ModelError, check_finite, decode_values};

use crate::config::{Config, Projector};

/// A norm before products. The bias of a LayerNorm is folded into the products that follow.
pub(crate) enum Norm<B: Backend> {
    Layer(B::Buffer),
    Rms(B::Buffer),
}

impl<B: Backend> Norm<B> {
    /// Returns the number of values that are normalized together.
    pub fn width(&self) -> usize {
        let (Self::Layer(weight) | Self::Rms(weight)) = self;
        kvant_backend::Buffer::n_values(weight)
    }
}

/// One layer.
pub(crate) struct Layer<B: Backend> {
    pub attn_norm: Norm<B>,
    /// Projections of queries, keys and values.
    pub qkv: [Linear<B>; 3],
    pub out: Linear<B>,
    pub ffn_norm: Norm<B>,
    pub gate: Option<Linear<B>>,
    pub up: Linear<B>,
    pub down: Linear<B>,
}

/// Projector, from the output of the last layer to rows.
pub(crate) struct ProjectorWeights<B: Backend> {
    /// Applied to concatenated neighbours, or to patches where its width is that of one.
    pub norm: Option<(Norm<B>, f32)>,
    /// Merges neighbours first.
    pub merger: Option<Linear<B>>,
    pub first: Linear<B>,
    /// After an activation.
    pub second: Option<Linear<B>>,
}

/// All weights, from patch embedding to projector.
pub(crate) struct Weights<B: Backend> {
    pub patches: Linear<B>,
    /// Class token, in front of the patches.
    pub class: Option<Vec<f32>>,
    /// Position embeddings, `[rows, n_embd]`.
    pub positions: Vec<f32>,
    /// Before the first layer.
    pub pre_norm: Option<NormAndBias<B>>,
    pub layers: Vec<Layer<B>>,
    /// Behind the last one.
    pub post_norm: Option<NormAndBias<B>>,
    pub projector: ProjectorWeights<B>,
    /// Projectors of [`Config::deep`].
    pub deep: Vec<ProjectorWeights<B>>,
}

/// A norm and its bias.
pub(crate) type NormAndBias<B> = (Norm<B>, Option<Vec<f32>>);

/// Epsilon of projector norms, which files lack.
const EPS: f32 = 1e-5;

impl<B: Backend> Weights<B> {
    pub fn load(gguf: &Gguf, config: &Config, device: &B) -> Result<Self, ModelError> {
        let mut loader = Loader { gguf, device, used: HashSet::new() };
        let weights = loader.encoder(config)?;
        let is_audio = |name: &str| name.starts_with("mm.a.");
        let is_ours = |name: &str| name.starts_with("v.") || name.starts_with("mm.") && !is_audio(name);
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
        let pixels = 3 * c.patch_size * c.patch_size;
        let patches = match c.projector {
            Projector::Qwen25 | Projector::Qwen3 => self.patches_of_frames([pixels, c.n_embd])?,
            _ => self.linear("v.patch_embd", [pixels, c.n_embd], None, None)?,
        };
        let class = self.optional("v.class_embd", &[c.n_embd])?;
        const POSITIONS: &str = "v.position_embd.weight";
        let n_positions = match c.projector {
            Projector::Pixtral | Projector::Qwen25 => None,
            // Position embeddings of a square grid, interpolated for each image.
            Projector::Lfm2 | Projector::Qwen3 | Projector::PaddleOcr => {
                Some(self.find(POSITIONS).map_or(1, |n| n.isqrt().pow(2).max(1)))
            }
            Projector::Idefics3 | Projector::InternVl => {
                Some((c.image_size / c.patch_size).pow(2) + usize::from(class.is_some()))
            }
        };
        let positions =
            n_positions.map(|n| self.values(POSITIONS, &[c.n_embd, n])).transpose()?.unwrap_or_default();
        let [pre_norm, post_norm] =
            ["v.pre_ln", "v.post_ln"].map(|name| match self.find(&format!("{name}.weight")) {
                Some(_) => self.norm(name, c.n_embd).map(Some),
                None => Ok(None),
            });
        let (pre_norm, post_norm) = (pre_norm?, post_norm?);
        let layers = (0..c.n_layers).map(|index| self.layer(c, index)).collect::<Result<_, _>>()?;
        let deep =
            c.deep.iter().map(|&layer| self.deepstack_projector(c, layer)).collect::<Result<_, _>>()?;
        Ok(Weights { patches, class, positions, pre_norm, layers, post_norm, projector: self.head(c)?, deep })
    }

    /// Loads the patch embedding of two video frames as the sum of its matrices, since both frames
    /// of an image are equal.
    fn patches_of_frames(&mut self, shape: [usize; 2]) -> Result<Linear<B>, ModelError> {
        const FRAMES: [&str; 2] = ["v.patch_embd.weight", "v.patch_embd.weight.1"];
        let [n_in, n_out] = shape;
        let mut sum = vec![0.0; n_in * n_out];
        for name in FRAMES {
            let tensor = self.gguf.tensor(name)?;
            if tensor.info.elements() != sum.len() {
                let (expected, got) = (vec![n_in, n_out], tensor.info.shape.clone());
                return Err(ModelError::TensorShape { name: name.to_owned(), expected, got });
            }
            let values = self.values(name, &tensor.info.shape)?;
            sum.iter_mut().zip(values).for_each(|(sum, x)| *sum += x);
        }
        let bytes = bytemuck::cast_slice(&sum).to_vec().into();
        let w = self.device.upload_matrix(WeightSource { dtype: DType::F32, n_out, n_in, bytes })?;
        let bias = self.optional("v.patch_embd.bias", &[n_out])?;
        Ok(Linear { w, bias: bias.map(|bias| self.upload(&bias)).transpose()? })
    }

    /// Loads a DeepStack projector.
    fn deepstack_projector(&mut self, c: &Config, layer: usize) -> Result<ProjectorWeights<B>, ModelError> {
        let name = |of: &str| format!("v.deepstack.{layer}.{of}");
        let side_by_side = c.n_embd * c.n_merge * c.n_merge;
        let (norm, added) = self.norm(&name("norm"), side_by_side)?;
        let hidden = self.find(&name("fc1.weight")).unwrap_or(c.n_embd_text);
        let first = self.linear(&name("fc1"), [side_by_side, hidden], added.as_deref(), None)?;
        let second = Some(self.linear(&name("fc2"), [hidden, c.n_embd_text], None, None)?);
        Ok(ProjectorWeights { norm: Some((norm, c.eps)), merger: None, first, second })
    }

    fn layer(&mut self, c: &Config, index: usize) -> Result<Layer<B>, ModelError> {
        let name = |of: &str| format!("v.blk.{index}.{of}");
        let (n, n_ff) = (c.n_embd, c.n_ff);
        let (attn_norm, added) = self.norm(&name("ln1"), n)?;
        let is_fused = self.find(&name("attn_qkv.weight")).is_some();
        let mut qkv = Vec::with_capacity(3);
        for (index, part) in ["attn_q", "attn_k", "attn_v"].into_iter().enumerate() {
            qkv.push(match is_fused {
                true => {
                    let rows = index * n..(index + 1) * n;
                    self.rows_of(&name("attn_qkv"), [n, 3 * n], rows, added.as_deref(), None)?
                }
                false => self.linear(&name(part), [n, n], added.as_deref(), None)?,
            });
        }
        let scale = self.optional(&name("ls1.weight"), &[n])?;
        let out = self.linear(&name("attn_out"), [n, n], None, scale.as_deref())?;
        let (ffn_norm, added) = self.norm(&name("ln2"), n)?;
        // Older converters swap the names of these two.
        let is_swapped = self
            .gguf
            .find_info(&name("ffn_up.weight"))
            .is_some_and(|info| n != n_ff && info.row_len() == n_ff);
        let [up, down] = if is_swapped { ["ffn_down", "ffn_up"] } else { ["ffn_up", "ffn_down"] };
        let gate = match self.find(&name("ffn_gate.weight")) {
            Some(_) => Some(self.linear(&name("ffn_gate"), [n, n_ff], added.as_deref(), None)?),
            None => None,
        };
        let up = self.linear(&name(up), [n, n_ff], added.as_deref(), None)?;
        let scale = self.optional(&name("ls2.weight"), &[n])?;
        let down = self.linear(&name(down), [n_ff, n], None, scale.as_deref())?;
        let qkv = qkv.try_into().unwrap_or_else(|_| unreachable!("three of them"));
        Ok(Layer { attn_norm, qkv, out, ffn_norm, gate, up, down })
    }

    fn head(&mut self, c: &Config) -> Result<ProjectorWeights<B>, ModelError> {
        let (n, n_text, side_by_side) = (c.n_embd, c.n_embd_text, c.n_embd * c.n_merge * c.n_merge);
        let n_hidden = |of: &Self, name: &str| of.find(name).unwrap_or(n_text);
        Ok(match c.projector {
            Projector::Idefics3 => {
                let first = self.linear("mm.model.fc", [side_by_side, n_text], None, None)?;
                ProjectorWeights { norm: None, merger: None, first, second: None }
            }
            Projector::InternVl => {
                let (norm, added) = self.norm("mm.model.mlp.0", side_by_side)?;
                let hidden = n_hidden(self, "mm.model.mlp.1.weight");
                let first = self.linear("mm.model.mlp.1", [side_by_side, hidden], added.as_deref(), None)?;
                let second = Some(self.linear("mm.model.mlp.3", [hidden, n_text], None, None)?);
                ProjectorWeights { norm: Some((norm, EPS)), merger: None, first, second }
            }
            Projector::Lfm2 => {
                let normed = match self.find("mm.input_norm.weight") {
                    Some(_) => Some(self.norm("mm.input_norm", side_by_side)?),
                    None => None,
                };
                let (norm, added) = normed.map_or((None, None), |(norm, added)| (Some((norm, EPS)), added));
                let hidden = n_hidden(self, "mm.1.weight");
                let first = self.linear("mm.1", [side_by_side, hidden], added.as_deref(), None)?;
                let second = Some(self.linear("mm.2", [hidden, n_text], None, None)?);
                ProjectorWeights { norm, merger: None, first, second }
            }
            Projector::Qwen25 | Projector::Qwen3 => {
                let hidden = n_hidden(self, "mm.0.weight");
                let first = self.linear("mm.0", [side_by_side, hidden], None, None)?;
                let second = Some(self.linear("mm.2", [hidden, n_text], None, None)?);
                ProjectorWeights { norm: None, merger: None, first, second }
            }
            Projector::PaddleOcr => {
                let (norm, added) = self.norm("mm.input_norm", n)?;
                let added = added.map(|added| added.repeat(c.n_merge * c.n_merge));
                let hidden = n_hidden(self, "mm.1.weight");
                let first = self.linear("mm.1", [side_by_side, hidden], added.as_deref(), None)?;
                let second = Some(self.linear("mm.2", [hidden, n_text], None, None)?);
                ProjectorWeights { norm: Some((norm, EPS)), merger: None, first, second }
            }
            Projector::Pixtral => {
                let (mut norm, mut merger) = (None, None);
                if c.n_merge > 1 {
                    norm = Some((self.norm("mm.input_norm", n)?.0, c.eps));
                    merger = Some(self.linear("mm.patch_merger", [side_by_side, n], None, None)?);
                }
                // The text model has this token too.
                self.used.insert("v.token_embd.img_break".to_owned());
                let hidden = n_hidden(self, "mm.1.weight");
                let first = self.linear("mm.1", [n, hidden], None, None)?;
                let second = Some(self.linear("mm.2", [hidden, n_text], None, None)?);
                ProjectorWeights { norm, merger, first, second }
            }
        })
    }

    /// Returns the number of rows of a tensor, if the file has it.
    fn find(&self, name: &str) -> Option<usize> {
        self.gguf.find_info(name).map(|info| info.rows())
    }

    fn values(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>, ModelError> {
        let tensor = self.gguf.tensor(name)?;
        self.used.insert(name.to_owned());
        decode_values(&tensor, shape)
    }

    fn optional(&mut self, name: &str, shape: &[usize]) -> Result<Option<Vec<f32>>, ModelError> {
        if self.find(name).is_some() { self.values(name, shape).map(Some) } else { Ok(None) }
    }

    fn upload(&self, values: &[f32]) -> Result<B::Buffer, ModelError> {
        Ok(upload(self.device, values)?)
    }

    /// Loads a norm: with a bias it is a LayerNorm, otherwise an RMSNorm.
    fn norm(&mut self, name: &str, len: usize) -> Result<NormAndBias<B>, ModelError> {
        let weight = self.values(&format!("{name}.weight"), &[len])?;
        let weight = self.upload(&weight)?;
        let added = self.optional(&format!("{name}.bias"), &[len])?;
        Ok(if added.is_some() { (Norm::Layer(weight), added) } else { (Norm::Rms(weight), None) })
    }

    /// Loads a matrix: `added` is the bias of the norm before it, `scale` a factor per output.
    fn linear(
        &mut self,
        name: &str,
        shape: [usize; 2],
        added: Option<&[f32]>,
        scale: Option<&[f32]>,
    ) -> Result<Linear<B>, ModelError> {
        self.rows_of(name, shape, 0..shape[1], added, scale)
    }

    /// Loads a range of rows of a matrix.
    fn rows_of(
        &mut self,
        name: &str,
        [n_in, n_rows]: [usize; 2],
        rows: Range<usize>,
        added: Option<&[f32]>,
        scale: Option<&[f32]>,
    ) -> Result<Linear<B>, ModelError> {
        let weight = format!("{name}.weight");
        let tensor = self.gguf.tensor(&weight)?;
        self.used.insert(weight.clone());
        let info = tensor.info;
        // The patch embedding has three input dimensions.
        if info.elements() != n_in * n_rows
            || info.shape.last() != Some(&n_rows)
            || !n_in.is_multiple_of(info.row_len())
        {
            let (name, expected) = (weight, vec![n_in, n_rows]);
            return Err(ModelError::TensorShape { name, expected, got: info.shape.clone() });
        }
        check_finite(info, &tensor.bytes)?;
        let bias = self.optional(&format!("{name}.bias"), &[n_rows])?;
        let mut bias = bias.map(|bias| bias[rows.clone()].to_vec());
        let (n_out, row_bytes) = (rows.len(), tensor.bytes.len() / n_rows);
        let own = rows.start * row_bytes..rows.end * row_bytes;
        let (mut dtype, mut bytes) = (info.dtype, tensor.bytes[own].to_vec());
        if let Some(scale) = scale {
            let mut values = decode_values(&tensor, &info.shape)?;
            values
                .chunks_exact_mut(n_in)
                .zip(scale)
                .for_each(|(row, by)| row.iter_mut().for_each(|x| *x *= by));
            (dtype, bytes) = (DType::F32, bytemuck::cast_slice(&values).to_vec());
            bias.iter_mut().flatten().zip(scale).for_each(|(bias, by)| *bias *= by);
        }
        let w = self.device.upload_matrix(WeightSource { dtype, n_out, n_in, bytes: bytes.into() })?;
        let mut linear = Linear { w, bias: None };
        if let Some(added) = added {
            let through = linear.forward(self.device, added)?;
            match &mut bias {
                Some(bias) => bias.iter_mut().zip(through).for_each(|(bias, x)| *bias += x),
                None => bias = Some(through),
            }
        }
        linear.bias = bias.map(|bias| self.upload(&bias)).transpose()?;
        Ok(linear)
    }
}
