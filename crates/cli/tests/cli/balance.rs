//! Tests of the source of the factors on K and V.

use crate::usage::{assert_refused, kvant};

#[test]
fn plan_factors_are_rejected_without_a_plan() {
    let unplanned = kvant(&["run", "-p", "x", "--kv-balance", "plan"]);
    let expected = ["--kv-balance plan: no plan is in use", "kvant plan", "--kv-plan FILE"];
    assert_refused(&unplanned, 2, &expected);
}
