//! Conformers (arXiv 2005.08100) of Gemma 3n and 4, descendants of the Universal Speech Model
//! (arXiv 2303.01037).
//!
//! ```text
//! x = W_in convolutions(mel)
//! x = x + ffn(x) / 2
//! x = x + norm(W_o attention(norm(x)))
//! x = x + W_end silu(norm(kernel * glu(W_start norm(x))))
//! x = norm(x + ffn'(x) / 2)
//! ffn(x) = norm(W_down silu(W_up norm(x)))
//! ```
//!
//! Position i attends to the last positions up to itself, j with i - j < reach. Its score is
//! `50 tanh(q_i · (k_j + r_(i - j)) / 50)`, with relative keys r = W_r [sin, cos] of the distance
//! (arXiv 1901.02860). Norms are RMSNorm. `transformers` also cuts values beyond 1e10, which none
//! reaches.

use kvant_backend::host_ops::{Pointwise, apply, apply_to_row, for_rows};
use kvant_backend::{Backend, Matrix, limits};
use kvant_model::ModelError;
use kvant_model::linear::Linear;

use crate::config::{Config, Projector};
use crate::convolution::Convolution;
use crate::error::AudioError;
use crate::features::GEMMA3N_ROWS;
use crate::loader::Loader;
use crate::rows::{add, cumulative_norm, layer_norm, normalized, rms_norm};

/// Longest and shortest wavelength of relative positions: 2π and 2π times this.
const MAX_TIMESCALE: f64 = 10_000.0;
/// Soft cap of the scores.
const SOFT_CAP: f32 = 50.0;
/// Positions that the depthwise convolution reads: up to its own.
const KERNEL: usize = 5;
/// Outputs of Gemma 3n's conformer per row.
const GEMMA3N_REDUCTION: usize = 4;

/// A conformer on a device.
pub(crate) struct Conformer<B: Backend> {
    front: [Subsampling<B>; 2],
    input: Linear<B>,
    layers: Vec<Layer<B>>,
    head: Head<B>,
}

/// A convolution with stride 2 over time and mel bins, a norm, and ReLU.
struct Subsampling<B: Backend> {
    kernels: Linear<B>,
    /// `[channels]`
    norm: Vec<f32>,
}

struct Layer<B: Backend> {
    first: FeedForward<B>,
    attention: Attention<B>,
    convolution: LightConvolution<B>,
    second: FeedForward<B>,
    norm: Vec<f32>,
}

/// Half of it is added to the residual stream.
struct FeedForward<B: Backend> {
    norm: Vec<f32>,
    up: Clipped<B>,
    down: Clipped<B>,
    post_norm: Vec<f32>,
}

struct Attention<B: Backend> {
    norm: Vec<f32>,
    qkv: [Clipped<B>; 3],
    /// Factors of a head's query, `[head_dim]`.
    query_scale: Vec<f32>,
    /// Factor of the keys.
    key_scale: f32,
    /// By distance, `[reach, n_embd]`.
    relative_keys: Vec<f32>,
    out: Clipped<B>,
    post_norm: Vec<f32>,
}

/// A gated depthwise convolution over time.
struct LightConvolution<B: Backend> {
    norm: Vec<f32>,
    start: Clipped<B>,
    /// `[n_embd, KERNEL]`, the last one for the position itself.
    kernel: Vec<f32>,
    kernel_norm: Vec<f32>,
    end: Clipped<B>,
}

/// From outputs of the layers to rows of the text model.
enum Head<B: Backend> {
    Gemma3n {
        soft_norm: Vec<f32>,
        projection: Linear<B>,
        /// The row of a window after those of the clip.
        padding: Vec<f32>,
        /// The row that ends a clip.
        end: Vec<f32>,
    },
    Gemma4 {
        output: Linear<B>,
        projection: Linear<B>,
    },
}

/// A product whose inputs and outputs are limited to ranges of training.
struct Clipped<B: Backend> {
    linear: Linear<B>,
    input: [f32; 2],
    output: [f32; 2],
}

