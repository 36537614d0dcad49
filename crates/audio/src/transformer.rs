//! Bidirectional transformers over convolved frames of a log-mel spectrogram: Whisper (arXiv
//! 2212.04356) and its descendants.
//!
//! ```text
//! x = convolutions(mel) + position
//! x = x + W_o attention(W_q n, W_k n, W_v n),  n = norm(x)
//! x = x + W_down gelu(W_up n),                 n = norm(x)
//! rows = projector(norm(x))
//! ```

use kvant_backend::host_ops::{self, Pointwise};
use kvant_backend::{Backend, BidirectionalParams, Heads};
use kvant_model::ModelError;
use kvant_model::linear::{Linear, all_rows, upload};

use crate::config::{CHUNK_FRAMES, Config, Projector};
use crate::convolution::Convolution;
use crate::error::AudioError;
use crate::loader::Loader;
use crate::rows::add;

/// The convolutions of Whisper, over time.
const WHISPER: [Convolution; 2] = [
    Convolution { kernel: [1, 3], stride: [1, 1], before: [0, 1] },
    Convolution { kernel: [1, 3], stride: [1, 2], before: [0, 1] },
];
/// Each convolution of Qwen3, over mel bins and time.
const QWEN3: Convolution = Convolution { kernel: [3, 3], stride: [2, 2], before: [1, 1] };

/// LayerNorm.
struct Norm<B: Backend> {
    weight: B::Buffer,
    bias: B::Buffer,
}

/// One layer.
struct Layer<B: Backend> {
    attn_norm: Norm<B>,
    /// Projections of queries, keys and values.
    qkv: [Linear<B>; 3],
    out: Linear<B>,
    ffn_norm: Norm<B>,
    up: Linear<B>,
    down: Linear<B>,
}

/// Layers between the spectrogram and the transformer.
enum Front<B: Backend> {
    /// Whisper: two convolutions over time, the second with stride 2.
    Whisper([Linear<B>; 2]),
    /// Qwen3: three convolutions over mel bins and time with stride 2, and a product that joins
    /// channels and bins.
    Qwen3 { convolutions: [Linear<B>; 3], out: Linear<B> },
}

/// A transformer on a device.
pub(crate) struct Transformer<B: Backend> {
    front: Front<B>,
    /// Position embeddings, `[n_positions, n_embd]`.
    positions: Vec<f32>,
    layers: Vec<Layer<B>>,
    /// Behind the last layer.
    post_norm: Norm<B>,
    /// The matrices of the projector, with an activation between two.
    projector: Vec<Linear<B>>,
}

/// A transformer with what a forward pass needs.
struct Forward<'a, B: Backend> {
    device: &'a B,
    config: &'a Config,
    weights: &'a Transformer<B>,
}

/// Buffers for the positions of one window.
struct WindowBuffers<B: Backend> {
    /// Number of positions.
    n: usize,
    /// The residual stream, `[n, n_embd]`.
    x: B::Buffer,
    /// The normalized stream.
    normed: B::Buffer,
    /// Queries, keys and values, `[n, n_embd]` each.
    qkv: [B::Buffer; 3],
    /// Output of attention.
    attn_out: B::Buffer,
    /// `[n, n_ff]`
    hidden: B::Buffer,
}

impl<B: Backend> Transformer<B> {
    pub fn load(loader: &mut Loader<'_, B>, c: &Config) -> Result<Self, ModelError> {
        let (n, n_text) = (c.n_embd, c.n_embd_text);
        let front = match c.projector {
            Projector::Voxtral | Projector::Qwen2 => Front::Whisper([
                loader.linear("a.conv1d.1", [3 * c.n_mels, n])?,
                loader.linear("a.conv1d.2", [3 * n, n])?,
            ]),
            _ => loader.qwen3_front(c)?,
        };
        let projector = match c.projector {
            Projector::Voxtral => loader.mlp([c.n_stacked * n, n_text, n_text])?,
            Projector::Qwen2 => vec![loader.linear("mm.a.fc", [n, n_text])?],
            _ => loader.mlp([n, n, n_text])?,
        };
        Ok(Self {
            front,
            positions: loader.values("a.position_embd.weight", &[n, c.n_positions])?,
            layers: (0..c.n_layers).map(|index| loader.layer(c, index)).collect::<Result<_, _>>()?,
            post_norm: loader.norm("a.post_ln", n)?,
            projector,
        })
    }

