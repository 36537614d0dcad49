//! Mean squares of rows under RoPE, averaged over positions.
//!
//! A row seen at position p is rotated by a further angle `t f` for each pair of dimensions when
//! its text is t tokens later, so that factors from statistics of short texts alone would be wrong
//! for long ones. If x and y are the dimensions of a pair, the mean of `(c x - s y)^2` over all t
//! up to `reach`, c and s the cosine and sine of `t f`, is
//!
//! ```text
//! C x^2 + S y^2 - 2 M x y      C = 1/2 + sin(2 r) / 4 r,  S = 1 - C,  M = (1 - cos(2 r)) / 4 r,
//!                               r = reach f
//! ```
//!
//! and that of `(s x + c y)^2` the same with x and y exchanged and the other sign. Slowly rotating
//! dimensions have separate squares; in a pair with many rotations both have their mean, and with
//! it one factor, which holds at any position.

use kvant::RopeParams;

/// Two dimensions of a head that RoPE rotates into each other.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Pair {
    dims: [usize; 2],
    /// Angle per position.
    frequency: f64,
}

/// Returns the RoPE pairs from dimension `first` on, with their angles per position `[n_rot / 2]`;
/// other dimensions of a head are not rotated.
pub(super) fn pairs(rope: RopeParams, first: usize, frequencies: &[f64]) -> Vec<Pair> {
    let dims = |i: usize| rope.pair(i).map(|dim| first + dim);
    frequencies.iter().enumerate().map(|(i, &frequency)| Pair { dims: dims(i), frequency }).collect()
}

/// Sums over the rows of some heads.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Moments {
    pairs: Vec<Pair>,
    head_dim: usize,
    /// `[n_heads * head_dim]`
    squares: Vec<f64>,
    /// Products of the two dimensions of each pair, `[n_heads * pairs]`.
    products: Vec<f64>,
}

impl Moments {
    pub fn new(pairs: Vec<Pair>, n_heads: usize, head_dim: usize) -> Self {
        let products = vec![0.0; n_heads * pairs.len()];
        Self { pairs, head_dim, squares: vec![0.0; n_heads * head_dim], products }
    }

    /// Adds a row `[head_dim]` of head `head` with a weight.
    pub fn add(&mut self, head: usize, weight: f64, row: &[f32]) {
        let squares = &mut self.squares[head * self.head_dim..][..self.head_dim];
        squares.iter_mut().zip(row).for_each(|(sum, &x)| *sum += weight * f64::from(x).powi(2));
        let products = &mut self.products[head * self.pairs.len()..];
        for (sum, Pair { dims: [x, y], .. }) in products.iter_mut().zip(&self.pairs) {
            *sum += weight * f64::from(row[*x]) * f64::from(row[*y]);
        }
    }

    /// Returns the sums averaged over text positions from 0 to `reach` tokens later, `[n_heads *
    /// head_dim]`.
    pub fn turned(&self, reach: usize) -> Vec<f64> {
        let mut squares = self.squares.clone();
        let n = self.pairs.len().max(1);
        for (squares, products) in squares.chunks_exact_mut(self.head_dim).zip(self.products.chunks_exact(n))
        {
            for (Pair { dims: [x, y], frequency }, xy) in self.pairs.iter().zip(products) {
                let angle = reach as f64 * frequency;
                if angle == 0.0 {
                    continue;
                }
                let cosines = 0.5 + (2.0 * angle).sin() / (4.0 * angle);
                let mixed = 2.0 * (1.0 - (2.0 * angle).cos()) / (4.0 * angle) * xy;
                let [xx, yy] = [squares[*x], squares[*y]];
                // Prevents squares that are negative by rounding.
                squares[*x] = (cosines * xx + (1.0 - cosines) * yy - mixed).max(0.0);
                squares[*y] = (cosines * yy + (1.0 - cosines) * xx + mixed).max(0.0);
            }
        }
        squares
    }
}

#[cfg(test)]
mod tests {
    use kvant::Pairing;

    use super::*;

    /// The first pair rotates by 1 per position, the next by a tenth.
    fn all(pairing: Pairing, n_rot: usize) -> Vec<Pair> {
        pairs(RopeParams { pairing, n_rot }, 0, &[1.0, 0.1][..n_rot / 2])
    }

    #[test]
    fn pairs_follow_the_pair_order_of_rope() {
        let dims = |pairing, n_rot| all(pairing, n_rot).iter().map(|pair| pair.dims).collect::<Vec<_>>();
        assert_eq!(dims(Pairing::Halves, 4), [[0, 2], [1, 3]]);
        assert_eq!(dims(Pairing::Interleaved, 4), [[0, 1], [2, 3]]);
        assert_eq!(dims(Pairing::Halves, 0), [[0; 2]; 0]);
        let behind = pairs(RopeParams { pairing: Pairing::Interleaved, n_rot: 4 }, 3, &[1.0, 0.1]);
        assert_eq!(behind.iter().map(|pair| pair.dims).collect::<Vec<_>>(), [[3, 4], [5, 6]]);
    }

    #[test]
    fn averaged_squares_match_rows_rotated_one_by_one() {
        let (pairs, reach) = (all(Pairing::Halves, 4), 40);
        // One dimension has no RoPE, and the second head has other rows.
        let rows = [[1.0, 0.5, -2.0, 0.25, 3.0], [0.5, -1.0, -1.0, 2.0, 1.0]];
        let mut moments = Moments::new(pairs.clone(), 2, 5);
        // The second row counts twice.
        moments.add(0, 1.0, &rows[0]);
        moments.add(0, 2.0, &rows[1]);
        moments.add(1, 2.0, &rows[1]);
        let mut mean = [0.0; 10];
        let steps = 4000;
        for step in 0..steps {
            let t = (f64::from(step) + 0.5) / f64::from(steps) * reach as f64;
            for ((row, heads), weight) in rows.iter().zip([&[0][..], &[0, 1]]).zip([1.0, 2.0]) {
                let mut turned = row.map(f64::from);
                for Pair { dims: [x, y], frequency } in pairs.iter().copied() {
                    let (s, c) = (t * frequency).sin_cos();
                    let [a, b] = [turned[x], turned[y]];
                    (turned[x], turned[y]) = (c * a - s * b, s * a + c * b);
                }
                for head in heads {
                    turned
                        .iter()
                        .enumerate()
                        .for_each(|(d, x)| mean[5 * head + d] += weight * x * x / f64::from(steps));
                }
            }
        }
        let close = |a: &[f64], b: &[f64]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-4);
        assert!(close(&moments.turned(reach), &mean), "{:?} {mean:?}", moments.turned(reach));
        assert_eq!(moments.turned(0), moments.squares);
        // With a large reach, the dimensions of a pair have their mean.
        let far = moments.turned(1_000_000);
        assert!((far[0] - far[2]).abs() < 1e-4 && (far[0] + far[2] - 7.5).abs() < 1e-9, "{far:?}");
    }
}