impl<B: Backend> Clipped<B> {
    fn load(loader: &mut Loader<'_, B>, name: &str, shape: [usize; 2]) -> Result<Self, ModelError> {
        let mut range = |of: &str| {
            let min = loader.limit(&format!("{name}.{of}_min"), f32::NEG_INFINITY)?;
            let max = loader.limit(&format!("{name}.{of}_max"), f32::INFINITY)?;
            if min > max {
                let (key, expected) = (format!("{name}.{of}_max"), format!("at least {min}, the minimum"));
                return Err(ModelError::Value { key, expected, got: max.to_string() });
            }
            Ok([min, max])
        };
        let (input, output) = (range("input")?, range("output")?);
        Ok(Self { linear: loader.linear(name, shape)?, input, output })
    }

    /// Computes the product of rows `[n, n_in]`.
    fn forward(&self, device: &B, rows: &[f32]) -> Result<Vec<f32>, AudioError> {
        let clamp = |rows: &mut [f32], [min, max]: [f32; 2]| {
            if min > f32::NEG_INFINITY || max < f32::INFINITY {
                rows.iter_mut().for_each(|x| *x = x.clamp(min, max));
            }
        };
        let mut rows = rows.to_vec();
        clamp(&mut rows, self.input);
        let mut out = self.linear.forward(device, &rows)?;
        clamp(&mut out, self.output);
        Ok(out)
    }
}

impl<B: Backend> FeedForward<B> {
    /// Loads the first one of a layer, or the second one, whose names end in `_1`.
    fn load(loader: &mut Loader<'_, B>, c: &Config, layer: usize, end: &str) -> Result<Self, ModelError> {
        let name = |of: &str| format!("a.blk.{layer}.{of}{end}");
        Ok(Self {
            norm: loader.values(&format!("{}.weight", name("ffn_norm")), &[c.n_embd])?,
            up: Clipped::load(loader, &name("ffn_up"), [c.n_embd, c.n_ff])?,
            down: Clipped::load(loader, &name("ffn_down"), [c.n_ff, c.n_embd])?,
            post_norm: loader.values(&format!("{}.weight", name("ffn_post_norm")), &[c.n_embd])?,
        })
    }

    /// Adds half of the output to rows `[n, n_embd]`.
    fn add(&self, device: &B, c: &Config, x: &mut [f32]) -> Result<(), AudioError> {
        let mut hidden = self.up.forward(device, &normalized(x, &self.norm, c.eps))?;
        apply(&mut hidden, Pointwise::Silu);
        let out = self.down.forward(device, &hidden)?;
        let out = normalized(&out, &self.post_norm, c.eps);
        x.iter_mut().zip(&out).for_each(|(x, y)| *x += 0.5 * y);
        Ok(())
    }
}

impl<B: Backend> Attention<B> {
    fn load(loader: &mut Loader<'_, B>, c: &Config, layer: usize) -> Result<Self, ModelError> {
        let (n, head_dim) = (c.n_embd, c.head_dim());
        let name = |of: &str| format!("a.blk.{layer}.{of}");
        let is_gemma3n = c.projector == Projector::Gemma3n;
        let [norm, post_norm, relative, query_scale] = match is_gemma3n {
            true => ["ln1.weight", "ln2.weight", "linear_pos", "per_dim_scale"],
            false => ["attn_pre_norm.weight", "attn_post_norm.weight", "attn_k_rel", "per_dim_scale.weight"],
        };
        let reach = if is_gemma3n { 13 } else { 12 };
        let relative = loader.linear(&name(relative), [n, n])?;
        let relative_keys = relative.forward(loader.device, &sinusoids(reach, n))?;
        let mut query_scale = loader.values(&name(query_scale), &[head_dim])?;
        if is_gemma3n {
            // Files of Gemma 4 have the result.
            query_scale.iter_mut().for_each(|x| *x = softplus(*x));
        }
        let scale = 1.0 / ((head_dim as f32).sqrt() * std::f32::consts::LN_2);
        query_scale.iter_mut().for_each(|x| *x *= scale);
        Ok(Self {
            norm: loader.values(&name(norm), &[n])?,
            qkv: [
                Clipped::load(loader, &name("attn_q"), [n, n])?,
                Clipped::load(loader, &name("attn_k"), [n, n])?,
                Clipped::load(loader, &name("attn_v"), [n, n])?,
            ],
            query_scale,
            key_scale: if is_gemma3n { 1.0 } else { softplus(1.0) / std::f32::consts::LN_2 },
            relative_keys,
            out: Clipped::load(loader, &name("attn_out"), [n, n])?,
            post_norm: loader.values(&name(post_norm), &[n])?,
        })
    }

