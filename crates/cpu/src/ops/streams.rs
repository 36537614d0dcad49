//! Ops of layers with several residual streams (AltUp, arXiv 2301.13310; hyper-connections, arXiv
//! 2409.19606; attention to streams, as in Kimi K3; gated streams, as in Qwen4-Exp), and of sparse
//! feed-forward layers beside them (statistical top-k, arXiv 2506.06644). Each processes a row by
//! itself.

use kvant_backend::{Activation, GatedStreams, HyperConnections, StreamAttention, StreamMixing, Streams};

use crate::host::buffer::CpuBuffer;
use crate::host::disjoint::DisjointMut;
use crate::host::pool::Pool;
use crate::ops::exp::exp;
use crate::ops::matmul::gate as activate;
use crate::ops::norm::{inverse_rms, product_of, sum_of};

/// Computes `y[i] = Σ_j coefs[row, i, j] x[j]` for every row. Shapes have been checked.
pub(crate) fn mix_streams(
    pool: &Pool,
    coefs: &[f32],
    x: &[f32],
    rows: usize,
    Streams { n_in, n_out, width }: Streams,
    y: &mut [f32],
) {
    let y = DisjointMut::new(y);
    pool.for_each(n_out * rows, &|of| {
        let (i, row) = (of / rows, of % rows);
        let coefs = &coefs[(row * n_out + i) * n_in..][..n_in];
        // SAFETY: one call of this job writes each row of a stream.
        let y = unsafe { y.part(of * width..(of + 1) * width) };
        y.fill(0.0);
        for (j, c) in coefs.iter().enumerate() {
            let x = &x[(j * rows + row) * width..][..width];
            y.iter_mut().zip(x).for_each(|(y, x)| *y += c * x);
        }
    });
}

/// Inputs of [`connect_streams`].
#[derive(Clone, Copy)]
pub(crate) struct StreamInputs<'a> {
    pub connections: HyperConnections<'a, CpuBuffer>,
    pub products: &'a CpuBuffer,
    pub streams: &'a CpuBuffer,
    pub rows: usize,
}

/// Computes the coefficients of [`kvant_backend::Backend::connect_streams`].
pub(crate) fn connect_streams(
    pool: &Pool,
    StreamInputs { connections, products, streams, rows }: StreamInputs<'_>,
    reads: &mut [f32],
    writes: Option<&mut [f32]>,
) {
    let [products, streams] = [products, streams].map(CpuBuffer::as_slice);
    let HyperConnections { n, width, numbers, norm_eps, eps, write_eps, magnitude, mixing } = connections;
    let n_products = mixing.n_products(n, writes.is_some());
    let (scales, bases) = numbers.as_slice().split_at(mixing.n_scales(writes.is_some()));
    let (reads, writes) = (DisjointMut::new(reads), writes.map(DisjointMut::new));
    pool.for_each(rows, &|row| {
        let squares = |stream: usize| sum_of(&streams[(stream * rows + row) * width..][..width], |v| v * v);
        let mean = (0..n).map(squares).sum::<f32>() / (n * width) as f32;
        let by = 1.0 / (mean + norm_eps).sqrt();
        let products = &products[row * n_products..][..n_products];
        let scaled = |scale: usize, i: usize| products[i] * by * scales[scale] + bases[i];
        let gate = |kind: usize, i: usize| 1.0 / (1.0 + (-scaled(kind, kind * n + i)).exp());
        // SAFETY: one call of this job writes each row.
        let reads = unsafe { reads.part(row * n..(row + 1) * n) };
        reads.iter_mut().enumerate().for_each(|(j, read)| *read = gate(0, j) + eps);
        let Some(writes) = &writes else { return };
        // SAFETY: as above.
        let writes = unsafe { writes.part(row * n * (n + 1)..(row + 1) * n * (n + 1)) };
        let mix = match mixing {
            StreamMixing::None => None,
            StreamMixing::Sinkhorn { iterations } => {
                let logits = (0..n * n).map(|i| scaled(2, 2 * n + i)).collect();
                Some(mixing_matrix(logits, n, eps, iterations))
            }
        };
        for (i, writes) in writes.chunks_exact_mut(n + 1).enumerate() {
            let out = magnitude * gate(1, i) + write_eps;
            // What it keeps of the streams, and what the sublayer adds to what it read.
            for (j, (write, read)) in writes.iter_mut().zip(&*reads).enumerate() {
                let kept = mix.as_ref().map_or(f32::from(u8::from(i == j)), |mix| mix[j * n + i]);
                *write = kept - out * read;
            }
            writes[n] = out;
        }
    });
}

/// Returns a matrix `[n, n]` whose rows and columns add up to one, from its logits.
fn mixing_matrix(mut matrix: Vec<f32>, n: usize, eps: f32, iterations: usize) -> Vec<f32> {
    for row in matrix.chunks_exact_mut(n) {
        softmax(row);
        row.iter_mut().for_each(|x| *x += eps);
    }
    for iteration in 0..iterations {
        if iteration > 0 {
            for row in matrix.chunks_exact_mut(n) {
                let sum = row.iter().sum::<f32>() + eps;
                row.iter_mut().for_each(|x| *x /= sum);
            }
        }
        for column in 0..n {
            let sum = matrix.iter().skip(column).step_by(n).sum::<f32>() + eps;
            matrix.iter_mut().skip(column).step_by(n).for_each(|x| *x /= sum);
        }
    }
    matrix
}

