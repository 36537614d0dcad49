//! Audio encoder: a bidirectional transformer over convolved frames of a log-mel spectrogram.
//!
//! ```text
//! x = convolutions(mel) + position
//! x = x + W_o attention(W_q n, W_k n, W_v n),  n = norm(x)
//! x = x + W_down gelu(W_up n),                 n = norm(x)
//! rows = projector(norm(x))
//! ```
//!
//! Windows of the spectrogram are encoded one after the other: outputs of different windows do not
//! attend to each other.

use std::sync::Arc;

use kvant_backend::{Backend, BidirectionalParams, Heads, Matrix, limits};
use kvant_gguf::Gguf;
use kvant_model::host_ops::{Activation, activate, for_rows};
use kvant_model::linear::{Linear, all_rows, upload};

use crate::clip::AudioClip;
use crate::config::{CHUNK_FRAMES, Config, Projector};
use crate::convolution::Convolution;
use crate::error::AudioError;
use crate::weights::{Front, Layer, Norm, Weights};

/// The convolutions of Whisper, over time.
const WHISPER: [Convolution; 2] =
    [Convolution { kernel: [1, 3], stride: [1, 1] }, Convolution { kernel: [1, 3], stride: [1, 2] }];
/// Each convolution of Qwen3, over mel bins and time.
const QWEN3: Convolution = Convolution { kernel: [3, 3], stride: [2, 2] };

/// An audio encoder on a device.
pub struct AudioEncoder<B: Backend> {
    device: Arc<B>,
    config: Config,
    weights: Weights<B>,
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
    hidden_on_host: Vec<f32>,
}

impl<B: Backend> AudioEncoder<B> {
    /// Loads the encoder of a file onto a device.
    ///
    /// # Errors
    /// A file of another kind, an unknown encoder, tensors of wrong shapes, or a device without
    /// memory.
    pub fn load(gguf: &Gguf, device: Arc<B>) -> Result<Self, AudioError> {
        let config = Config::from_gguf(gguf)?;
        let weights = Weights::load(gguf, &config, &*device)?;
        Ok(Self { device, config, weights })
    }

    /// Returns the hyper-parameters.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Encodes a clip. Returns its rows `[n, n_embd_text]` in the order of time. `go_on` is called
    /// before each window, which takes seconds.
    ///
    /// # Errors
    /// A clip that is too short or too long, [`AudioError::Cancelled`] when `go_on` returns
    /// `false`, or a failure of the device.
    pub fn rows(&self, clip: &AudioClip, go_on: &dyn Fn() -> bool) -> Result<Vec<f32>, AudioError> {
        let c = &self.config;
        let mel = c.log_mel(clip)?;
        let n_positions = c.n_positions_of(clip.samples().len());
        let mut rows = Vec::new();
        for window in mel.values().chunks(c.window_frames() * c.n_mels) {
            if !go_on() {
                return Err(AudioError::Cancelled);
            }
            let embedded = match &self.weights.front {
                Front::Whisper(convolutions) => self.whisper_front(convolutions, window, n_positions)?,
                Front::Qwen3 { convolutions, out } => self.qwen3_front(convolutions, out, window)?,
            };
            rows.extend(self.project(self.transform(&embedded)?)?);
        }
        Ok(rows)
    }

    /// Embeds the first `n_positions` positions of a window `[frames, n_mels]`.
    fn whisper_front(
        &self,
        convolutions: &[Linear<B>; 2],
        window: &[f32],
        n_positions: usize,
    ) -> Result<Vec<f32>, AudioError> {
        let c = &self.config;
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
        let c = &self.config;
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
            let mut rows = out.forward(&*self.device, &by_time(&x, size, n_positions))?;
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
        let mut out = linear.forward(&*self.device, &convolution.rows(x, size, channels))?;
        self.gelu(&mut out, linear.w.n_out());
        Ok(out)
    }

    /// Runs the layers on positions of one window, `[n, n_embd]`.
    fn transform(&self, embedded: &[f32]) -> Result<Vec<f32>, AudioError> {
        let (c, device) = (&self.config, &*self.device);
        let n = embedded.len() / c.n_embd;
        let buffer = |columns: usize| device.buffer(n * columns);
        let mut work = WindowBuffers {
            n,
            x: upload(device, embedded)?,
            normed: buffer(c.n_embd)?,
            qkv: [buffer(c.n_embd)?, buffer(c.n_embd)?, buffer(c.n_embd)?],
            attn_out: buffer(c.n_embd)?,
            hidden: buffer(c.n_ff)?,
            hidden_on_host: vec![0.0; n * c.n_ff],
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
        let (c, device, n) = (&self.config, &*self.device, work.n);
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
        let (c, device, n) = (&self.config, &*self.device, work.n);
        self.normalize(&layer.ffn_norm, &work.x, n, &mut work.normed)?;
        device.project(all_rows(&work.normed, n), &mut [layer.up.output(&mut work.hidden, false)])?;
        device.read(&work.hidden, 0, &mut work.hidden_on_host)?;
        self.gelu(&mut work.hidden_on_host, c.n_ff);
        device.write(&mut work.hidden, &work.hidden_on_host)?;
        device.project(all_rows(&work.hidden, n), &mut [layer.down.output(&mut work.x, true)])?;
        Ok(())
    }

    /// Projects outputs of the layers `[n, n_embd]` to rows of the text model.
    fn project(&self, mut stream: Vec<f32>) -> Result<Vec<f32>, AudioError> {
        let (c, device) = (&self.config, &*self.device);
        if c.projector == Projector::Qwen2 {
            stream = averaged_pairs(&stream, c.n_embd);
        }
        let n = stream.len() / c.n_embd;
        let mut normed = device.buffer(stream.len())?;
        self.normalize(&self.weights.post_norm, &upload(device, &stream)?, n, &mut normed)?;
        device.read(&normed, 0, &mut stream)?;
        for (index, linear) in self.weights.projector.iter().enumerate() {
            if index > 0 {
                self.gelu(&mut stream, linear.w.n_in());
            }
            // Groups of positions are consecutive: rows of the first matrix hold a group each.
            stream = linear.forward(device, &stream)?;
        }
        Ok(stream)
    }

    fn gelu(&self, rows: &mut [f32], width: usize) {
        for_rows(rows, width, limits::n_cores(), |row| activate(row, Activation::Gelu));
    }
}

/// Adds as many values as `x` has.
fn add(x: &mut [f32], values: &[f32]) {
    x.iter_mut().zip(values).for_each(|(x, value)| *x += value);
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
