//! Batch invariance: the logits of a session depend on its tokens alone, bit for bit, not on the
//! history of the cache.
//!
//! A reference is fed token by token on one thread. Other sessions reach the same tokens by random
//! histories, and must have the reference's logits wherever they stop.

use std::path::Path;
use std::sync::Arc;

use kvant::{
    Dry, GenerateOptions, Message, Mirostat, MirostatVersion, Model, OpenOptions, SamplerParams, Session, Xtc,
};

use crate::history::{
    CASES, FAMILIES, Scratch, bundled, empty, family, histories, is_scalar, n_accepted_in_the_same_answer,
    options,
};

#[test]
fn logits_depend_on_the_tokens_alone() {
    let scalar = is_scalar(&family(FAMILIES[0], 1));
    let (n_cases, n_steps, threads) =
        if scalar { (5, 10, &[1, 3][..]) } else { (CASES.len(), 30, &[1, 2, 3, 4][..]) };
    let models = FAMILIES.map(|name| threads.iter().map(|&n| family(name, n)).collect::<Vec<_>>());
    for (i, &case) in CASES[..n_cases].iter().enumerate() {
        let (attached, read_ahead) = histories(&models[i % models.len()], case, i as u64, n_steps);
        assert!(read_ahead > 0, "{case:?}: no draft token was verified");
        // A window kept beyond prefix boundaries leaves nothing to share.
        assert_eq!(attached == 0, case.2.contains("recent"), "{case:?}: {attached} tokens attached");
    }
}

/// Recurrent states cannot be truncated; they return to their values before the draft tokens.
#[test]
fn logits_of_recurrent_models_depend_on_the_tokens_alone() {
    let scalar = is_scalar(&family(FAMILIES[0], 1));
    let (n_steps, threads) = if scalar { (10, &[2][..]) } else { (40, &[1, 2][..]) };
    let families = [
        "lfm2-h64-g2-conv3",
        "qwen35-h64-g2-delta",
        "kimilinear-latent128-kda",
        "kimik3-latent128-streams",
        "graniteh-h64-g2-space-experts",
        "falconh1-h64-g2-beside",
    ];
    for (i, name) in families.into_iter().enumerate() {
        let models: Vec<_> = threads.iter().map(|&n| family(name, n)).collect();
        for case in [CASES[0], CASES[2], CASES[4]] {
            let (_, read_ahead) = histories(&models, case, 200 + i as u64, n_steps);
            assert!(read_ahead > 0, "{name}, {case:?}: no draft token was verified");
        }
    }
}

/// MTP changes nothing: the reference is the model without the layer.
#[test]
fn logits_with_mtp_depend_on_the_tokens_alone() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/predictions");
    let open = |name: &str, n_threads, mtp| {
        Model::open_with(folder.join(format!("{name}.gguf")), OpenOptions { mtp, ..options(n_threads) })
            .unwrap()
    };
    for (i, name) in
        ["qwen35-h64-g2-delta", "glm4moe-h64-g2-dense1", "glm4moelite-latent128"].into_iter().enumerate()
    {
        let models = [open(name, 1, false), open(name, 1, true), open(name, 2, true)];
        let n_steps = if is_scalar(&models[0]) { 15 } else { 40 };
        for case in [CASES[0], CASES[2], CASES[4]] {
            let (_, read_ahead) = histories(&models, case, 300 + i as u64, n_steps);
            assert!(read_ahead > 0, "{name}, {case:?}: no draft token was verified");
        }
    }
}

/// Nor does a draft model, wherever its context ends.
#[test]
fn logits_with_a_draft_model_depend_on_the_tokens_alone() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures");
    let file = |name: &str| Arc::new(kvant::open_file(folder.join(format!("{name}.gguf"))).unwrap());
    let open = |name: &str, n_threads, draft: Option<&str>| {
        Model::from_gguf(file(name), OpenOptions { draft: draft.map(file), ..options(n_threads) }).unwrap()
    };
    let pairs = [("llama-h64-g1-yarn", "lfm2-h64-g2-conv3"), ("qwen35-h64-g2-delta", "llama-h128-g2-llama3")];
    for (i, (name, draft)) in pairs.into_iter().enumerate() {
        let models = [open(name, 1, None), open(name, 1, Some(draft)), open(name, 2, Some(name))];
        let n_steps = if is_scalar(&models[0]) { 30 } else { 40 };
        for case in [CASES[0], CASES[2], CASES[4]] {
            let (_, read_ahead) = histories(&models, case, 400 + i as u64, n_steps);
            assert!(read_ahead > 0, "{name}, {case:?}: no draft token was verified");
        }
    }
}

#[test]
fn a_trained_model_is_batch_invariant_after_any_history() {
    let models = [1, 2, 3].map(bundled);
    let (cases, n_steps) = if is_scalar(&models[0]) { (&CASES[..1], 3) } else { (&CASES[..2], 12) };
    for (i, &case) in cases.iter().enumerate() {
        histories(&models, case, 100 + i as u64, n_steps);
    }
}

