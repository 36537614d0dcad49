//! Rotary embedding: rotates pairs by their angles, after the norm of their head; later rows are
//! unchanged.

use kvant_backend::{Backend, Heads, Norm, Pairing, RopeParams};

use crate::judge::{Expected, roundings};
use crate::reference::{pair, rms_norm, rotate_pairs};
use crate::skipped::product;
use crate::weights::{gaussian, norm_error};
use crate::{DeviceUnderTest, Skipped};

const EPS: f32 = 1e-6;

/// One shape of the op.
#[derive(Clone, Copy)]
struct Case<'a> {
    heads: Heads,
    params: RopeParams,
    /// Norm weight of all heads, or of each.
    weight: Option<&'a [f32]>,
}

/// Compares `rope` with its equation.
pub fn run<B: Backend>(subject: &DeviceUnderTest<B>) -> Skipped {
    let mut skipped = subject.skipped();
    // Odd counts, heads that fill no vector, and the sizes of models.
    let heads = [(1, 2), (3, 10), (2, 64), (1, 80), (5, 128), (1, 256)];
    let n_rot: [fn(usize) -> usize; 4] = [|_| 0, |_| 2, |dim| dim / 4 * 2, |dim| dim];
    let pairings = product(&[Pairing::Interleaved, Pairing::Halves], &[None, Some(false), Some(true)]);
    let cases = skipped.combine(&heads, &product(&product(&n_rot, &pairings), &[0, 1, 5, 33]));
    for ((n, dim), ((n_rot, (pairing, norm)), rows)) in cases {
        let weight = norm.map(|of_each| gaussian(1, if of_each { n * dim } else { dim }, 1.0));
        let params = RopeParams { pairing, n_rot: n_rot(dim) };
        let case = Case { heads: Heads { n, dim }, params, weight: weight.as_deref() };
        pairs_are_rotated_by_their_angles(subject, case, rows);
    }
    wrong_shapes_are_refused(subject);
    skipped
}

fn pairs_are_rotated_by_their_angles<B: Backend>(subject: &DeviceUnderTest<B>, case: Case<'_>, rows: usize) {
    let Case { heads, params, weight } = case;
    let (cols, n_rows) = (heads.n * heads.dim, rows + 1);
    let x = gaussian(2, n_rows * cols, 3.0);
    // Cosine and sine may contain any factor.
    let radians = gaussian(3, n_rows * params.n_rot / 2, 2.0);
    let angles: Vec<f32> = radians.iter().flat_map(|a| [1.25 * a.cos(), 1.25 * a.sin()]).collect();
    let mut want: Vec<Expected> = x.iter().copied().map(Expected::exactly).collect();
    for row in 0..rows {
        let angles = &angles[row * params.n_rot..][..params.n_rot];
        for (i, head) in want[row * cols..][..cols].chunks_exact_mut(heads.dim).enumerate() {
            let own = |weight: &'_ [f32]| i * heads.dim % weight.len();
            let weight = weight.map(|weight| &weight[own(weight)..][..heads.dim]);
            expect_head(head, params, weight, angles.as_chunks().0);
        }
    }
    let mut buffer = subject.guarded(&x);
    let what = || {
        subject.case(
            "rope",
            format_args!("{heads:?} {params:?}, {rows} rows, norm {:?}", weight.map(<[f32]>::len)),
        )
    };
    let weight = weight.map(|weight| subject.upload(weight));
    let norm = weight.as_ref().map(|weight| Norm { weight, eps: EPS });
    let result = subject.device().rope(&mut buffer, rows, heads, norm, params, &subject.upload(&angles));
    result.unwrap_or_else(|error| panic!("{}: {error}", what()));
    subject.expect(&buffer, &want, &what);
}

/// Computes the expected values of a head. A norm costs each value [`norm_error`]; a rotation two
/// products and a sum, three roundings of the terms.
fn expect_head(head: &mut [Expected], params: RopeParams, weight: Option<&[f32]>, angles: &[[f32; 2]]) {
    let mut values: Vec<f64> = head.iter().map(|want| want.value).collect();
    let mut error = 0.0;
    if let Some(weight) = weight {
        values = rms_norm(&values, weight, EPS);
        error = norm_error(values.len());
    }
    let before: Vec<f64> = values.iter().map(|v| v.abs()).collect();
    rotate_pairs(&mut values, params.pairing, angles);
    let mut tolerances: Vec<f64> = before.iter().map(|v| error * v).collect();
    for (i, angle) in angles.iter().enumerate() {
        let (a, b) = pair(params.pairing, angles.len(), i);
        let [cos, sin] = angle.map(|v| f64::from(v).abs());
        let allowed = error + roundings(3);
        tolerances[a] = allowed * (before[a] * cos + before[b] * sin);
        tolerances[b] = allowed * (before[a] * sin + before[b] * cos);
    }
    for ((want, value), tolerance) in head.iter_mut().zip(values).zip(tolerances) {
        *want = Expected { value, tolerance };
    }
}

fn wrong_shapes_are_refused<B: Backend>(subject: &DeviceUnderTest<B>) {
    let heads = Heads { n: 2, dim: 8 };
    let (mut x, short) = (subject.upload(&[1.0; 32]), subject.upload(&[1.0; 7]));
    let angles = subject.upload(&[1.0; 16]);
    let mut rope = |rows, n_rot, norm, angles| {
        let params = RopeParams { pairing: Pairing::Halves, n_rot };
        subject.device().rope(&mut x, rows, heads, norm, params, angles)
    };
    let norm = Some(Norm { weight: &short, eps: EPS });
    subject.expect_refusal("rope", "three rows of two", rope(3, 4, None, &angles));
    subject.expect_refusal("rope", "half a pair", rope(1, 3, None, &angles));
    subject.expect_refusal("rope", "more than a head", rope(1, 10, None, &angles));
    subject.expect_refusal("rope", "a norm of seven", rope(1, 4, norm, &angles));
    subject.expect_refusal("rope", "angles for less", rope(2, 8, None, &short));
}
