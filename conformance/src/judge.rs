//! The judge: what a device gave beside what it should have given.

/// Unit roundoff of f32: a result is off by at most this share of itself when it is rounded once.
pub const ROUNDING: f64 = 1.0 / (1u32 << 24) as f64;

/// The largest share of itself by which a value may be off after `n` roundings in any order (Higham, *Accuracy and Stability
/// of Numerical Algorithms*, lemma 3.1: `n u / (1 - n u)`).
pub fn roundings(n: usize) -> f64 {
    let nu = n as f64 * ROUNDING;
    nu / (1.0 - nu)
}

/// A value, and how far from it a result may lie.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Want {
    /// The value, in f64.
    pub value: f64,
    /// The largest allowed distance; 0 asks for the value itself.
    pub tolerance: f64,
}

impl Want {
    /// Nothing but `value`.
    pub fn exactly(value: f32) -> Self {
        Self { value: f64::from(value), tolerance: 0.0 }
    }

    /// Whether `got` is near enough. NaN is near nothing, and nothing is near NaN.
    pub fn admits(&self, got: f32) -> bool {
        (f64::from(got) - self.value).abs() <= self.tolerance
    }

    /// How many tolerances `got` is away; infinite where that has no answer.
    fn excess(&self, got: f32) -> f64 {
        let ratio = (f64::from(got) - self.value).abs() / self.tolerance;
        if ratio.is_nan() { f64::INFINITY } else { ratio }
    }
}

/// What is wrong with `got` in one sentence: how many values, the worst one's index, and both values. `None` when all are
/// admitted.
pub fn fault(got: &[f32], want: &[Want]) -> Option<String> {
    if got.len() != want.len() {
        return Some(format!("{} values, want {}", got.len(), want.len()));
    }
    let wrong = || got.iter().zip(want).enumerate().filter(|(_, (got, want))| !want.admits(**got));
    let (index, (got, Want { value, tolerance })) =
        wrong().max_by(|(_, (a, x)), (_, (b, y))| x.excess(**a).total_cmp(&y.excess(**b)))?;
    let (n, all) = (wrong().count(), want.len());
    Some(format!("{n} of {all} wrong; [{index}] is {got}, want {value} within {tolerance:e}"))
}

/// The first value of `got` that is no longer the NaN it was poisoned with.
pub fn first_written(got: &[f32]) -> Option<usize> {
    got.iter().position(|v| !v.is_nan())
}

/// Holds every value of `got` to `want`. `what` names device, op and case.
///
/// # Panics
/// With [`fault`], if there is one.
#[track_caller]
pub fn assert_close(got: &[f32], want: &[Want], what: &dyn Fn() -> String) {
    if let Some(fault) = fault(got, want) {
        panic!("{}: {fault}", what());
    }
}