    /// Adds the output to rows `[n, n_embd]`.
    fn add(&self, device: &B, c: &Config, x: &mut [f32]) -> Result<(), AudioError> {
        let normed = normalized(x, &self.norm, c.eps);
        let [w_q, w_k, w_v] = &self.qkv;
        let [mut q, mut k] = [w_q.forward(device, &normed)?, w_k.forward(device, &normed)?];
        let v = w_v.forward(device, &normed)?;
        let by_head = q.chunks_exact_mut(c.head_dim());
        by_head.for_each(|q| q.iter_mut().zip(&self.query_scale).for_each(|(q, scale)| *q *= scale));
        k.iter_mut().for_each(|k| *k *= self.key_scale);
        let out = self.out.forward(device, &self.attend(c, &q, &k, &v))?;
        add(x, &normalized(&out, &self.post_norm, c.eps));
        Ok(())
    }

    /// Computes attention of rows `[n, n_embd]` with scaled queries and keys.
    fn attend(&self, c: &Config, q: &[f32], k: &[f32], v: &[f32]) -> Vec<f32> {
        let (n, head_dim) = (c.n_embd, c.head_dim());
        let reach = self.relative_keys.len() / n;
        let mut out = vec![0.0; q.len()];
        let mut weights = Vec::with_capacity(reach);
        for (at, (out, q)) in out.chunks_exact_mut(head_dim).zip(q.chunks_exact(head_dim)).enumerate() {
            let (position, head) = (at / c.n_heads, at % c.n_heads * head_dim);
            let of_row = |row: usize| row * n + head..row * n + head + head_dim;
            weights.clear();
            weights.extend((0..reach.min(position + 1)).map(|distance| {
                let (key, relative) =
                    (&k[of_row(position - distance)], &self.relative_keys[of_row(distance)]);
                let products = q.iter().zip(key.iter().zip(relative));
                let score: f32 = products.map(|(q, (key, relative))| q * (key + relative)).sum();
                SOFT_CAP * (score / SOFT_CAP).tanh()
            }));
            let max = weights.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            weights.iter_mut().for_each(|weight| *weight = (*weight - max).exp());
            let sum: f32 = weights.iter().sum();
            for (distance, weight) in weights.iter().enumerate() {
                let values = &v[of_row(position - distance)];
                out.iter_mut().zip(values).for_each(|(out, value)| *out += weight / sum * value);
            }
        }
        out
    }
}

impl<B: Backend> LightConvolution<B> {
    fn load(loader: &mut Loader<'_, B>, c: &Config, layer: usize) -> Result<Self, ModelError> {
        let n = c.n_embd;
        let name = |of: &str| format!("a.blk.{layer}.{of}");
        Ok(Self {
            // The names of the two norms are exchanged in files.
            norm: loader.values(&name("conv_norm.weight"), &[n])?,
            start: Clipped::load(loader, &name("conv_pw1"), [n, 2 * n])?,
            kernel: loader.values(&name("conv_dw.weight"), &[KERNEL, n])?,
            kernel_norm: loader.values(&name("norm_conv.weight"), &[n])?,
            end: Clipped::load(loader, &name("conv_pw2"), [n, n])?,
        })
    }

    /// Adds the output to rows `[n, n_embd]`.
    fn add(&self, device: &B, c: &Config, x: &mut [f32]) -> Result<(), AudioError> {
        let n = c.n_embd;
        let mut gated = self.start.forward(device, &normalized(x, &self.norm, c.eps))?;
        for_rows(&mut gated, 2 * n, limits::n_cores(), |row| {
            let (values, gates) = row.split_at_mut(n);
            gates.iter_mut().zip(values).for_each(|(gate, value)| *gate = *value / (1.0 + (-*gate).exp()));
        });
        let gated: Vec<&[f32]> = gated.chunks_exact(2 * n).map(|row| &row[n..]).collect();
        let mut convolved = vec![0.0; x.len()];
        for (position, out) in convolved.chunks_exact_mut(n).enumerate() {
            for distance in 0..KERNEL.min(position + 1) {
                let kernel = self.kernel[KERNEL - 1 - distance..].iter().step_by(KERNEL);
                let products = gated[position - distance].iter().zip(kernel);
                out.iter_mut().zip(products).for_each(|(out, (value, kernel))| *out += value * kernel);
            }
        }
        for_rows(&mut convolved, n, limits::n_cores(), |row| {
            rms_norm(row, Some(&self.kernel_norm), c.eps);
            apply_to_row(row, Pointwise::Silu);
        });
        add(x, &self.end.forward(device, &convolved)?);
        Ok(())
    }
}

