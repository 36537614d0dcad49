//! Runs a hundred inputs of `tools/hostile`.

use kvant_hostile::{KINDS, measure};

#[test]
fn hostile_inputs_are_answered_or_rejected() {
    let kinds = KINDS.each_ref();
    assert!(
        measure(env!("CARGO_BIN_EXE_kvant").as_ref(), 100, &kinds).unwrap(),
        "the table names the inputs"
    );
}
