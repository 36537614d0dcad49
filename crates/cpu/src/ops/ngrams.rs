//! Values that n-grams add to residual streams: see [`kvant_backend::Backend::inject_ngrams`].

use kvant_backend::{NgramInjection, TokenSpan};

use crate::host::buffer::CpuBuffer;
use crate::host::disjoint::DisjointMut;
use crate::host::pool::Pool;
use crate::ops::exp::exp;
use crate::ops::norm::inverse_rms;

/// Channels that are convolved at a time.
const CHANNELS: usize = 64;

/// The operands of the op. Shapes have been checked.
#[derive(Clone, Copy)]
pub(crate) struct InjectArgs<'a> {
    pub injection: NgramInjection<'a, CpuBuffer>,
    /// `[rows, n, width]`
    pub keys: &'a [f32],
    /// `[rows, width]`
    pub values: &'a [f32],
    /// Rows of all parts.
    pub rows: usize,
}

/// Adds the values of the rows `of` of one sequence to `streams` `[n, rows, width]`, starting from
/// `state` `[(taps - 1) dilation, n * width]`.
pub(crate) fn inject_ngrams(
    pool: &Pool,
    args: InjectArgs<'_>,
    of: TokenSpan,
    state: &mut [f32],
    streams: &mut [f32],
) {
    let NgramInjection { n, width, kernel, taps, dilation, .. } = args.injection;
    let (all, n_before) = (n * width, (taps - 1) * dilation);
    let mut entered = state.to_vec();
    entered.resize((n_before + of.n) * all, 0.0);
    let (entering, streams) = (DisjointMut::new(&mut entered[n_before * all..]), DisjointMut::new(streams));
    pool.for_each(of.n * n, &|item| {
        let (row, j) = (item / n, item % n);
        let at = (j * args.rows + of.first + row) * width;
        // SAFETY: one call of this job takes each row of a stream.
        let (stream, entering) =
            unsafe { (streams.part(at..at + width), entering.part(item * width..(item + 1) * width)) };
        gate_values(args, of.first + row, j, stream, entering);
    });

    let (kernel, entered) = (kernel.as_slice(), &*entered);
    pool.for_each(of.n * n, &|item| {
        let (row, j) = (item / n, item % n);
        let at = (j * args.rows + of.first + row) * width;
        // SAFETY: one call of this job takes each row of a stream.
        let stream = unsafe { streams.part(at..at + width) };
        for (chunk, stream) in stream.chunks_mut(CHANNELS).enumerate() {
            let first = j * width + chunk * CHANNELS;
            let mut sums = [0.0; CHANNELS];
            for tap in 0..taps {
                let read = &entered[(row + tap * dilation) * all + first..][..stream.len()];
                let of_channels = sums.iter_mut().zip(read).zip(&kernel[tap * all + first..]);
                of_channels.for_each(|((sum, read), weight)| *sum += weight * read);
            }
            stream.iter_mut().zip(sums).for_each(|(h, y)| *h += y / (1.0 + exp(-y)));
        }
    });
    state.copy_from_slice(&entered[of.n * all..]);
}

/// Adds the gated values of a row to stream j, and writes what its convolution reads of them.
fn gate_values(
    InjectArgs { injection, keys, values, .. }: InjectArgs<'_>,
    row: usize,
    j: usize,
    stream: &mut [f32],
    entering: &mut [f32],
) {
    let NgramInjection { n, width, norms, norm_eps, .. } = injection;
    let [of_keys, of_streams, of_conv] = norms.map(|norm| &norm.as_slice()[j * width..][..width]);
    let (key, value) = (&keys[(row * n + j) * width..][..width], &values[row * width..][..width]);
    let of_each = key.iter().zip(of_keys).zip(stream.iter().zip(of_streams));
    let product: f32 = of_each.map(|((k, of_key), (h, of_stream))| k * of_key * h * of_stream).sum();
    let score = product * inverse_rms(key, norm_eps) * inverse_rms(stream, norm_eps) / (width as f32).sqrt();
    let gate = 1.0 / (1.0 + exp(-signed_root(score)));
    entering.iter_mut().zip(value).for_each(|(g, value)| *g = gate * value);
    stream.iter_mut().zip(&*entering).for_each(|(h, g)| *h += g);
    let by = inverse_rms(entering, norm_eps);
    entering.iter_mut().zip(of_conv).for_each(|(g, norm)| *g *= by * norm);
}

/// Returns the root of the magnitude of a score, with its sign; 0 of 0.
fn signed_root(score: f32) -> f32 {
    let magnitude = score.abs();
    // A comparison, so that NaN is preserved.
    let least = NgramInjection::MIN_SCORE;
    let root = if magnitude < least { least } else { magnitude }.sqrt();
    if score == 0.0 { 0.0 } else { root.copysign(score) }
}