/// Computes the coefficients of [`kvant_backend::Backend::attend_streams`].
pub(crate) fn attend_streams(
    pool: &Pool,
    StreamAttention { n, scores, norm_eps, continues }: StreamAttention<'_, CpuBuffer>,
    streams: &[f32],
    rows: usize,
    reads: &mut [f32],
    writes: Option<&mut [f32]>,
) {
    let (weights, width) = (scores.as_slice(), scores.as_slice().len());
    let (reads, writes) = (DisjointMut::new(reads), writes.map(DisjointMut::new));
    pool.for_each(rows, &|row| {
        // SAFETY: one call of this job writes each row.
        let reads = unsafe { reads.part(row * n..(row + 1) * n) };
        for (j, read) in reads.iter_mut().enumerate() {
            let x = &streams[(j * rows + row) * width..][..width];
            *read = product_of(x, weights) * inverse_rms(x, norm_eps);
        }
        softmax(reads);
        let Some(writes) = &writes else { return };
        // SAFETY: as above.
        let writes = unsafe { writes.part(row * (n + 1)..(row + 1) * (n + 1)) };
        writes.iter_mut().zip(&*reads).for_each(|(write, read)| *write = -read);
        writes[n - 1] += f32::from(u8::from(continues));
        writes[n] = 1.0;
    });
}

/// Computes [`kvant_backend::Backend::gate_streams`].
pub(crate) fn gate_streams(
    pool: &Pool,
    GatedStreams { n, width, norms, norm_eps, gates, products }: GatedStreams<'_, CpuBuffer>,
    streams: &[f32],
    rows: usize,
    x: &mut [f32],
    writes: Option<&mut [f32]>,
) {
    let [norms, gates, products] = [norms, gates, products].map(CpuBuffer::as_slice);
    let (x, writes) = (DisjointMut::new(x), writes.map(DisjointMut::new));
    pool.for_each(rows, &|row| {
        // SAFETY: one call of this job writes each row.
        let x = unsafe { x.part(row * width..(row + 1) * width) };
        x.fill(0.0);
        for j in 0..n {
            let stream = &streams[(j * rows + row) * width..][..width];
            let by = inverse_rms(stream, norm_eps);
            let of_gates = gates[(row * n + j) * width..].iter().zip(&norms[j * width..]);
            for ((x, h), (gate, norm)) in x.iter_mut().zip(stream).zip(of_gates) {
                *x += h * by * norm / (1.0 + exp(-gate));
            }
        }
        let Some(writes) = &writes else { return };
        // SAFETY: as above.
        let writes = unsafe { writes.part(row * n * (n + 2)..(row + 1) * n * (n + 2)) };
        for (i, writes) in writes.chunks_exact_mut(n + 2).enumerate() {
            let out = 2.0 / (1.0 + exp(-products[row * n + i]));
            writes.fill(0.0);
            (writes[i], writes[n], writes[n + 1]) = (1.0, -out, out);
        }
    });
}

/// Computes the softmax of scores, in place. NaN makes all of them NaN.
fn softmax(scores: &mut [f32]) {
    let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    scores.iter_mut().for_each(|score| *score = (*score - max).exp());
    let sum: f32 = scores.iter().sum();
    scores.iter_mut().for_each(|score| *score /= sum);
}

/// Multiplies each row of `x` `[rows, width]` by the root mean square of that of `like`.
pub(crate) fn scale_by_rms(pool: &Pool, x: &mut [f32], like: &[f32], rows: usize, width: usize) {
    let x = DisjointMut::new(x);
    pool.for_each(rows, &|row| {
        let row = row * width..(row + 1) * width;
        let rms = (sum_of(&like[row.clone()], |v| v * v) / width as f32).sqrt();
        // SAFETY: one call of this job writes each row.
        unsafe { x.part(row) }.iter_mut().for_each(|x| *x *= rms);
    });
}

/// Multiplies each row of `y` `[rows, width]` by GELU of how far that of `gates` exceeds its mean
/// by more than `deviations` standard deviations.
pub(crate) fn gate_sparsely(
    pool: &Pool,
    y: &mut [f32],
    gates: &[f32],
    rows: usize,
    width: usize,
    deviations: f32,
) {
    let y = DisjointMut::new(y);
    pool.for_each(rows, &|row| {
        let row = row * width..(row + 1) * width;
        let g = &gates[row.clone()];
        let mean = sum_of(g, |v| v) / width as f32;
        let deviation = (sum_of(g, |v| (v - mean) * (v - mean)) / width as f32).sqrt();
        let cutoff = mean + deviations * deviation;
        // SAFETY: one call of this job writes each row.
        let y = unsafe { y.part(row) };
        for (y, g) in y.chunks_mut(16).zip(g.chunks(16)) {
            let mut above = [0.0; 16];
            // A comparison, so that NaN is preserved.
            let of = above.iter_mut().zip(g);
            of.for_each(|(above, g)| *above = if *g <= cutoff { 0.0 } else { g - cutoff });
            activate(Activation::Gelu, &above[..g.len()], y);
        }
    });
}