/// Returns a question with a preamble of about `words` words.
fn question(model: &Model, words: usize) -> Vec<u32> {
    let preamble = "The capital of a country is where it is governed from. ".repeat(words.div_ceil(11));
    model.chat_prompt(&[Message::user(format!("{preamble}What is the capital of France?"))]).unwrap()
}

/// Returns the greedy continuation of `prompt`.
fn continuation(session: &mut Session, prompt: &[u32], n: usize) -> Vec<u32> {
    let sampler = SamplerParams::greedy();
    let options = GenerateOptions { sampler, max_tokens: Some(n), ignore_eos: true, ..Default::default() };
    session.generate(prompt, options).unwrap().map(|token| token.unwrap().id).collect()
}

#[test]
fn a_prompt_cache_changes_no_token() {
    let model = bundled(2);
    let n = if is_scalar(&model) { 40 } else { 90 };
    for (i, words) in [0, 30, 430].into_iter().enumerate() {
        let file = Scratch::new(&format!("prompt-cache-{i}"));
        let prompt = question(&model, words);
        let mut session = empty(&model, CASES[0]);
        let want = continuation(&mut session, &prompt, n);
        session.save(&file.0).unwrap();
        drop(session);
        for _ in 0..2 {
            let mut session = empty(&model, CASES[0]);
            session.load_prefix(&file.0, &prompt).unwrap();
            assert_eq!(continuation(&mut session, &prompt, n), want, "a prompt of {} tokens", prompt.len());
            session.save(&file.0).unwrap();
        }
    }
}

/// A repetitive text, so that prompt lookup proposes tokens: greedy or sampled, a generation has
/// the same tokens with and without speculative decoding, and most tokens need no step of their
/// own.
#[test]
fn draft_tokens_change_no_token() {
    let model = bundled(2);
    let n = if is_scalar(&model) { 60 } else { 200 };
    let drawn = SamplerParams { seed: 7, ..SamplerParams::default() };
    let dry = Dry { multiplier: 0.3, ..Dry::default() };
    // Samplers with state, too.
    let with_state = SamplerParams { dry, xtc: Xtc { probability: 0.3, threshold: 0.1 }, ..drawn };
    let mirostat = Mirostat { version: MirostatVersion::V2, tau: 2.0, eta: 0.3 };
    for case in [CASES[0], CASES[2]] {
        for sampler in [SamplerParams::greedy(), drawn, with_state, SamplerParams { mirostat, ..drawn }] {
            let answer = |draft_max| {
                let mut session = empty(&model, case);
                let options = GenerateOptions {
                    max_tokens: Some(n),
                    sampler,
                    ignore_eos: true,
                    draft_max,
                    ..Default::default()
                };
                let prompt = question(&model, 200);
                let mut generation = session.generate(&prompt, options).unwrap();
                let ids: Vec<u32> = generation.by_ref().map(|token| token.unwrap().id).collect();
                let stats = generation.stats();
                // Rejected draft tokens are not in the cache afterwards.
                let cached = session.tokens().to_vec();
                assert_eq!((cached.len(), session.kv().tokens), (prompt.len() + n - 1, prompt.len() + n - 1));
                (ids, cached, stats.n_drafted, stats.n_accepted)
            };
            let (plain, drafted, few) = (answer(Some(0)), answer(None), answer(Some(2)));
            assert_eq!((plain.2, plain.3), (0, 0));
            assert_eq!((&drafted.0, &drafted.1), (&plain.0, &plain.1), "{case:?}, {sampler:?}");
            assert_eq!((&few.0, &few.1), (&plain.0, &plain.1), "{case:?}, {sampler:?}, two at most");
            assert!(drafted.3 > 0 && drafted.3 <= drafted.2, "{} of {} accepted", drafted.3, drafted.2);
        }
    }
}

/// A model that drafts for itself has every draft token accepted under greedy sampling.
#[test]
fn a_draft_model_changes_no_token() {
    let plain = bundled(2);
    let draft = Some(Arc::new(Model::bundled_file().unwrap()));
    let drafted = Model::bundled(OpenOptions { draft, ..options(2) }).unwrap();
    let n = if is_scalar(&plain) { 60 } else { 200 };
    let prompt = question(&plain, 60);
    for (sampler, min_accepted) in [
        (SamplerParams::greedy(), n * 3 / 5),
        (SamplerParams { seed: 7, ..SamplerParams::default() }, n / 10),
    ] {
        let n_accepted = n_accepted_in_the_same_answer(&plain, &drafted, &prompt, sampler, n);
        assert!(n_accepted >= min_accepted, "{sampler:?}: {n_accepted} of {n} tokens were drafted");
    }
}

#[test]
fn the_number_of_threads_changes_no_token() {
    let models = [1, 2, 3].map(bundled);
    let n = if is_scalar(&models[0]) { 40 } else { 90 };
    for case in [CASES[0], CASES[2]] {
        let prompt = question(&models[0], 60);
        let continuations = models.each_ref().map(|model| continuation(&mut empty(model, case), &prompt, n));
        assert_eq!(continuations[1], continuations[0], "{case:?}: 2 threads and 1");
        assert_eq!(continuations[2], continuations[0], "{case:?}: 3 threads and 1");
    }
}