impl<B: Backend> Head<B> {
    fn load(loader: &mut Loader<'_, B>, c: &Config) -> Result<Self, ModelError> {
        if c.projector == Projector::Gemma4 {
            let n_out = loader.n_out("a.pre_encode.out.weight")?;
            return Ok(Self::Gemma4 {
                output: loader.linear("a.pre_encode.out", [c.n_embd, n_out])?,
                projection: loader.linear("mm.a.input_projection", [n_out, c.n_embd_text])?,
            });
        }
        let n = c.n_embd;
        let n_tokens = loader.n_out("mm.a.embedding.weight")?;
        let embedding = loader.values("mm.a.embedding.weight", &[n, n_tokens])?;
        let hard_norm = loader.values("mm.a.hard_emb_norm.weight", &[n])?;
        let soft_norm = loader.values("mm.a.soft_emb_norm.weight", &[n])?;
        let projection = loader.linear("mm.a.input_projection", [n, c.n_embd_text])?;
        // The embedding of the token that ends audio is the first, that of padding the last.
        let tokens = [&embedding[..n], &embedding[embedding.len() - n..]].concat();
        let mut rows = projection.forward(loader.device, &normalized(&tokens, &hard_norm, c.eps))?;
        rows.chunks_exact_mut(c.n_embd_text).for_each(|row| rms_norm(row, None, c.eps));
        let padding = rows.split_off(c.n_embd_text);
        Ok(Self::Gemma3n { soft_norm, projection, padding, end: rows })
    }

    /// Projects outputs of the layers of a window, `[n, n_embd]`.
    fn rows(&self, device: &B, c: &Config, x: &[f32]) -> Result<Vec<f32>, AudioError> {
        match self {
            Self::Gemma4 { output, projection } => {
                let mut x = output.forward(device, x)?;
                let n_out = output.w.n_out();
                for_rows(&mut x, n_out, limits::n_cores(), |row| rms_norm(row, None, c.eps));
                Ok(projection.forward(device, &x)?)
            }
            Self::Gemma3n { soft_norm, projection, padding, .. } => {
                let kept = x.chunks_exact(c.n_embd).step_by(GEMMA3N_REDUCTION).flatten().copied();
                let kept: Vec<f32> = kept.collect();
                let mut rows = projection.forward(device, &normalized(&kept, soft_norm, c.eps))?;
                rows.chunks_exact_mut(c.n_embd_text).for_each(|row| rms_norm(row, None, c.eps));
                let n_padding = GEMMA3N_ROWS - rows.len() / c.n_embd_text;
                rows.extend(padding.repeat(n_padding));
                Ok(rows)
            }
        }
    }
}

impl<B: Backend> Layer<B> {
    fn load(loader: &mut Loader<'_, B>, c: &Config, index: usize) -> Result<Self, ModelError> {
        let norm = if c.projector == Projector::Gemma3n { "layer_pre_norm" } else { "ln2" };
        Ok(Self {
            first: FeedForward::load(loader, c, index, "")?,
            attention: Attention::load(loader, c, index)?,
            convolution: LightConvolution::load(loader, c, index)?,
            second: FeedForward::load(loader, c, index, "_1")?,
            norm: loader.values(&format!("a.blk.{index}.{norm}.weight"), &[c.n_embd])?,
        })
    }
}

