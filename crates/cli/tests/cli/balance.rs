//! Tests of the source of the factors on K and V.

use crate::usage::{assert_refused, kvant};

#[test]
fn a_plan_s_factors_are_refused_where_no_plan_is_followed() {
    let unplanned = kvant(&["run", "-p", "x", "--kv-balance", "plan"]);
    let wanted = ["--kv-balance plan: no plan is in use", "kvant plan", "--kv-plan FILE"];
    assert_refused(&unplanned, 2, &wanted);
}
