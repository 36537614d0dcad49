//! Mixture-of-experts models.

use std::path::Path;

use kvant::{
    BatchItem, DType, DeviceChoice, Gguf, KvOptions, LayerRange, Model, OpenOptions, Session, SessionOptions,
};
use kvant_gguf::GgufWriter;
use kvant_quantize::quantize;
use kvant_quantize::synthetic::Shape;

fn options(n_threads: usize) -> OpenOptions<'static> {
    OpenOptions { device: DeviceChoice::Cpu.into(), n_threads: Some(n_threads), ..Default::default() }
}

fn fixture(name: &str) -> Gguf {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures");
    Gguf::open(dir.join(name)).unwrap()
}

/// Returns the file without the tensor `leave`.
fn without(gguf: &Gguf, leave: &str) -> Gguf {
    let mut writer = GgufWriter::with_meta(gguf.meta()).unwrap();
    let kept = || gguf.tensors().iter().filter(|info| info.name != leave);
    kept().for_each(|info| writer.add_tensor(&info.name, &info.shape, info.dtype).unwrap());
    let mut bytes = Vec::new();
    let written = writer
        .write_to(&mut bytes, |sink| kept().try_for_each(|info| sink.bytes(&info.name, &gguf.data(info))));
    written.unwrap();
    Gguf::from_bytes(bytes).unwrap()
}

#[test]
fn a_layer_that_lacks_a_tensor_is_refused_with_its_name() {
    let qwen2 = fixture("qwen2moe-h64-g1-shared.gguf");
    for part in
        ["gate_inp", "gate_exps", "up_exps", "down_exps", "gate_shexp", "down_shexp", "gate_inp_shexp"]
    {
        let tensor = format!("blk.1.ffn_{part}.weight");
        let result = Model::from_gguf(without(&qwen2, &tensor), options(1)).map(|_| ());
        let error = result.expect_err(&tensor).to_string();
        assert!(
            error.contains(&format!("\"{tensor}\": is missing")) && error.lines().count() == 1,
            "{error}"
        );
    }
    Model::from_gguf(without(&qwen2, "none"), options(1)).unwrap();
}

fn session(model: &Model) -> Session {
    model.session(SessionOptions { n_ctx: Some(300), kv: KvOptions::symmetric(DType::Turbo3) }).unwrap()
}

/// Returns the logits after all of `tokens`, in steps of `chunk`.
fn fed(model: &Model, tokens: &[u32], chunk: usize) -> Vec<u32> {
    let mut session = session(model);
    tokens.chunks(chunk).for_each(|tokens| session.feed(tokens, &mut |_| true).unwrap());
    session.logits().unwrap().iter().map(|logit| logit.to_bits()).collect()
}

#[test]
fn experts_are_batch_invariant_on_any_number_of_threads() {
    let tokens: Vec<u32> = (0..150).map(|i| i * 37 % 1000).collect();
    for dtype in [DType::Q4_0, DType::Q6K, DType::F16] {
        let model = |n_threads| {
            Model::from_gguf(Shape::named("tiny-moe").unwrap().model(dtype, 300).unwrap(), options(n_threads))
                .unwrap()
        };
        let one = model(1);
        let want = fed(&one, &tokens, 150);
        assert_eq!(fed(&one, &tokens, 1), want, "{dtype}, one by one");
        assert_eq!(fed(&one, &tokens, 13), want, "{dtype}, in pieces");
        let three = model(3);
        assert_eq!(fed(&three, &tokens, 40), want, "{dtype}, on three threads");

        // In a batch, after a rewind, and from a fork.
        let (mut a, mut b) = (session(&three), session(&three));
        a.feed(&tokens[..140], &mut |_| true).unwrap();
        b.feed(&tokens[100..140], &mut |_| true).unwrap();
        let feeds = [(&mut a, &tokens[140..]), (&mut b, &tokens[..7])];
        let mut feeds = feeds.map(|(session, tokens)| BatchItem::new(session, tokens));
        Session::step_batch(&mut feeds).unwrap();
        let bits =
            |session: &mut Session| session.logits().unwrap().iter().map(|l| l.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&mut a), want, "{dtype}, in a batch");
        let mut fork = a.fork();
        for session in [&mut a, &mut fork] {
            session.rewind(77).unwrap();
            session.feed(&tokens[77..], &mut |_| true).unwrap();
            assert_eq!(bits(session), want, "{dtype}, after a rewind");
        }
    }
}

