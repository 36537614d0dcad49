//! Tests of the device's checks.

use kvant_backend::{Backend, BackendError, limits};

use super::CpuDevice;
use crate::simd::isa::Isa;

#[test]
fn the_first_non_finite_row_is_found() {
    let device = CpuDevice::new(Isa::Scalar, 1).unwrap();
    let mut x = device.buffer(5 * 40).unwrap();
    assert_eq!(device.find_non_finite_row(&x, 5, 40), Ok(None));
    for (at, broken) in [(199, f32::NEG_INFINITY), (3 * 40, f32::INFINITY), (2 * 40 + 39, f32::NAN)] {
        x.as_mut_slice()[at] = broken;
        assert_eq!(device.find_non_finite_row(&x, 5, 40), Ok(Some(at / 40)));
        assert_eq!(device.find_non_finite_row(&x, at / 40, 40), Ok(None), "rows beyond are not read");
    }
    assert!(device.find_non_finite_row(&x, 6, 40).is_err());
    assert_eq!(device.find_non_finite_row(&x, 0, 0), Ok(None));
}

#[test]
fn absurd_thread_counts_are_rejected_before_any_thread_starts() {
    for threads in [0, limits::max_threads() + 1, usize::MAX] {
        let error = CpuDevice::from_env(Some(threads)).err().expect("a refusal");
        assert!(
            matches!(error, BackendError::OutOfRange { name: "threads", got, .. } if got == threads),
            "{error}"
        );
    }
}
