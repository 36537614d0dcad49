//! Tests of the judge: a test that cannot fail proves nothing.

use kvant_backend::BackendError;
use kvant_conformance::judge::{Expected, fault, first_written};
use kvant_conformance::kv::Answer;
use kvant_conformance::{Coverage, Skipped};
use libtest_mimic::Trial;

/// Returns a trial per claim.
pub fn trials() -> Vec<Trial> {
    let claims: [(&str, fn()); 6] = [
        ("nan_never_passes", nan_never_passes),
        ("the_worst_value_is_named", the_worst_value_is_named),
        ("writes_beyond_an_output_are_detected", writes_beyond_an_output_are_detected),
        ("nan_is_no_answer_to_a_query", nan_is_no_answer_to_a_query),
        (
            "unsupported_cases_are_listed_and_other_errors_fail",
            unsupported_cases_are_listed_and_other_errors_fail,
        ),
        (
            "every_edge_is_requested_and_omissions_are_counted",
            every_edge_is_requested_and_omissions_are_counted,
        ),
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
    let want = |value, tolerance| [Expected { value, tolerance }];
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
    assert_eq!(fault(&[1.5, 2.0], &[want(1.0, 0.5)[0], Expected::exactly(2.0)]), None);
    assert!(fault(&[1.0], &[]).is_some(), "another length passed");
}

fn the_worst_value_is_named() {
    let want = [1.0, 2.0, 3.0].map(|value| Expected { value, tolerance: 0.25 });
    let message = fault(&[1.5, 2.0, -3.0], &want).expect("two are wrong");
    for part in ["2 of 3", "[2] is -3", "want 3"] {
        assert!(message.contains(part), "{part}: {message}");
    }
    let message = fault(&[1.5, f32::NAN, 9.0], &want).expect("all are wrong");
    assert!(message.contains("[1] is NaN"), "{message}");
}

fn writes_beyond_an_output_are_detected() {
    assert_eq!(first_written(&[f32::NAN; 3]), None);
    assert_eq!(first_written(&[f32::NAN, 0.0]), Some(1));
}

fn nan_is_no_answer_to_a_query() {
    let answer = |distance| Answer { out: vec![3.0, 4.0], distance };
    assert_eq!(answer(5.0).fault(&[0.0, 0.0]), None);
    assert_eq!(answer(0.0).fault(&[3.0, 4.0]), None);
    assert!(answer(4.9).fault(&[0.0, 0.0]).is_some(), "another answer passed");
    assert!(answer(f64::INFINITY).fault(&[f32::NAN, 4.0]).is_some(), "NaN passed");
    assert!(answer(f64::NAN).fault(&[3.0, 4.0]).is_some(), "a bound of NaN passed");
    assert!(answer(5.0).fault(&[3.0]).is_some(), "another length passed");
}

fn unsupported_cases_are_listed_and_other_errors_fail() {
    let what = || "a case".to_owned();
    let unsupported = |shape: &str| BackendError::Unsupported {
        op: "attend",
        requested: shape.to_owned(),
        has: "heads of 64".to_owned(),
    };
    let mut skipped = Skipped::new(Coverage::Every);
    assert_eq!((skipped.take(Ok(7), &what), skipped.reason()), (Some(7), None));
    for shape in ["heads of 80", "heads of 80", "heads of 96"] {
        assert_eq!(skipped.take(Err::<(), _>(unsupported(shape)), &what), None);
    }
    let reason = skipped.reason().expect("three cases were refused");
    for part in ["3 cases", "heads of 80", "heads of 96"] {
        assert_eq!(reason.matches(part).count(), 1, "{part}: {reason}");
    }
    let failed = BackendError::Failed { device: "cuda:0", problem: "lost".to_owned() };
    assert!(!skipped.permits_skip(&failed), "a failure was excused");
    assert_eq!(skipped.reason(), Some(reason));
}

fn every_edge_is_requested_and_omissions_are_counted() {
    let (a, b) = ([1, 2, 3, 4, 5, 6], [10, 20, 30, 40]);
    let mut all = Skipped::new(Coverage::Every);
    assert_eq!((all.combine(&a, &b).len(), all.reason()), (24, None));
    let mut some = Skipped::new(Coverage::Each);
    for _ in 0..5 {
        let chosen = some.combine(&a, &b);
        assert_eq!(chosen.len(), 6);
        assert!(a.iter().all(|a| chosen.iter().any(|(chosen, _)| chosen == a)), "{chosen:?}");
        assert!(b.iter().all(|b| chosen.iter().any(|(_, chosen)| chosen == b)), "{chosen:?}");
    }
    assert!(some.combine(&a, &[0; 0]).is_empty());
    let reason = some.reason().expect("some were left out");
    assert!(reason.starts_with("90 of 120 combinations"), "{reason}");
}
