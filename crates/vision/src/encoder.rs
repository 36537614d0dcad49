//! Vision encoder: a bidirectional transformer over patches.
//!
//! ```text
//! x = W_p patch + position
//! x = x + W_o attention(W_q n, W_k n, W_v n),  n = norm(x)
//! x = x + W_down a(W_up n),                    n = norm(x)
//! rows = W_2 a(W_1 neighbours(norm(x)))
//! ```
//!
//! With gates, the feed-forward layer is `W_down (a(W_gate n) * (W_up n))`.

use std::sync::Arc;

use kvant_backend::host_ops::{self, Pointwise};
use kvant_backend::{Backend, BidirectionalParams, Heads, Pairing, RopeParams};
use kvant_gguf::Gguf;
use kvant_model::linear::all_rows;

use crate::config::{Config, Projector};
use crate::weights::{Layer, Norm, NormAndBias, ProjectorWeights, Weights};
use crate::{Image, VisionError};

/// A vision encoder on a device.
pub struct VisionEncoder<B: Backend> {
    device: Arc<B>,
    config: Config,
    weights: Weights<B>,
}

/// Buffers for the rows of one tile.
struct TileBuffers<B: Backend> {
    /// Number of rows: patches, after a class token where the model has one.
    n: usize,
    /// Patches per line, and lines.
    grid: [usize; 2],
    /// Patch index of each row, counted line by line, and the number of rows of each attention
    /// window.
    order: Vec<usize>,
    windows: Vec<usize>,
    /// The residual stream, `[n, n_embd]`.
    x: B::Buffer,
    /// The normalized stream.
    normed: B::Buffer,
    /// Queries, keys and values, `[n, n_embd]` each.
    qkv: [B::Buffer; 3],
    /// Output of attention.
    attn_out: B::Buffer,
    /// `[n, n_ff]`, twice for gated layers.
    hidden: [B::Buffer; 2],
    /// Cosines and sines of the patch positions, `[n, head_dim / 2, 2]`, for encoders with RoPE.
    angles: Option<B::Buffer>,
}

impl<B: Backend> VisionEncoder<B> {
    /// Loads the encoder of a file onto a device.
    ///
    /// # Errors
    /// A file of another kind, an unknown encoder, tensors of wrong shapes, or a device without
    /// memory.
    pub fn load(gguf: &Gguf, device: Arc<B>) -> Result<Self, VisionError> {
        let config = Config::from_gguf(gguf)?;
        let weights = Weights::load(gguf, &config, &*device)?;
        Ok(Self { device, config, weights })
    }

    /// Returns the hyper-parameters.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Encodes a tile. Returns its rows `[n, n_embd_text]`, line by line, followed by as many
    /// DeepStack rows for each layer in [`Config::deep`], which are added behind the first layers
    /// of the text model.
    ///
    /// # Errors
    /// A tile whose sides are not whole rows, or a failure of the device.
    pub fn rows(&self, tile: &Image) -> Result<Vec<Vec<f32>>, VisionError> {
        let (c, device) = (&self.config, &*self.device);
        let work = &mut self.embed_patches(tile)?;
        let mut stream = vec![0.0; work.n * c.n_embd];
        let mut rows = vec![Vec::new()];
        for (index, layer) in self.weights.layers.iter().enumerate() {
            self.attention(index, layer, work)?;
            self.feed_forward(layer, work)?;
            if let Some(head) = c.deep.iter().position(|&deep| deep == index) {
                device.read(&work.x, 0, &mut stream)?;
                rows.push(self.project(&self.weights.deep[head], &in_lines(c, work, &stream), work.grid)?);
            }
        }
        match &self.weights.post_norm {
            Some(norm) => self.normalize_on_host(norm, &work.x, work.n, &mut work.normed, &mut stream)?,
            None => device.read(&work.x, 0, &mut stream)?,
        }
        rows[0] = self.project(&self.weights.projector, &in_lines(c, work, &stream), work.grid)?;
        Ok(rows)
    }

