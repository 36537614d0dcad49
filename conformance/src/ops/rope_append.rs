//! RoPE and append in one op: bit-identical to both ops in sequence.

use kvant_backend::{Backend, Heads, Norm, Pairing, Rope, RopeParams};
use kvant_codec::DType;

use crate::kv::{Batch, Shape, Tokens};
use crate::weights::gaussian;
use crate::{DeviceUnderTest, Skipped};

const EPS: f32 = 1e-6;
/// Rows of three sequences; the second step crosses tiles.
const STEPS: [[usize; 3]; 3] = [[5, 17, 1], [12, 1, 40], [1, 1, 1]];

/// Compares `rope_append` with `rope` and `kv_append`.
pub fn run<B: Backend>(subject: &DeviceUnderTest<B>) -> Skipped {
    let mut skipped = subject.skipped();
    let shape = Shape { n_kv_heads: 2, ..Shape::new(DType::F16, DType::F16) };
    let shapes = [
        shape,
        Shape { k_head_dim: 64, v_head_dim: 96, group: 1, sink_tiles: 1, ..shape },
        Shape { k_head_dim: 80, v_head_dim: 80, group: 3, has_tail: false, ..shape },
        Shape { k_head_dim: 256, v_head_dim: 32, group: 1, n_kv_heads: 1, ..shape },
    ];
    // Number of rotated quarters of a head.
    let pairings =
        [(Pairing::Halves, 4), (Pairing::Halves, 3), (Pairing::Interleaved, 2), (Pairing::Interleaved, 0)];
    let kinds = skipped.combine(&shapes, &pairings);
    for (dtype, (shape, (pairing, quarters))) in skipped.combine(&DType::KV, &kinds) {
        // Every rotation with and without norms, alternating between shapes.
        let has_norms = (shape.group + quarters) % 2 == 1;
        let shape = Shape { k: dtype, v: dtype, ..shape };
        let tokens = [1, 2, 3].map(|seed| Tokens::gaussian(shape, 42, seed));
        let n_rot = shape.k_head_dim / 4 * quarters;
        equals_separate_ops(subject, &tokens, RopeParams { pairing, n_rot }, has_norms, &mut skipped);
    }
    skipped
}

fn equals_separate_ops<B: Backend>(
    subject: &DeviceUnderTest<B>,
    tokens: &[Tokens; 3],
    params: RopeParams,
    has_norms: bool,
    skipped: &mut Skipped,
) {
    let shape = tokens[0].shape;
    let what = || subject.case("rope_append", format_args!("{shape:?} {params:?} norms {has_norms}"));
    let [q_gain, k_gain] = [4, 5].map(|seed| subject.upload(&gaussian(seed, shape.k_head_dim, 1.0)));
    let norm = |weight| has_norms.then_some(Norm { weight, eps: EPS });
    let heads = |n| Heads { n, dim: shape.k_head_dim };
    let (mut fused, mut separate) =
        (Batch::new(subject, &tokens.each_ref()), Batch::new(subject, &tokens.each_ref()));
    for counts in STEPS {
        let rows: usize = counts.iter().sum();
        let radians = gaussian(6, rows * params.n_rot / 2, 2.0);
        let angles: Vec<f32> = radians.iter().flat_map(|a| [1.25 * a.cos(), 1.25 * a.sin()]).collect();
        let rope = Rope {
            params,
            angles: &subject.upload(&angles),
            q_heads: heads(shape.n_heads()),
            k_heads: heads(shape.n_kv_heads),
            q_norm: norm(&q_gain),
            k_norm: norm(&k_gain),
        };
        let q = gaussian(7, rows * shape.n_heads() * shape.k_head_dim, 1.0);
        let [mut q_fused, mut q_separate] = [(); 2].map(|()| subject.guarded(&q));
        let result = fused.rope_append(&counts, &rope, &mut q_fused);
        if skipped.take(result, &what).is_none() {
            return;
        }
        let result = separate.rope_then_append(&counts, &rope, &mut q_separate);
        result.unwrap_or_else(|error| panic!("{}: apart: {error}", what()));

        let bits = |buffer| {
            let values = subject.results(buffer, q.len(), &what);
            values.into_iter().map(f32::to_bits).collect::<Vec<_>>()
        };
        assert!(bits(&q_fused) == bits(&q_separate), "{}: other queries, {counts:?} rows", what());
        for index in 0..counts.len() {
            let is_same = fused.memory_bytes(index) == separate.memory_bytes(index);
            assert!(is_same, "{}: other bytes of sequence {index}, {counts:?} rows", what());
        }
        assert!(
            fused.step_tile_bytes() == separate.step_tile_bytes(),
            "{}: another step_tiles, {counts:?} rows",
            what()
        );
    }
}
