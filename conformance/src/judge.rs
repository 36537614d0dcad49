//! The judge: compares a device's results with the expected ones.

/// Unit roundoff of f32: the maximum relative error of one rounding.
pub const ROUNDING: f64 = 1.0 / (1u32 << 24) as f64;

/// Returns the maximum relative error after `n` roundings in any order (Higham, *Accuracy and
/// Stability of Numerical Algorithms*, lemma 3.1: `n u / (1 - n u)`).
pub fn roundings(n: usize) -> f64 {
    let nu = n as f64 * ROUNDING;
    nu / (1.0 - nu)
}

/// An expected value, and its tolerance.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Expected {
    /// The value, in f64.
    pub value: f64,
    /// Maximum distance of a result; 0 requires the value itself.
    pub tolerance: f64,
}

impl Expected {
    /// Expects exactly `value`.
    pub fn exactly(value: f32) -> Self {
        Self { value: f64::from(value), tolerance: 0.0 }
    }

    /// Returns whether `got` is within the tolerance. NaN never is.
    pub fn admits(&self, got: f32) -> bool {
        (f64::from(got) - self.value).abs() <= self.tolerance
    }

    /// Returns the distance of `got` in tolerances; infinite if undefined.
    fn excess(&self, got: f32) -> f64 {
        let ratio = (f64::from(got) - self.value).abs() / self.tolerance;
        if ratio.is_nan() { f64::INFINITY } else { ratio }
    }
}

/// Returns the fault of `got` in one sentence: the number of wrong values, the worst one's index,
/// and both values. `None` when all are admitted.
pub fn fault(got: &[f32], want: &[Expected]) -> Option<String> {
    if got.len() != want.len() {
        return Some(format!("{} values, want {}", got.len(), want.len()));
    }
    let wrong = || got.iter().zip(want).enumerate().filter(|(_, (got, want))| !want.admits(**got));
    let (index, (got, Expected { value, tolerance })) =
        wrong().max_by(|(_, (a, x)), (_, (b, y))| x.excess(**a).total_cmp(&y.excess(**b)))?;
    let (n, all) = (wrong().count(), want.len());
    Some(format!("{n} of {all} wrong; [{index}] is {got}, want {value} within {tolerance:e}"))
}

/// Returns the index of the first value of `got` that is no longer the poison NaN.
pub fn first_written(got: &[f32]) -> Option<usize> {
    got.iter().position(|v| !v.is_nan())
}

/// Checks every value of `got` against `want`. `what` names device, op and case.
///
/// # Panics
///
/// With [`fault`], if there is one.
#[track_caller]
pub fn assert_close(got: &[f32], want: &[Expected], what: &dyn Fn() -> String) {
    if let Some(fault) = fault(got, want) {
        panic!("{}: {fault}", what());
    }
}