    /// Embeds the patches of a tile and adds their positions.
    fn embed_patches(&self, tile: &Image) -> Result<TileBuffers<B>, VisionError> {
        let (c, device) = (&self.config, &*self.device);
        let grid = [tile.width(), tile.height()].map(|pixels| pixels / c.patch_size);
        let is_whole =
            [tile.width(), tile.height()].iter().all(|pixels| pixels.is_multiple_of(c.row_pixels()));
        let n_class = usize::from(self.weights.class.is_some());
        let n_patches = grid[0] * grid[1];
        let n = n_patches + n_class;
        let positions = self.positions(grid, n);
        let (true, Some(positions)) = (is_whole, positions) else {
            let (width, height) = (tile.width() as u32, tile.height() as u32);
            let expected = format!(
                "tiles of {} pixels or, where sizes vary, multiples of {}",
                c.image_size,
                c.row_pixels()
            );
            return Err(VisionError::Size { width, height, expected });
        };
        let buffer = |columns: usize| device.buffer(n * columns);
        let (order, windows) =
            in_windows(grid, c.full_attention_and_window.map(|[_, side]| side / c.row_pixels() * c.n_merge));
        let mut work = TileBuffers {
            n,
            grid,
            order,
            windows,
            x: buffer(c.n_embd)?,
            normed: buffer(c.n_embd)?,
            qkv: [buffer(c.n_embd)?, buffer(c.n_embd)?, buffer(c.n_embd)?],
            attn_out: buffer(c.n_embd)?,
            hidden: [buffer(c.n_ff)?, buffer(c.n_ff)?],
            angles: None,
        };
        let n_pixels = 3 * c.patch_size * c.patch_size;
        let mut pixels = device.buffer(n_patches * n_pixels)?;
        device.write(&mut pixels, &self.patches(tile, grid, &work.order))?;
        // The class token has no pixels: patches are embedded separately before they join it.
        let of_pixels = self.weights.patches.output(&mut work.normed, false);
        device.project(all_rows(&pixels, n_patches), &mut [of_pixels])?;
        let mut rows = vec![0.0; n * c.n_embd];
        if let Some(class) = &self.weights.class {
            rows[..c.n_embd].copy_from_slice(class);
        }
        device.read(&work.normed, 0, &mut rows[n_class * c.n_embd..])?;
        rows.iter_mut().zip(&positions).for_each(|(x, position)| *x += position);
        device.write(&mut work.x, &rows)?;
        if let Some(norm) = &self.weights.pre_norm {
            self.normalize_on_host(norm, &work.x, n, &mut work.normed, &mut rows)?;
            device.write(&mut work.x, &rows)?;
        }
        if let Some((shift, _)) = rope_variant(c.projector) {
            let mut buffer = device.buffer(n * c.head_dim())?;
            device.write(&mut buffer, &angles(c.head_dim(), grid[0], &work.order, shift))?;
            work.angles = Some(buffer);
        }
        Ok(work)
    }

    /// Returns the normalized colours of each patch, `[patches, 3, patch_size, patch_size]`.
    fn patches(&self, tile: &Image, [columns, _]: [usize; 2], order: &[usize]) -> Vec<f32> {
        let (c, side) = (&self.config, self.config.patch_size);
        let mut values = Vec::with_capacity(3 * tile.width() * tile.height());
        for patch in order {
            let [x, y] = [patch % columns * side, patch / columns * side];
            for colour in 0..3 {
                for row in tile.rgb().chunks_exact(3 * tile.width()).skip(y).take(side) {
                    let pixels = row[3 * x..][..3 * side].chunks_exact(3);
                    let value =
                        |pixel: &[u8]| (f32::from(pixel[colour]) / 255.0 - c.mean[colour]) / c.std[colour];
                    values.extend(pixels.map(value));
                }
            }
        }
        values
    }

    /// Returns the position embeddings of `n` rows; `None` for an unsupported
    /// grid.
    fn positions(&self, grid: [usize; 2], n: usize) -> Option<Vec<f32>> {
        let (c, positions) = (&self.config, &self.weights.positions);
        let n_known = positions.len() / c.n_embd;
        match c.projector {
            Projector::Pixtral | Projector::Qwen25 => Some(Vec::new()),
            Projector::Lfm2 | Projector::Qwen3 | Projector::PaddleOcr => {
                let side = n_known.isqrt();
                let taps = grid.map(|to| match c.projector {
                    Projector::Qwen3 => taps_of_corners(side, to),
                    Projector::Lfm2 => taps(side, to, (side as f64 / to as f64).max(1.0)),
                    _ => taps(side, to, 1.0),
                });
                (side > 0).then(|| resized(positions, [side; 2], taps, c.n_embd))
            }
            Projector::Idefics3 | Projector::InternVl => (n == n_known).then(|| positions.clone()),
        }
    }

