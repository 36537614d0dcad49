//! Relative position biases in buckets of distances (T5, arXiv 1910.10683), as MPNet has them.

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
}