    /// Encodes a window `[frames, n_mels]`, of which Whisper reads the first `n_positions`
    /// positions. Returns its rows `[n, n_embd_text]`.
    pub fn rows(
        &self,
        device: &B,
        config: &Config,
        window: &[f32],
        n_positions: usize,
    ) -> Result<Vec<f32>, AudioError> {
        let forward = Forward { device, config, weights: self };
        let embedded = match &self.front {
            Front::Whisper(convolutions) => forward.whisper_front(convolutions, window, n_positions)?,
            Front::Qwen3 { convolutions, out } => forward.qwen3_front(convolutions, out, window)?,
        };
        forward.project(forward.transform(&embedded)?)
    }
}

impl<B: Backend> Forward<'_, B> {
    /// Embeds the first `n_positions` positions of a window `[frames, n_mels]`.
    fn whisper_front(
        &self,
        convolutions: &[Linear<B>; 2],
        window: &[f32],
        n_positions: usize,
    ) -> Result<Vec<f32>, AudioError> {
        let c = self.config;
        // Two frames for each position, and one that the last position's kernels reach.
        let n_frames = (2 * n_positions + 1).min(window.len() / c.n_mels);
        let (mut x, mut size) = (window[..n_frames * c.n_mels].to_vec(), [1, n_frames]);
        for (convolution, linear) in WHISPER.iter().zip(convolutions) {
            x = self.convolve(convolution, linear, &x, size)?;
            size = convolution.output_size(size);
        }
        x.truncate(n_positions * c.n_embd);
        add(&mut x, &self.weights.positions);
        Ok(x)
    }

    /// Embeds a window `[frames, n_mels]` chunk by chunk, each with the same positions.
    fn qwen3_front(
        &self,
        convolutions: &[Linear<B>; 3],
        out: &Linear<B>,
        window: &[f32],
    ) -> Result<Vec<f32>, AudioError> {
        let c = self.config;
        let mut embedded = Vec::new();
        for chunk in window.chunks(CHUNK_FRAMES * c.n_mels) {
            // The last chunk is padded with zeros, whose outputs are dropped.
            let mut size = [c.n_mels, CHUNK_FRAMES];
            let mut x = vec![0.0; c.n_mels * CHUNK_FRAMES];
            for (frame, values) in chunk.chunks_exact(c.n_mels).enumerate() {
                x[frame..].iter_mut().step_by(CHUNK_FRAMES).zip(values).for_each(|(x, value)| *x = *value);
            }
            for linear in convolutions {
                x = self.convolve(&QWEN3, linear, &x, size)?;
                size = QWEN3.output_size(size);
            }
            let n_positions = (chunk.len() / c.n_mels).div_ceil(8);
            let mut rows = out.forward(self.device, &by_time(&x, size, n_positions))?;
            add(&mut rows, &self.weights.positions);
            embedded.extend(rows);
        }
        Ok(embedded)
    }

    /// Computes `gelu(W x + b)` of a convolution, for `x` `[lines, columns, channels]`.
    fn convolve(
        &self,
        convolution: &Convolution,
        linear: &Linear<B>,
        x: &[f32],
        size: [usize; 2],
    ) -> Result<Vec<f32>, AudioError> {
        let channels = x.len() / (size[0] * size[1]);
        let mut out = linear.forward(self.device, &convolution.rows(x, size, channels))?;
        host_ops::apply(&mut out, Pointwise::Gelu);
        Ok(out)
    }

    /// Runs the layers on positions of one window, `[n, n_embd]`.
    fn transform(&self, embedded: &[f32]) -> Result<Vec<f32>, AudioError> {
        let (c, device) = (self.config, self.device);
        let n = embedded.len() / c.n_embd;
        let buffer = |columns: usize| device.buffer(n * columns);
        let mut work = WindowBuffers {
            n,
            x: upload(device, embedded)?,
            normed: buffer(c.n_embd)?,
            qkv: [buffer(c.n_embd)?, buffer(c.n_embd)?, buffer(c.n_embd)?],
            attn_out: buffer(c.n_embd)?,
            hidden: buffer(c.n_ff)?,
        };
        for layer in &self.weights.layers {
            self.attention(layer, &mut work)?;
            self.feed_forward(layer, &mut work)?;
        }
        let mut stream = vec![0.0; n * c.n_embd];
        device.read(&work.x, 0, &mut stream)?;
        Ok(stream)
    }

    /// Computes `y = norm(x)` of `rows` rows.
    fn normalize(
        &self,
        norm: &Norm<B>,
        x: &B::Buffer,
        rows: usize,
        y: &mut B::Buffer,
    ) -> Result<(), AudioError> {
        let weight = kvant_backend::Norm { weight: &norm.weight, eps: self.config.eps };
        Ok(self.device.layer_norm(x, rows, weight, Some(&norm.bias), y)?)
    }

    fn attention(&self, layer: &Layer<B>, work: &mut WindowBuffers<B>) -> Result<(), AudioError> {
        let (c, device, n) = (self.config, self.device, work.n);
        self.normalize(&layer.attn_norm, &work.x, n, &mut work.normed)?;
        let ([w_q, w_k, w_v], [q, k, v]) = (&layer.qkv, &mut work.qkv);
        let outputs = &mut [w_q.output(q, false), w_k.output(k, false), w_v.output(v, false)];
        device.project(all_rows(&work.normed, n), outputs)?;
        let heads = Heads { n: c.n_heads, dim: c.head_dim() };
        let scale = 1.0 / (c.head_dim() as f32).sqrt();
        let params = BidirectionalParams { heads, n_kv_heads: heads.n, scale, reach: None };
        device.attend_bidirectional(&params, &[n], None, work.qkv.each_ref(), &mut work.attn_out)?;
        device.project(all_rows(&work.attn_out, n), &mut [layer.out.output(&mut work.x, true)])?;
        Ok(())
    }

    fn feed_forward(&self, layer: &Layer<B>, work: &mut WindowBuffers<B>) -> Result<(), AudioError> {
        let (c, device, n) = (self.config, self.device, work.n);
        self.normalize(&layer.ffn_norm, &work.x, n, &mut work.normed)?;
        device.project(all_rows(&work.normed, n), &mut [layer.up.output(&mut work.hidden, false)])?;
        device.apply(&mut work.hidden, n * c.n_ff, Pointwise::Gelu)?;
        device.project(all_rows(&work.hidden, n), &mut [layer.down.output(&mut work.x, true)])?;
        Ok(())
    }

    /// Projects outputs of the layers `[n, n_embd]` to rows of the text model.
    fn project(&self, mut stream: Vec<f32>) -> Result<Vec<f32>, AudioError> {
        let (c, device) = (self.config, self.device);
        if c.projector == Projector::Qwen2 {
            stream = averaged_pairs(&stream, c.n_embd);
        }
        let n = stream.len() / c.n_embd;
        let mut normed = device.buffer(stream.len())?;
        self.normalize(&self.weights.post_norm, &upload(device, &stream)?, n, &mut normed)?;
        device.read(&normed, 0, &mut stream)?;
        for (index, linear) in self.weights.projector.iter().enumerate() {
            if index > 0 {
                host_ops::apply(&mut stream, Pointwise::Gelu);
            }
            // Groups of positions are consecutive: rows of the first matrix hold a group each.
            stream = linear.forward(device, &stream)?;
        }
        Ok(stream)
    }
}

