//! Values that become NaN or infinite inside a model end in an error that names the position.

use kvant::{Error, GenerateOptions, Gguf, KvOptions, Model, OpenOptions, SamplerParams, SessionOptions};

const BUNDLED: &[u8] = include_bytes!("../../assets/pocket-q8_0.gguf");

/// The bundled model with every value of an f32 vector at the maximum: finite itself, but every
/// product with it overflows.
fn overflowing(vector: &str) -> Model {
    let gguf = Gguf::from_bytes(BUNDLED).unwrap();
    let info = gguf.find_tensor(vector).unwrap().info;
    let (from, to) = (info.offset as usize, info.offset as usize + info.n_bytes);
    let mut bytes = BUNDLED.to_vec();
    bytes[from..to].chunks_exact_mut(4).for_each(|value| value.copy_from_slice(&f32::MAX.to_le_bytes()));
    Model::from_gguf(Gguf::from_bytes(bytes).unwrap(), OpenOptions::default()).unwrap()
}

#[test]
fn non_finite_keys_are_refused_before_quantization() {
    let model = overflowing("blk.1.attn_norm.weight");
    for kv in ["f16", "q8_0", "turbo3"] {
        let kv = KvOptions::symmetric(kv.parse().unwrap());
        let mut session = model.session(SessionOptions { n_ctx: Some(64), kv }).unwrap();
        for prompt in [&[1_u32][..], &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18]] {
            let error = session.feed(prompt, &mut |_| true).unwrap_err().to_string();
            assert_eq!(error, "the keys of layer 1 at position 0 hold NaN or an infinity");
            assert_eq!((session.tokens().len(), session.kv().tokens), (0, 0));
        }
    }
}

#[test]
fn non_finite_logits_end_a_generation_with_the_position() {
    let model = overflowing("output_norm.weight");
    let prompt = [1, 2, 3];
    // Top-k on the device, and all logits.
    for top_k in [40, 0] {
        let mut session = model.session(SessionOptions::default()).unwrap();
        let sampler = SamplerParams { top_k, ..SamplerParams::default() };
        let mut generation =
            session.generate(&prompt, GenerateOptions { sampler, ..Default::default() }).unwrap();
        let error = generation.next().unwrap().unwrap_err();
        assert!(matches!(error, Error::LogitNotFinite { position: 2, .. }), "{error}");
        assert!(error.to_string().starts_with("the logits after position 2 are broken: that of token "));
        assert!(generation.next().is_none());
    }
}
