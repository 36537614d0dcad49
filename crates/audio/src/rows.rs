//! Operations on rows, on the host.

use kvant_backend::host_ops::for_rows;
use kvant_backend::limits;

/// Epsilon of [`cumulative_norm`], between Gemma 3n's convolutions.
const CUMULATIVE_EPS: f64 = 1e-3;

/// Adds as many values as `x` has.
pub(crate) fn add(x: &mut [f32], values: &[f32]) {
    x.iter_mut().zip(values).for_each(|(x, value)| *x += value);
}

/// Returns normalized rows.
pub(crate) fn normalized(rows: &[f32], weight: &[f32], eps: f32) -> Vec<f32> {
    let mut rows = rows.to_vec();
    for_rows(&mut rows, weight.len(), limits::n_cores(), |row| rms_norm(row, Some(weight), eps));
    rows
}

/// RMSNorm (arXiv 1910.07467) of a row.
pub(crate) fn rms_norm(row: &mut [f32], weight: Option<&[f32]>, eps: f32) {
    let mean = row.iter().map(|x| x * x).sum::<f32>() / row.len() as f32;
    let scale = 1.0 / (mean + eps).sqrt();
    row.iter_mut().for_each(|x| *x *= scale);
    if let Some(weight) = weight {
        row.iter_mut().zip(weight).for_each(|(x, weight)| *x *= weight);
    }
}

/// LayerNorm (arXiv 1607.06450) of a row, without a bias.
pub(crate) fn layer_norm(row: &mut [f32], weight: &[f32], eps: f32) {
    let mean = row.iter().sum::<f32>() / row.len() as f32;
    row.iter_mut().for_each(|x| *x -= mean);
    let variance = row.iter().map(|x| x * x).sum::<f32>() / row.len() as f32;
    let scale = 1.0 / (variance + eps).sqrt();
    row.iter_mut().zip(weight).for_each(|(x, weight)| *x *= scale * weight);
}

/// Normalizes rows of `width` values with the mean of all up to each row, and with the mean of
/// their squared distances, each from the mean up to its own row. Weights are those of channels,
/// the last axis.
pub(crate) fn cumulative_norm(rows: &mut [f32], width: usize, weight: &[f32]) {
    let [mut n, mut sum, mut squares] = [0.0; 3];
    for row in rows.chunks_exact_mut(width) {
        n += width as f64;
        sum += row.iter().map(|&x| f64::from(x)).sum::<f64>();
        let mean = sum / n;
        squares += row.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>();
        let scale = 1.0 / (squares / n + CUMULATIVE_EPS).sqrt();
        for (x, weight) in row.iter_mut().zip(weight.iter().cycle()) {
            *x = ((f64::from(*x) - mean) * scale) as f32 * weight;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statistics_are_those_of_all_rows_up_to_each() {
        let mut rows = [1.0, 3.0, 2.0, 6.0];
        cumulative_norm(&mut rows, 2, &[1.0, 2.0]);
        // Means 2 and 3; mean squares 1 and (2 + 1 + 9) / 4.
        let (first, second) = (1.001f32.sqrt(), 3.001f32.sqrt());
        let want = [-1.0 / first, 2.0 / first, -1.0 / second, 6.0 / second];
        assert!(rows.iter().zip(want).all(|(x, want)| (x - want).abs() < 1e-6), "{rows:?}");
    }
}