impl<B: Backend> Loader<'_, B> {
    /// Loads the convolutions of Qwen3: the number of channels is that of the first one's outputs.
    fn qwen3_front(&mut self, c: &Config) -> Result<Front<B>, ModelError> {
        let channels = self.n_out("a.conv2d.1.weight")?;
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

    fn norm(&mut self, name: &str, len: usize) -> Result<Norm<B>, ModelError> {
        let [weight, bias] = ["weight", "bias"].map(|of| self.values(&format!("{name}.{of}"), &[len]));
        Ok(Norm { weight: upload(self.device, &weight?)?, bias: upload(self.device, &bias?)? })
    }
}

/// Returns the first n columns of outputs `[lines, columns, channels]` as `[n, channels, lines]`.
fn by_time(x: &[f32], [lines, columns]: [usize; 2], n: usize) -> Vec<f32> {
    let channels = x.len() / (lines * columns);
    let mut rows = Vec::with_capacity(n * channels * lines);
    for column in 0..n {
        for channel in 0..channels {
            rows.extend((0..lines).map(|line| x[(line * columns + column) * channels + channel]));
        }
    }
    rows
}

/// Returns the averages of consecutive pairs of rows; the last one of an odd number is dropped.
fn averaged_pairs(rows: &[f32], width: usize) -> Vec<f32> {
    let pairs = rows.chunks_exact(2 * width).map(|pair| pair.split_at(width));
    pairs.flat_map(|(a, b)| a.iter().zip(b).map(|(a, b)| 0.5 * (a + b))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_averaged_and_an_odd_row_is_dropped() {
        assert_eq!(averaged_pairs(&[1.0, 2.0, 3.0, 6.0, 9.0, 9.0], 2), [2.0, 4.0]);
    }

    #[test]
    fn columns_become_rows_of_channels() {
        // Two lines, two columns, two channels.
        let x = [1.0, 10.0, 2.0, 20.0, 3.0, 30.0, 4.0, 40.0];
        assert_eq!(by_time(&x, [2, 2], 1), [1.0, 3.0, 10.0, 30.0]);
    }
}