    /// Computes `y = norm(x)` of `rows` rows, without the bias of a LayerNorm.
    fn normalize(
        &self,
        norm: &Norm<B>,
        eps: f32,
        x: &B::Buffer,
        rows: usize,
        y: &mut B::Buffer,
    ) -> Result<(), VisionError> {
        match norm {
            Norm::Layer(weight) => {
                self.device.layer_norm(x, rows, kvant_backend::Norm { weight, eps }, None, y)?;
            }
            Norm::Rms(weight) => {
                let dim = norm.width();
                self.device.copy(x, 0, y, 0, rows * dim)?;
                let no_rope = RopeParams { pairing: Pairing::Halves, n_rot: 0 };
                let norm = Some(kvant_backend::Norm { weight, eps });
                let nothing = self.device.buffer(0)?;
                self.device.rope(y, rows, Heads { n: 1, dim }, norm, no_rope, &nothing)?;
            }
        }
        Ok(())
    }

    /// Computes `norm(x)` of `rows` rows on the host, with the bias of a LayerNorm.
    fn normalize_on_host(
        &self,
        (norm, added): &NormAndBias<B>,
        x: &B::Buffer,
        rows: usize,
        spare: &mut B::Buffer,
        out: &mut [f32],
    ) -> Result<(), VisionError> {
        self.normalize(norm, self.config.eps, x, rows, spare)?;
        self.device.read(spare, 0, out)?;
        if let Some(added) = added {
            out.chunks_exact_mut(added.len())
                .for_each(|row| row.iter_mut().zip(added).for_each(|(x, y)| *x += y));
        }
        Ok(())
    }

    fn attention(
        &self,
        index: usize,
        layer: &Layer<B>,
        work: &mut TileBuffers<B>,
    ) -> Result<(), VisionError> {
        let (c, device, n) = (&self.config, &*self.device, work.n);
        self.normalize(&layer.attn_norm, c.eps, &work.x, n, &mut work.normed)?;
        let ([w_q, w_k, w_v], [q, k, v]) = (&layer.qkv, &mut work.qkv);
        let outputs = &mut [w_q.output(q, false), w_k.output(k, false), w_v.output(v, false)];
        device.project(all_rows(&work.normed, n), outputs)?;
        let heads = Heads { n: c.n_heads, dim: c.head_dim() };
        if let (Some(angles), Some((_, pairing))) = (&work.angles, rope_variant(c.projector)) {
            let params = RopeParams { pairing, n_rot: c.head_dim() };
            for x in &mut work.qkv[..2] {
                device.rope(x, n, heads, None, params, angles)?;
            }
        }
        let scale = 1.0 / (c.head_dim() as f32).sqrt();
        let all = [n];
        let windows = match c.full_attention_and_window {
            Some([every, _]) if !(index + 1).is_multiple_of(every) => &work.windows[..],
            _ => &all[..],
        };
        let params = BidirectionalParams { heads, n_kv_heads: heads.n, scale, reach: None };
        device.attend_bidirectional(&params, windows, None, work.qkv.each_ref(), &mut work.attn_out)?;
        device.project(all_rows(&work.attn_out, n), &mut [layer.out.output(&mut work.x, true)])?;
        Ok(())
    }

    fn feed_forward(&self, layer: &Layer<B>, work: &mut TileBuffers<B>) -> Result<(), VisionError> {
        let (c, device, n) = (&self.config, &*self.device, work.n);
        self.normalize(&layer.ffn_norm, c.eps, &work.x, n, &mut work.normed)?;
        let [hidden, gates] = &mut work.hidden;
        let (input, up) = (all_rows(&work.normed, n), layer.up.output(hidden, false));
        let activated = match &layer.gate {
            None => {
                device.project(input, &mut [up])?;
                &mut *hidden
            }
            Some(gate) => {
                device.project(input, &mut [up, gate.output(gates, false)])?;
                &mut *gates
            }
        };
        device.apply(activated, n * c.n_ff, c.activation)?;
        if layer.gate.is_some() {
            device.gate(hidden, n * c.n_ff, gates, kvant_backend::Gate::Plain)?;
        }
        device.project(all_rows(hidden, n), &mut [layer.down.output(&mut work.x, true)])?;
        Ok(())
    }

