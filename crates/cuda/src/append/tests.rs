//! CUDA-specific tests of append: launches that are split. The conformance suites cover everything
//! else.

use kvant_codec::DType;
use kvant_conformance::kv::{Batch, Shape, Tokens};

use crate::conformance::on_emulator;

#[test]
fn more_heads_than_a_launch_takes_take_several() {
    let Some(subject) = on_emulator(80) else { return };
    let heads =
        Shape { n_kv_heads: 26, k_head_dim: 32, v_head_dim: 32, ..Shape::new(DType::Q8_0, DType::F16) };
    let tokens = Tokens::gaussian(heads, 34, 1);
    let mut batch = Batch::new(&subject, &[&tokens]);
    for n in [33, 1] {
        batch.append(&[n]).unwrap();
        batch.assert_stored_tokens(&|| format!("{n} tokens of 26 heads"));
    }
}

/// More sequences than a launch takes, of two layers, each with its own number of tokens; more
/// tiles than travel in the kernel parameters.
#[test]
fn more_sequences_than_a_launch_takes_take_several() {
    let Some(subject) = on_emulator(80) else { return };
    let small = Shape { k_head_dim: 32, v_head_dim: 32, ..Shape::new(DType::Turbo3, DType::Q8_0) };
    let other = Shape { k: DType::F16, sink_tiles: 1, ..small };
    let shape = |i| if i < 17 { small } else { other };
    let tokens: Vec<_> = (0..20).map(|i| Tokens::gaussian(shape(i), 160, i as u64)).collect();
    let mut batch = Batch::new(&subject, &tokens.iter().collect::<Vec<_>>());
    for step in 0..4 {
        let counts: Vec<_> = (0..20).map(|i| [1 + 7 * i, 1, 20 - i, 1][step]).collect();
        batch.append(&counts).unwrap();
        batch.assert_stored_tokens(&|| format!("twenty sequences after step {step}"));
    }
}
