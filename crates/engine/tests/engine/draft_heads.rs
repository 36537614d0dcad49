//! Draft heads change no logits; one that does not fit its model is rejected.

use std::path::Path;
use std::sync::Arc;

use kvant::gguf::{GgufError, GgufWriter, TensorSink};
use kvant::{DeviceChoice, Gguf, Message, Model, OpenOptions, SamplerParams};

use crate::history::{CASES, bundled, histories, is_scalar, n_accepted_in_the_same_answer, options};
use crate::hostile::{is_a_line, named, rewritten, with, without};

/// The heads of `tools/reference/heads.py`, with their models.
pub const HEADS: [(&str, &str); 4] = [
    ("llama-h64-g2-six", "plain"),
    ("llama-h64-g2-six", "own"),
    ("llama-h64-g2-six", "block"),
    ("qwen3-h64-g2-five", "part"),
];

/// Returns the file of a head.
pub fn head(of: &str, name: &str) -> Gguf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/heads");
    Gguf::open(folder.join(of).join(format!("{name}.gguf"))).unwrap()
}

/// Returns the file of a model with heads.
pub fn model(name: &str) -> Gguf {
    head(name, "model")
}

/// The reference is the model without a head.
#[test]
fn logits_with_a_draft_head_depend_on_the_tokens_alone() {
    for (i, (of, name)) in HEADS.into_iter().enumerate() {
        let open = |n_threads, draft: Option<Gguf>| {
            let draft = draft.map(Arc::new);
            Model::from_gguf(model(of), OpenOptions { draft, ..options(n_threads) }).unwrap()
        };
        let models = [open(1, None), open(1, Some(head(of, name))), open(2, Some(head(of, name)))];
        assert!(!models[0].has_drafter() && models[1].has_drafter() && models[1].draft().is_none());
        assert!(models[1].weight_bytes() > models[0].weight_bytes());
        let n_steps = if is_scalar(&models[0]) { 30 } else { 40 };
        for case in [CASES[0], CASES[2], CASES[4]] {
            let (_, read_ahead) = histories(&models, case, 500 + i as u64, n_steps);
            assert!(read_ahead > 0, "{of}, {name}, {case:?}: no draft token was verified");
        }
    }
}

/// Greedy and sampled answers of the bundled model with a head that was trained for it (generator:
/// `tools/reference/train_head.py`).
#[test]
fn a_trained_draft_head_changes_no_token() {
    let plain = bundled(2);
    let draft = Some(Arc::new(head("", "pocket-q8_0")));
    let drafted = Model::bundled(OpenOptions { draft, ..options(2) }).unwrap();
    let n = if is_scalar(&plain) { 40 } else { 150 };
    let prompt = plain.chat_prompt(&[Message::user("Tell me about the sea.")]).unwrap();
    for sampler in [SamplerParams::greedy(), SamplerParams { seed: 7, ..SamplerParams::default() }] {
        let n_accepted = n_accepted_in_the_same_answer(&plain, &drafted, &prompt, sampler, n);
        assert!(n_accepted > 0, "{sampler:?}: no draft token was accepted");
    }
}

fn open(gguf: Gguf, draft: Gguf, device: &str) -> Result<Model, String> {
    let options = OpenOptions {
        device: device.parse().unwrap(),
        layer_split: vec![1.0; device.split(',').count()],
        n_threads: Some(2),
        draft: Some(Arc::new(draft)),
        ..Default::default()
    };
    Model::from_gguf(gguf, options).map_err(|error| error.to_string())
}

/// Returns the head with other tokens of its model.
fn with_ids(gguf: &Gguf, id: impl Fn(usize) -> f32) -> Gguf {
    let mut writer = GgufWriter::with_meta(gguf.meta()).unwrap();
    gguf.tensors().iter().for_each(|info| writer.add_tensor(&info.name, &info.shape, info.dtype).unwrap());
    let mut bytes = Vec::new();
    let fill = |sink: &mut TensorSink<'_>| {
        gguf.tensors().iter().try_for_each(|info| match &*info.name {
            "d2t" => {
                let ids: Vec<u8> = (0..info.elements()).flat_map(|own| id(own).to_le_bytes()).collect();
                sink.bytes(&info.name, &ids)
            }
            name => sink.bytes(name, &gguf.data(info)),
        })
    };
    writer.write_to::<GgufError>(&mut bytes, fill).unwrap();
    Gguf::from_bytes(bytes).unwrap()
}