    /// Returns `norm(x)` of the rows of `x`, without the bias of a LayerNorm.
    fn normalized(&self, norm: &Norm<B>, eps: f32, x: &[f32]) -> Result<Vec<f32>, VisionError> {
        let device = &*self.device;
        let (mut from, mut to) = (device.buffer(x.len())?, device.buffer(x.len())?);
        device.write(&mut from, x)?;
        self.normalize(norm, eps, &from, x.len() / norm.width(), &mut to)?;
        let mut normalized = vec![0.0; x.len()];
        device.read(&to, 0, &mut normalized)?;
        Ok(normalized)
    }

    /// Projects patches `[patches, n_embd]` to rows of the text model.
    fn project(
        &self,
        head: &ProjectorWeights<B>,
        patches: &[f32],
        grid: [usize; 2],
    ) -> Result<Vec<f32>, VisionError> {
        let (c, device) = (&self.config, &*self.device);
        let strides = match head.merger {
            None => [1, c.n_embd],
            Some(_) => [c.n_merge * c.n_merge, 1],
        };
        let concatenated = |patches: &[f32]| neighbours(patches, grid, c.n_merge, strides, c.n_embd);
        let mut rows = match &head.norm {
            None => concatenated(patches),
            Some((norm, eps)) if norm.width() == c.n_embd => {
                concatenated(&self.normalized(norm, *eps, patches)?)
            }
            Some((norm, eps)) => self.normalized(norm, *eps, &concatenated(patches))?,
        };
        if let Some(merger) = &head.merger {
            rows = merger.forward(device, &rows)?;
        }
        rows = head.first.forward(device, &rows)?;
        if let Some(second) = &head.second {
            host_ops::apply(&mut rows, Pointwise::Gelu);
            rows = second.forward(device, &rows)?;
        }
        Ok(rows)
    }
}

/// Concatenates squares of `side` by `side` patches into rows, line by line: value i of patch p of
/// a square is at `i of_value + p of_patch` of its row.
fn neighbours(
    patches: &[f32],
    [columns, lines]: [usize; 2],
    side: usize,
    [of_value, of_patch]: [usize; 2],
    n: usize,
) -> Vec<f32> {
    let width = side * side * n;
    let mut rows = vec![0.0; columns / side * (lines / side) * width];
    for (index, row) in rows.chunks_exact_mut(width).enumerate() {
        let [x, y] = [index % (columns / side) * side, index / (columns / side) * side];
        for patch in 0..side * side {
            let from = (y + patch / side) * columns + x + patch % side;
            for (i, value) in patches[from * n..][..n].iter().enumerate() {
                row[i * of_value + patch * of_patch] = *value;
            }
        }
    }
    rows
}

/// Reorders rows of patches line by line.
fn in_lines<B: Backend>(c: &Config, work: &TileBuffers<B>, stream: &[f32]) -> Vec<f32> {
    // The class token comes first.
    let patches = &stream[(work.n - work.order.len()) * c.n_embd..];
    let mut in_lines = vec![0.0; patches.len()];
    for (row, &patch) in patches.chunks_exact(c.n_embd).zip(&work.order) {
        in_lines[patch * c.n_embd..][..c.n_embd].copy_from_slice(row);
    }
    in_lines
}

/// Returns the RoPE variant of an encoder, if it has one: the offset of the column frequencies
/// against those of lines, in halves of a pair, and the pairing.
fn rope_variant(projector: Projector) -> Option<(usize, Pairing)> {
    match projector {
        Projector::Pixtral => Some((2, Pairing::Interleaved)),
        Projector::Qwen25 | Projector::Qwen3 | Projector::PaddleOcr => Some((0, Pairing::Halves)),
        Projector::Idefics3 | Projector::InternVl | Projector::Lfm2 => None,
    }
}

