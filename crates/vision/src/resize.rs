//! Image resizing, bit-identical to Pillow, with which the models were trained.
//!
//! Horizontal pass first, then the vertical pass, with 8-bit values in between and 22-bit weights.
//! Crates with another order differ where a filter overshoots.

/// Resampling filter, by Pillow's names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Filter {
    Bilinear,
    Bicubic,
    Lanczos,
}

impl Filter {
    /// Returns the support in pixels.
    fn support(self) -> f64 {
        match self {
            Self::Bilinear => 1.0,
            Self::Bicubic => 2.0,
            Self::Lanczos => 3.0,
        }
    }

    /// Returns the weight of a pixel at distance `x`.
    fn weight(self, x: f64) -> f64 {
        let far = x.abs();
        match self {
            _ if far >= self.support() => 0.0,
            Self::Bilinear => 1.0 - far,
            // Keys' cubic convolution, with parameter -1/2.
            Self::Bicubic if far < 1.0 => (1.5 * far - 2.5) * far * far + 1.0,
            Self::Bicubic => ((-0.5 * far + 2.5) * far - 4.0) * far + 2.0,
            Self::Lanczos => sinc(x) * sinc(x / 3.0),
        }
    }
}

fn sinc(x: f64) -> f64 {
    let x = x * std::f64::consts::PI;
    if x == 0.0 { 1.0 } else { x.sin() / x }
}

const BITS: u32 = 22;

/// Filter taps of an output pixel: the first input pixel, and the weights.
struct Taps {
    first: usize,
    weights: Vec<i32>,
}

/// Returns the taps of each of `to` output pixels over `from` input pixels.
fn taps(from: usize, to: usize, filter: Filter) -> Vec<Taps> {
    let step = from as f64 / to as f64;
    let width = step.max(1.0);
    let reach = filter.support() * width;
    let of_pixel = |pixel: usize| {
        let centre = (pixel as f64 + 0.5) * step;
        let first = (centre - reach + 0.5).max(0.0) as usize;
        let end = ((centre + reach + 0.5) as usize).min(from);
        let weights: Vec<f64> =
            (first..end).map(|i| filter.weight((i as f64 - centre + 0.5) * (1.0 / width))).collect();
        let sum: f64 = weights.iter().sum();
        let whole = |weight: f64| (weight / sum * f64::from(1 << BITS) + 0.5f64.copysign(weight)) as i32;
        Taps { first, weights: weights.into_iter().map(whole).collect() }
    };
    (0..to).map(of_pixel).collect()
}

fn byte(sum: i32) -> u8 {
    (sum >> BITS).clamp(0, 255) as u8
}

/// Resizes an image `[height, width, 3]`.
pub(crate) fn resize(rgb: &[u8], [width, height]: [usize; 2], to: [usize; 2], filter: Filter) -> Vec<u8> {
    const HALF: i32 = 1 << (BITS - 1);
    let narrow: Vec<u8> = if to[0] == width {
        rgb.to_vec()
    } else {
        let taps = taps(width, to[0], filter);
        let pixel = |row: &[u8], taps: &Taps| {
            let mut sums = [HALF; 3];
            for (pixel, weight) in row[3 * taps.first..].chunks_exact(3).zip(&taps.weights) {
                sums.iter_mut().zip(pixel).for_each(|(sum, colour)| *sum += i32::from(*colour) * weight);
            }
            sums.map(byte)
        };
        let rows = rgb.chunks_exact(3 * width);
        rows.flat_map(|row| taps.iter().flat_map(move |taps| pixel(row, taps))).collect()
    };
    if to[1] == height {
        return narrow;
    }
    let row = 3 * to[0];
    let mut sums = vec![HALF; row];
    let mut all = Vec::with_capacity(row * to[1]);
    for Taps { first, weights } in taps(height, to[1], filter) {
        sums.fill(HALF);
        for (pixels, weight) in narrow[first * row..].chunks_exact(row).zip(weights) {
            sums.iter_mut().zip(pixels).for_each(|(sum, colour)| *sum += i32::from(*colour) * weight);
        }
        all.extend(sums.iter().map(|sum| byte(*sum)));
    }
    all
}
