//! Synthetic models of every weight type, run.

use kvant::{DType, Measure, Model, OpenOptions, SessionOptions};
use kvant_quantize::synthetic::Shape;

#[test]
fn a_synthetic_model_runs_in_every_weight_type() {
    let types = DType::ALL.into_iter().filter(|dtype| dtype.ggml_id().is_some());
    for (dtype, shape) in
        types.flat_map(|dtype| ["tiny", "tiny-moe", "tiny-delta", "tiny-latent"].map(|shape| (dtype, shape)))
    {
        let gguf = Shape::named(shape).unwrap().model(dtype, 128).unwrap();
        let model = Model::from_gguf(gguf, OpenOptions::default()).unwrap();
        let mut session = model.session(SessionOptions::default()).unwrap();
        session.fill_random(40, 7).unwrap();
        session.feed(&[1, 2, 3], &mut |_| true).unwrap();
        assert_eq!(session.tokens().len(), 43);
        assert!(session.logits().unwrap().iter().all(|logit| logit.is_finite()), "{shape} {dtype}");
    }
}