#[test]
fn all_experts_are_loaded_and_a_token_reads_its_routed_ones() {
    let model =
        Model::from_gguf(Shape::named("tiny-moe").unwrap().model(DType::Q8_0, 64).unwrap(), options(1))
            .unwrap();
    // Four layers of eight experts, each three matrices of 256 x 256; the router selects two per
    // token.
    let experts = 4 * 8 * 3 * 256 * 256 / 32 * 34;
    assert_eq!(model.weight_bytes() - model.weight_bytes_per_token(), experts / 8 * 6);
    let [first, last] = LayerRange::split(4, 1).map(|part| part.expert_bytes(model.gguf(), model.config()));
    assert_eq!((first, last), ([experts / 4, experts / 16], [experts / 4 * 3, experts / 16 * 3]));
}

#[test]
fn experts_converted_on_load_equal_those_of_a_quantized_file() {
    let path = std::env::temp_dir().join(format!("kvant-experts-{}.gguf", std::process::id()));
    let gguf = fixture("qwen3moe-h64-g2-dense1.gguf");
    quantize(&gguf, &path, DType::Q8_0, &mut |_| ()).unwrap();
    let written = Model::open_with(&path, options(2)).unwrap();
    let retyped = Model::from_gguf(gguf, OpenOptions { weights: Some(DType::Q8_0), ..options(2) }).unwrap();
    let tokens: Vec<u32> = (0..40).map(|i| i * 37 % 64).collect();
    assert_eq!(fed(&retyped, &tokens, 40), fed(&written, &tokens, 40));
    let bytes = |model: &Model| [model.weight_bytes(), model.weight_bytes_per_token()];
    assert_eq!(bytes(&retyped), bytes(&written));
    std::fs::remove_file(path).unwrap();
}

#[test]
fn mapped_experts_give_the_same_logits() {
    let tokens: Vec<u32> = (0..60).map(|i| i * 37 % 64).collect();
    let mapped = || OpenOptions { maps_experts: true, ..options(2) };
    for name in
        ["qwen2moe-h64-g1-shared.gguf", "gptoss-h64-g4-window24-sinks.gguf", "glm4moelite-latent128.gguf"]
    {
        let kept = Model::from_gguf(fixture(name), options(2)).unwrap();
        let model = Model::from_gguf(fixture(name), mapped()).unwrap();
        assert_eq!(fed(&model, &tokens, 60), fed(&kept, &tokens, 60), "{name}");
        assert_eq!(fed(&model, &tokens, 1), fed(&kept, &tokens, 1), "{name}, one by one");
        let [all, read] = model.mapped_bytes();
        assert!(0 < read && read < all && all < model.weight_bytes(), "{name}: {read} of {all}");
        assert_eq!(kept.mapped_bytes(), [0; 2]);
    }
    let refused = |gguf, options| match Model::from_gguf(gguf, options) {
        Ok(_) => panic!("it is loaded"),
        Err(error) => error.to_string(),
    };
    let dense = Shape::named("tiny").unwrap().model(DType::Q4_0, 300).unwrap();
    assert!(refused(dense, mapped()).contains("a model with experts"));
    let retyped = OpenOptions { weights: Some(DType::Q8_0), ..mapped() };
    let error = refused(fixture("qwen2moe-h64-g1-shared.gguf"), retyped);
    assert!(error.contains("weights as the file has them"), "{error}");
}