/// Returns cosines and sines of each patch position: the first half of a head's pairs encodes the
/// line, the second half the column.
fn angles(head_dim: usize, columns: usize, order: &[usize], shift: usize) -> Vec<f32> {
    const THETA: f32 = 10_000.0;
    let n_pairs = head_dim / 2;
    let mut angles = Vec::with_capacity(order.len() * head_dim);
    for patch in order {
        for pair in 0..n_pairs {
            let (place, step) = match pair.checked_sub(n_pairs / 2) {
                None => (patch / columns, 4 * pair),
                Some(pair) => (patch % columns, 4 * pair + shift),
            };
            let (sin, cos) = (place as f32 * THETA.powf(-(step as f32) / head_dim as f32)).sin_cos();
            angles.extend([cos, sin]);
        }
    }
    angles
}

/// Returns the patches of a grid, window by window, and the number of patches per window; windows
/// have `side` patches per side, or fewer at the right and lower edges.
fn in_windows([columns, lines]: [usize; 2], side: Option<usize>) -> (Vec<usize>, Vec<usize>) {
    let Some(side) = side else { return ((0..columns * lines).collect(), vec![columns * lines]) };
    let (mut order, mut windows) = (Vec::with_capacity(columns * lines), Vec::new());
    for top in (0..lines).step_by(side) {
        for left in (0..columns).step_by(side) {
            let before = order.len();
            for line in top..lines.min(top + side) {
                order.extend((left..columns.min(left + side)).map(|column| line * columns + column));
            }
            windows.push(order.len() - before);
        }
    }
    (order, windows)
}

/// Interpolates position embeddings of one grid for another, with the given taps.
fn resized(positions: &[f32], [columns, lines]: [usize; 2], taps: [Taps; 2], n: usize) -> Vec<f32> {
    let to = taps.each_ref().map(Vec::len);
    let mut narrow = vec![0.0; lines * to[0] * n];
    for line in 0..lines {
        for (column, taps) in taps[0].iter().enumerate() {
            let out = &mut narrow[(line * to[0] + column) * n..][..n];
            for &(from, weight) in taps {
                let row = &positions[(line * columns + from) * n..][..n];
                out.iter_mut().zip(row).for_each(|(out, x)| *out += weight * x);
            }
        }
    }
    let mut all = vec![0.0; to[0] * to[1] * n];
    for (line, taps) in taps[1].iter().enumerate() {
        let out = &mut all[line * to[0] * n..][..to[0] * n];
        for &(from, weight) in taps {
            let row = &narrow[from * to[0] * n..][..to[0] * n];
            out.iter_mut().zip(row).for_each(|(out, x)| *out += weight * x);
        }
    }
    all
}

/// Interpolation taps of each point: source points and weights.
type Taps = Vec<Vec<(usize, f32)>>;

/// Returns bilinear taps with aligned corners.
fn taps_of_corners(from: usize, to: usize) -> Taps {
    let step = (from - 1) as f32 / (to - 1).max(1) as f32;
    let of_point = |point: usize| {
        let place = point as f32 * step;
        let first = (place as usize).min(from - 1);
        let rest = place - first as f32;
        vec![(first, 1.0 - rest), ((first + 1).min(from - 1), rest)]
    };
    (0..to).map(of_point).collect()
}

/// Returns taps of `to` points over `from` points, aligned at the edges, with a triangle filter:
/// bilinear where `width` is 1, and antialiased where it is that of the coarser spacing.
fn taps(from: usize, to: usize, width: f64) -> Taps {
    let step = from as f64 / to as f64;
    let of_point = |point: usize| {
        let centre = (point as f64 + 0.5) * step;
        let weights = (0..from).map(|i| (i, 1.0 - ((i as f64 + 0.5 - centre) / width).abs()));
        let weights: Vec<_> = weights.filter(|(_, weight)| *weight > 0.0).collect();
        let sum: f64 = weights.iter().map(|(_, weight)| weight).sum();
        weights.into_iter().map(|(i, weight)| (i, (weight / sum) as f32)).collect()
    };
    (0..to).map(of_point).collect()
}
