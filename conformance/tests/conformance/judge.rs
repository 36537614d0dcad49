//! What the judge itself must do: a test that cannot fail shows nothing.

use kvant_conformance::judge::{Want, fault, first_written};
use libtest_mimic::Trial;

/// A trial for each claim.
pub fn trials() -> Vec<Trial> {
    let claims: [(&str, fn()); 3] = [
        ("nan_never_passes", nan_never_passes),
        ("the_worst_value_is_named", the_worst_value_is_named),
        ("what_is_written_behind_an_output_is_seen", what_is_written_behind_an_output_is_seen),
    ];
    let trial = |(name, claim): (&str, fn())| {
        Trial::test(format!("judge::{name}"), move || {
            claim();
            Ok(())
        })
    };
    claims.into_iter().map(trial).collect()
}

fn nan_never_passes() {
    let want = |value, tolerance| [Want { value, tolerance }];
    for (got, want) in [
        (f32::NAN, want(1.0, 1.0)),
        (f32::NAN, want(f64::NAN, f64::INFINITY)),
        (f32::NAN, want(1.0, f64::INFINITY)),
        (1.0, want(f64::NAN, 1.0)),
        (1.0, want(1.0, f64::NAN)),
        (f32::INFINITY, want(f64::INFINITY, 1.0)),
    ] {
        assert!(fault(&[got], &want).is_some(), "{got} passed for {want:?}");
    }
    assert_eq!(fault(&[1.5, 2.0], &[want(1.0, 0.5)[0], Want::exactly(2.0)]), None);
    assert!(fault(&[1.0], &[]).is_some(), "another length passed");
}

fn the_worst_value_is_named() {
    let want = [1.0, 2.0, 3.0].map(|value| Want { value, tolerance: 0.25 });
    let message = fault(&[1.5, 2.0, -3.0], &want).expect("two are wrong");
    for part in ["2 of 3", "[2] is -3", "want 3"] {
        assert!(message.contains(part), "{part}: {message}");
    }
    let message = fault(&[1.5, f32::NAN, 9.0], &want).expect("all are wrong");
    assert!(message.contains("[1] is NaN"), "{message}");
}

fn what_is_written_behind_an_output_is_seen() {
    assert_eq!(first_written(&[f32::NAN; 3]), None);
    assert_eq!(first_written(&[f32::NAN, 0.0]), Some(1));
}
