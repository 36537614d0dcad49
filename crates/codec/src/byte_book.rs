//! Codebooks rounded to bytes, for kernels that look up levels in registers and multiply integers.

use crate::Codebook;

/// A codebook in bytes: centroid i is within half a step of `(bytes[i] - 128) · step`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ByteBook {
    /// Unsigned bytes, `[16]`; 128 encodes 0 and fills the entries beyond the levels.
    pub bytes: [u8; 16],
    /// The value of one byte unit.
    pub step: f32,
}

impl ByteBook {
    /// Rounds `book` to bytes.
    ///
    /// The largest centroid becomes the integer from 96 to 127 that minimizes the rounding error of
    /// the others. For a Gaussian of variance 1 this adds 1e-7, 4e-6 and 3e-5 (2, 3 and 4 bits) to
    /// the codec's own error of 0.117, 0.035 and 0.0095.
    pub const fn of(book: &Codebook) -> Self {
        let (mut best, mut min_loss) = (0, f32::INFINITY);
        let mut largest = 96;
        while largest <= 127 {
            let loss = Self::with_largest(book, largest).loss(book);
            if loss < min_loss {
                (best, min_loss) = (largest, loss);
            }
            largest += 1;
        }
        Self::with_largest(book, best)
    }

    const fn with_largest(book: &Codebook, largest: u8) -> Self {
        let centroids = book.centroids();
        let step = centroids[centroids.len() - 1] / largest as f32;
        let mut bytes = [128; 16];
        let mut i = 0;
        while i < centroids.len() {
            // The sum is positive, so truncation rounds to nearest.
            bytes[i] = (128.5 + centroids[i] / step) as u8;
            i += 1;
        }
        Self { bytes, step }
    }

    const fn value(&self, index: usize) -> f32 {
        (self.bytes[index] as f32 - 128.0) * self.step
    }

    /// Returns the sum of squared errors of the centroids.
    const fn loss(&self, book: &Codebook) -> f32 {
        let (mut sum, mut i) = (0.0, 0);
        while i < book.centroids().len() {
            let error = self.value(i) - book.centroids()[i];
            sum += error * error;
            i += 1;
        }
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    const BOOKS: [(ByteBook, Codebook, f64); 4] = [
        (ByteBook::of(&Codebook::GAUSS2), Codebook::GAUSS2, 1e-7),
        (ByteBook::of(&Codebook::GAUSS3), Codebook::GAUSS3, 4e-6),
        (ByteBook::of(&Codebook::GAUSS4), Codebook::GAUSS4, 3.1e-5),
        (ByteBook::of(&Codebook::TQ3), Codebook::TQ3, 3.1e-5),
    ];

    #[test]
    fn byte_books_are_within_half_a_step_and_keep_symmetry() {
        for (bytes, book, _) in BOOKS {
            let n = book.centroids().len();
            for (i, &c) in book.centroids().iter().enumerate() {
                assert!((bytes.value(i) - c).abs() <= 0.5001 * bytes.step, "{i}: {} {c}", bytes.value(i));
                let is_symmetric = book.centroids()[n - 1 - i] == -c;
                assert!(!is_symmetric || bytes.value(i) == -bytes.value(n - 1 - i));
            }
        }
    }

    #[test]
    fn byte_books_add_no_more_error_than_documented() {
        for (bytes, book, max_loss) in BOOKS {
            let (mut random, mut loss) = (Random::new(2), 0.0);
            for _ in 0..20_000 {
                let i = usize::from(book.nearest(random.gaussian() as f32));
                let scale = book.levels()[i] / book.centroids()[i];
                loss += f64::from((bytes.value(i) - book.centroids()[i]) * scale).powi(2) / 20_000.0;
            }
            assert!(loss <= max_loss, "{loss} above {max_loss}");
        }
    }
}