impl<B: Backend> Conformer<B> {
    pub fn load(loader: &mut Loader<'_, B>, c: &Config) -> Result<Self, ModelError> {
        let channels = [loader.n_out("a.conv1d.0.weight")?, loader.n_out("a.conv1d.1.weight")?];
        let mut subsampling = |index: usize, n_in: usize| {
            let name = format!("a.conv1d.{index}");
            Ok::<_, ModelError>(Subsampling {
                kernels: loader.linear(&name, [9 * n_in, channels[index]])?,
                norm: loader.values(&format!("{name}.norm.weight"), &[channels[index]])?,
            })
        };
        let front = [subsampling(0, 1)?, subsampling(1, channels[0])?];
        let input = match c.projector {
            Projector::Gemma3n => "a.pre_encode.out",
            _ => "a.input_projection",
        };
        let n_bins = c.n_mels.div_ceil(4);
        Ok(Self {
            front,
            input: loader.linear(input, [n_bins * channels[1], c.n_embd])?,
            layers: (0..c.n_layers).map(|index| Layer::load(loader, c, index)).collect::<Result<_, _>>()?,
            head: Head::load(loader, c)?,
        })
    }

    /// Encodes a window `[frames, n_mels]`. Returns its rows `[n, n_embd_text]`.
    pub fn rows(&self, device: &B, c: &Config, window: &[f32]) -> Result<Vec<f32>, AudioError> {
        let mut x = self.embed(device, c, window)?;
        for layer in &self.layers {
            layer.first.add(device, c, &mut x)?;
            layer.attention.add(device, c, &mut x)?;
            layer.convolution.add(device, c, &mut x)?;
            layer.second.add(device, c, &mut x)?;
            for_rows(&mut x, c.n_embd, limits::n_cores(), |row| rms_norm(row, Some(&layer.norm), c.eps));
        }
        self.head.rows(device, c, &x)
    }

    /// Returns the rows behind the last window.
    pub fn end(&self) -> &[f32] {
        match &self.head {
            Head::Gemma3n { end, .. } => end,
            Head::Gemma4 { .. } => &[],
        }
    }

    /// Embeds frames `[n, n_mels]`, four at a time.
    fn embed(&self, device: &B, c: &Config, window: &[f32]) -> Result<Vec<f32>, AudioError> {
        let is_gemma3n = c.projector == Projector::Gemma3n;
        // Outputs of Gemma 3n read no frame before their own.
        let before = if is_gemma3n { [0, 1] } else { [1, 1] };
        let convolution = Convolution { kernel: [3, 3], stride: [2, 2], before };
        let (mut x, mut size) = (window.to_vec(), [window.len() / c.n_mels, c.n_mels]);
        for Subsampling { kernels, norm } in &self.front {
            let n_in = x.len() / (size[0] * size[1]);
            x = kernels.forward(device, &convolution.rows(&x, size, n_in))?;
            size = convolution.output_size(size);
            match is_gemma3n {
                true => cumulative_norm(&mut x, size[1] * norm.len(), norm),
                false => {
                    let normalize = |row: &mut [f32]| layer_norm(row, norm, c.eps);
                    for_rows(&mut x, norm.len(), limits::n_cores(), normalize);
                }
            }
            apply(&mut x, Pointwise::Relu);
        }
        Ok(self.input.forward(device, &x)?)
    }
}

/// Returns sines and cosines of the distances below `n`, `[n, width]`.
fn sinusoids(n: usize, width: usize) -> Vec<f32> {
    let n_timescales = width / 2;
    let step = MAX_TIMESCALE.ln() / n_timescales.saturating_sub(1).max(1) as f64;
    let angle = |distance: usize, at: usize| distance as f64 * (-step * at as f64).exp();
    let of = move |distance: usize, turn: fn(f64) -> f64| {
        (0..n_timescales).map(move |at| turn(angle(distance, at)) as f32)
    };
    (0..n).flat_map(|distance| of(distance, f64::sin).chain(of(distance, f64::cos))).collect()
}

fn softplus(x: f32) -> f32 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_are_sines_and_cosines_of_their_timescales() {
        let values = sinusoids(2, 4);
        let want = [0.0, 0.0, 1.0, 1.0, 1f32.sin(), 1e-4f32.sin(), 1f32.cos(), 1e-4f32.cos()];
        assert!(values.iter().zip(want).all(|(x, want)| (x - want).abs() < 1e-6), "{values:?}");
    }
}