#[test]
fn a_draft_head_that_does_not_fit_is_rejected_with_one_line() {
    let (target, own) = (|| model("llama-h64-g2-six"), head("llama-h64-g2-six", "own"));
    let whole = |name| vec![name];
    let layers = |layers: &[u32]| {
        let layers = layers.to_vec();
        rewritten(&own, |writer| writer.set_array("eagle3.target_layers", layers).unwrap(), whole)
    };
    let kind = rewritten(&own, |writer| writer.set("general.architecture", "dflash").unwrap(), whole);
    let block = head("llama-h64-g2-six", "block");
    let extra = |name| if name == "fc.weight" { vec![name, "fc_norm.0.weight"] } else { vec![name] };
    let cases = [
        (
            with(&own, "eagle3.target_hidden_size", 31),
            "eagle3.target_hidden_size: expected 32, the hidden size of the model, got 31",
        ),
        (with(&own, "eagle3.block_count", 2), "eagle3.block_count: expected one layer, got 2"),
        (layers(&[1, 3, 7]), "eagle3.target_layers: expected numbers from 0 to 6, got 7"),
        (layers(&[1, 3]), "'fc.weight': expected shape [64, 48], got [96, 48]"),
        (without(&own, "token_embd.weight"), "\"token_embd.weight\": is missing"),
        (without(&own, "output.weight"), "\"output.weight\": is missing"),
        (without(&own, "enc.output_norm.weight"), "\"enc.output_norm.weight\": is missing"),
        (without(&own, "blk.0.attn_norm_2.weight"), "\"blk.0.attn_norm_2.weight\": is missing"),
        (without(&own, "d2t"), "'output.weight': expected shape [48, 64], got [48, 40]"),
        (with_ids(&own, |own| own as f32 + 25.0), "d2t: expected different tokens of the model's 64, got 64"),
        (with_ids(&own, |own| (own / 2) as f32), "d2t: expected different tokens of the model's 64, got 0"),
        (with_ids(&own, |own| own as f32 + 0.5), "got 0.5"),
        (with_ids(&own, |_| -1.0), "got -1"),
        (kind, "\"dflash.embedding_length\""),
        (
            with(&block, "tokenizer.ggml.mask_token_id", 64),
            "mask_token_id: expected a token of the model's 64",
        ),
        (with(&block, "dflash.block_size", 1), "dflash.block_size: expected at least two tokens, got 1"),
        (with(&block, "dflash.selector_rank", 8), "a draft head that selects tokens (DFlash 2)"),
        (with(&block, "dflash.hyper_connection.count", 4), "layers of DeepSeek-V4 in a draft head"),
        (with(&block, "dflash.target_hidden_size", 31), "expected 32, the hidden size of the model, got 31"),
        (without(&block, "fc.weight"), "\"fc.weight\": is missing"),
        (without(&block, "enc.output_norm.weight"), "\"enc.output_norm.weight\": is missing"),
        (without(&block, "blk.1.attn_k_norm.weight"), "\"blk.1.attn_k_norm.weight\": is missing"),
        (rewritten(&own, |_| (), extra), "not supported yet: tensor 'fc_norm.0.weight'"),
    ];
    for (head, want) in cases {
        let error = open(target(), head, "cpu").err().unwrap_or_else(|| panic!("taken: {want}"));
        assert!(error.contains(want) && is_a_line(&error), "{error}, not {want}");
    }
    let plain = || head("llama-h64-g2-six", "plain");
    for (gguf, device, want) in [
        (
            target(),
            "cpu,cpu",
            "draft: expected one device for all layers of a model with a draft head, got 2",
        ),
        (named("granite-h64-g2-factors"), "cpu", "a draft head for a model of the family granite"),
        (named("qwen2-h64-g6"), "cpu", "expected 48, the hidden size of the model, got 32"),
        (named("llama-h64-g8"), "cpu", "eagle3.target_layers: expected a list, as the model has few layers"),
    ] {
        let error = open(gguf, plain(), device).err().unwrap_or_else(|| panic!("taken: {want}"));
        assert!(error.contains(want) && is_a_line(&error), "{error}, not {want}");
    }
    let options = OpenOptions { device: DeviceChoice::Cpu.into(), ..Default::default() };
    let error = Model::from_gguf(plain(), options).unwrap_err().to_string();
    assert_eq!(error, "a draft head ('eagle3'), which drafts for its model and is none by itself");
}
