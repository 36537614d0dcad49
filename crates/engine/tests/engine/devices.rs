//! A model over several CPU devices has the bits of one, after any history of its sessions.

use std::path::Path;

use kvant::{GenerateOptions, KvOptions, Message, Model, OpenOptions, SamplerParams, SessionOptions};

use crate::history::{CASES, bundled, family, histories_against, is_scalar, options};

/// Options of a model over devices of one thread each, as many as there are shares.
fn several<'a>(shares: &[f32]) -> OpenOptions<'a> {
    let device = vec!["cpu"; shares.len()].join(",").parse().unwrap();
    OpenOptions { device, layer_split: shares.to_vec(), ..options(shares.len()) }
}

fn split_family(name: &str, shares: &[f32]) -> Model {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures");
    Model::open_with(folder.join(format!("{name}.gguf")), several(shares)).unwrap()
}

/// Plain layers, channel scales, windows, sinks and recurrent states.
#[test]
fn logits_of_several_devices_are_those_of_one() {
    let n_steps = if is_scalar(&bundled(1)) { 8 } else { 30 };
    for (i, (name, shares, case)) in [
        ("llama-h64-g1-yarn", &[1.0, 1.0][..], CASES[0]),
        ("llama-h128-g2-llama3", &[1.0, 1.0], CASES[15]),
        ("gemma2-h64-g2-window20-caps", &[1.0, 1.0, 1.0], CASES[8]),
        ("gptoss-h64-g4-window24-sinks", &[2.0, 1.0], CASES[1]),
        ("falconh1-h64-g2-beside", &[1.0, 1.0], CASES[2]),
    ]
    .into_iter()
    .enumerate()
    {
        let (one, split) = (family(name, 1), split_family(name, shares));
        let (_, read_ahead) = histories_against(&one, &[split], case, 500 + i as u64, n_steps);
        assert!(read_ahead > 0, "{name}, {case:?}: no draft token was verified");
    }
}

#[test]
fn answers_of_several_devices_are_those_of_one() {
    let answer = |model: &Model| {
        let question = "Tell me the capital of France, and of Spain. ".repeat(20);
        let prompt = model.chat_prompt(&[Message::user(question)]).unwrap();
        assert!(prompt.len() > 128, "long enough for micro-batches");
        let kv = KvOptions::symmetric("turbo3".parse().unwrap());
        let mut session = model.session(SessionOptions { n_ctx: Some(1024), kv }).unwrap();
        let sampler = SamplerParams { seed: 3, ..SamplerParams::default() };
        let options = GenerateOptions { sampler, max_tokens: Some(40), ..Default::default() };
        session.generate(&prompt, options).unwrap().map(|token| token.unwrap().id).collect::<Vec<_>>()
    };
    let want = answer(&bundled(2));
    for (shares, name) in [
        (&[3.0, 2.0][..], "cpu (3 layers) + cpu (2 layers)"),
        (&[1.0; 5], "cpu (1 layers) + cpu (1 layers) + cpu (1 layers) + cpu (1 layers) + cpu (1 layers)"),
    ] {
        let model = Model::bundled(several(shares)).unwrap();
        assert_eq!(model.device().name, name);
        assert_eq!(model.device().n_threads, shares.len());
        assert_eq!(answer(&model), want, "{name}");
    }
}
