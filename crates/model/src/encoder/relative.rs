//! Relative position biases: in buckets of distances (T5, arXiv 1910.10683), as MPNet has them, and
//! proportional to the distance (ALiBi, arXiv 2108.12409).

/// The distance from which on all share the last bucket.
const MAX_DISTANCE: f32 = 128.0;

/// Returns the biases of the distances from `1 - longest` to `longest - 1`, `[n_heads, 2 longest -
/// 1]`, from those of the buckets `[n_buckets, n_heads]`.
pub(super) fn biases(of_buckets: &[f32], n_heads: usize, longest: usize) -> Vec<f32> {
    let (n_buckets, longest) = (of_buckets.len() / n_heads, longest as i64);
    let distances = 1 - longest..longest;
    let head = |head: usize| {
        distances.clone().map(move |distance| of_buckets[bucket(distance, n_buckets) * n_heads + head])
    };
    (0..n_heads).flat_map(head).collect()
}

/// Returns the bucket of a distance, the position of the key minus that of the query. Each
/// direction has half of the buckets: half of these for one distance each, the rest for ranges that
/// widen exponentially. In f32, as models are trained.
fn bucket(distance: i64, n_buckets: usize) -> usize {
    let of_direction = n_buckets / 2;
    let first = if distance > 0 { of_direction } else { 0 };
    let (n, n_exact) = (distance.unsigned_abs() as usize, of_direction / 2);
    if n < n_exact {
        return first + n;
    }
    let n_exact = n_exact as f32;
    let share = (n as f32 / n_exact).ln() / (MAX_DISTANCE / n_exact).ln();
    let beyond = (share * (of_direction as f32 - n_exact)) as usize;
    first + (n_exact as usize).saturating_add(beyond).min(of_direction - 1)
}

/// Returns the biases of the distances from `1 - longest` to `longest - 1`, `[n_heads, 2 longest -
/// 1]`: `-slope |distance|`.
pub(super) fn linear_biases(n_heads: usize, longest: usize) -> Vec<f32> {
    let longest = longest as i64;
    let of_head =
        |slope: f32| (1 - longest..longest).map(move |distance| -slope * distance.unsigned_abs() as f32);
    slopes(n_heads).into_iter().flat_map(of_head).collect()
}

/// Returns the slopes of the heads: powers of 2^(-8 / n) for n heads, if n is a power of two.
/// Otherwise, the heads beyond the largest such n below have every other slope of twice as many.
fn slopes(n_heads: usize) -> Vec<f32> {
    let of = |n: usize| (1..=n).map(move |i| (-8.0 * i as f64 / n as f64).exp2() as f32);
    let whole = n_heads.checked_ilog2().map_or(0, |log| 1 << log);
    of(whole).chain(of(2 * whole).step_by(2)).take(n_heads).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_widen_with_the_distance_in_both_directions() {
        let buckets = [0, 1, 7, 8, 11, 12, 16, 32, 64, 90, 91, 127, 128, 500].map(|n| bucket(-n, 32));
        assert_eq!(buckets, [0, 1, 7, 8, 8, 9, 10, 12, 14, 14, 15, 15, 15, 15]);
        assert!((1..600).all(|n| bucket(n, 32) == 16 + bucket(-n, 32)));
    }

    #[test]
    fn biases_lie_by_head_and_distance() {
        let of_buckets: Vec<f32> = (0..64).map(|i| i as f32).collect();
        // Two heads: the value of a bucket is twice its index, plus the head.
        let head = [4.0, 2.0, 0.0, 34.0, 36.0];
        let want: Vec<f32> = (0..2).flat_map(|h| head.map(|x| x + h as f32)).collect();
        assert_eq!(biases(&of_buckets, 2, 3), want);
    }

    /// Those of the paper's code for 8 heads and for 12.
    #[test]
    fn slopes_are_powers_and_every_other_of_twice_as_many() {
        let root = |n: f32| (-n / 2.0).exp2();
        let of_8: Vec<f32> = (1..=8).map(|i| (-i as f32).exp2()).collect();
        assert_eq!(slopes(8), of_8);
        assert_eq!(slopes(12), [&of_8[..], &[root(1.0), root(3.0), root(5.0), root(7.0)]].concat());
        assert_eq!(slopes(1), [1.0 / 256.0]);
    }

    #[test]
    fn linear_biases_fall_with_the_distance_on_both_sides() {
        let (a, b) = (1.0 / 16.0, 1.0 / 256.0);
        let want = [-2.0 * a, -a, 0.0, -a, -2.0 * a, -2.0 * b, -b, 0.0, -b, -2.0 * b];
        assert_eq!(linear_biases(2, 3), want);
    }
}
