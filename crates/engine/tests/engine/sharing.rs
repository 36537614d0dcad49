//! Prefix sharing: sessions hold a common prefix once, unused memory is freed, and a budget holds
//! without loss.

use std::sync::atomic::{AtomicUsize, Ordering};

use kvant::{
    BatchItem, DeviceChoice, Error, GenerateOptions, KvError, KvOptions, Model, OpenOptions, SamplerParams,
    Session, SessionOptions,
};
use kvant_backend::BackendError;
use kvant_model::ModelError;
use kvant_quantize::synthetic::Shape;

const N_PREFIX: usize = 2048;
const TOKENS_PER_BLOCK: usize = 128;
/// Bytes of a token in f16.
const F16_TOKEN: usize = 4 * 2 * 2 * 128;

fn model() -> Model {
    let gguf = Shape::named("tiny").unwrap().model("q8_0".parse().unwrap(), 4096).unwrap();
    let options = OpenOptions { device: DeviceChoice::Cpu.into(), n_threads: Some(2), ..Default::default() };
    Model::from_gguf(gguf, options).unwrap()
}

fn empty(model: &Model, kv: &str, policies: &str) -> Session {
    let policies = policies.parse().unwrap();
    let kv = KvOptions { policies, ..KvOptions::symmetric(kv.parse().unwrap()) };
    model.session(SessionOptions { kv, ..Default::default() }).unwrap()
}

/// Returns tokens that no other seed begins with.
fn text(seed: u32, n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| (seed + i * 37 + i / 7) % 1024).collect()
}

fn feed(session: &mut Session, tokens: &[u32]) {
    session.feed(tokens, &mut |_| true).unwrap();
}

fn bits(session: &mut Session) -> Vec<u32> {
    session.logits().unwrap().iter().map(|logit| logit.to_bits()).collect()
}

#[test]
fn a_prompt_shorter_than_the_sink_is_shared_once_it_is_longer() {
    let model = model();
    let prompt = text(0, 600);
    let mut first = empty(&model, "turbo3", "sink:256");
    for tokens in [0..130, 130..250, 250..300, 300..600] {
        feed(&mut first, &prompt[tokens]);
    }
    let mut second = empty(&model, "turbo3", "sink:256");
    assert_eq!(second.attach_prefix(&prompt), 512);
    feed(&mut second, &prompt[512..]);
    assert_eq!(bits(&mut second), bits(&mut first));
}

#[test]
fn a_shared_prefix_lives_as_long_as_one_holder() {
    let model = model();
    let prompt = text(0, 1100);
    let read_alone = || {
        let mut session = empty(&model, "turbo3", "none");
        feed(&mut session, &prompt);
        session
    };
    let (first, mut second, third) = (read_alone(), read_alone(), read_alone());
    let attached = || {
        let mut session = empty(&model, "turbo3", "none");
        let n = session.attach_prefix(&prompt);
        (session, n)
    };
    drop(first);
    let (mut other, n) = attached();
    assert_eq!(n, 1024);
    feed(&mut other, &prompt[1024..]);
    assert_eq!(bits(&mut other), bits(&mut second));
    drop((other, second));
    assert_eq!(attached().1, 1024);
    drop(third);
    assert_eq!(attached().1, 0);
}

#[test]
fn a_prompt_reuses_the_longest_available_prefix() {
    let model = model();
    let prompt = text(0, 1100);
    let mut first = empty(&model, "turbo3", "none");
    feed(&mut first, &prompt);
    let mut second = empty(&model, "turbo3", "none");
    feed(&mut second, &[&prompt[..3], &text(900, 40)].concat());
    assert_eq!(second.reuse_prefix(&prompt), 1024);
    feed(&mut second, &prompt[1024..]);
    assert_eq!(bits(&mut second), bits(&mut first));
    // The session's own prefix is longer now.
    assert_eq!(second.reuse_prefix(&prompt), 1099);
}

#[test]
fn invalid_prompts_are_refused_and_keep_the_cache() {
    let model =
        Model::bundled(OpenOptions { device: DeviceChoice::Cpu.into(), ..Default::default() }).unwrap();
    let mut session = empty(&model, "f16", "none");
    feed(&mut session, &[5; 40]);
    let hot = GenerateOptions {
        sampler: SamplerParams { top_p: -1.0, ..Default::default() },
        ..Default::default()
    };
    for (prompt, options) in [
        (&[][..], GenerateOptions::default()),
        (&[5, u32::MAX][..], GenerateOptions::default()),
        (&[5, 5, 7][..], hot),
    ] {
        assert!(session.generate(prompt, options).is_err(), "{prompt:?}");
        assert_eq!(session.tokens(), [5; 40]);
    }
}

/// Returns the bytes of a block of 128 tokens: 4 layers, 2 heads, keys and values of 64 numbers
/// each.
fn block_bytes(kv: &str) -> usize {
    // Bytes of a row, and of the centre of a block's keys.
    let (row, centre) = match kv {
        "f16" => (128, 0),
        "q8_0" => (68, 128),
        "turbo3" => (26, 128),
        other => panic!("{other} is in no test here"),
    };
    4 * 2 * (TOKENS_PER_BLOCK * 2 * row + centre)
}

/// Saves a session to a file and loads it.
fn saved_and_loaded(session: &Session) -> Session {
    static N_FILES: AtomicUsize = AtomicUsize::new(0);
    let name = format!("kvant-sharing-{}-{}", std::process::id(), N_FILES.fetch_add(1, Ordering::Relaxed));
    let file = std::env::temp_dir().join(name);
    session.save(&file).unwrap();
    let loaded = session.model().load_session(&file, None);
    std::fs::remove_file(&file).unwrap();
    loaded.unwrap()
}

#[test]
fn eight_sessions_hold_their_common_prefix_once() {
    let model = model();
    let prefix = text(0, N_PREFIX);
    let caches = [("turbo3", "sink:16"), ("turbo3", "none"), ("f16", "none"), ("q8_0", "none")];
    // The reference kernels are slow.
    let n_caches = if model.device().kernels.contains("scalar") { 1 } else { caches.len() };
    for (kv, policies) in &caches[..n_caches] {
        let mut sessions = Vec::new();
        for (i, n_own) in [40, 1, 15, 16, 17, 128, 200, 300].into_iter().enumerate() {
            let prompt = [prefix.clone(), text(1 + i as u32, n_own)].concat();
            let mut session = empty(&model, kv, policies);
            let attached = session.attach_prefix(&prompt);
            assert_eq!(attached, if i == 0 { 0 } else { N_PREFIX }, "{kv} {policies}, session {i}");
            feed(&mut session, &prompt[attached..]);
            sessions.push(session);
        }
        let what = format!("{kv} {policies}");
        let shared_sink = if *policies == "none" { 0 } else { 16 * F16_TOKEN };
        let shared = N_PREFIX / TOKENS_PER_BLOCK * block_bytes(kv) + shared_sink;
        let own: Vec<usize> = sessions.iter().map(|session| session.kv().bytes - shared).collect();
        assert_eq!(model.kv_bytes(), shared + own.iter().sum::<usize>(), "{what}");
        // The remainders are small: at most three blocks and a tail, which is two tiles of f16.
        let tail = 2 * 16 * F16_TOKEN;
        assert!(own.iter().all(|&own| own <= 3 * block_bytes(kv) + tail), "{what}: {own:?}");

        // The session that prefilled the prefix is dropped first; the others keep the prefix.
        let mut left = model.kv_bytes();
        for (session, own) in sessions.drain(..7).zip(&own) {
            drop(session);
            left -= own;
            assert_eq!(model.kv_bytes(), left, "{what}");
        }
        assert_eq!(left, sessions[0].kv().bytes, "{what}");
        sessions.clear();
        assert_eq!(model.kv_bytes(), 0, "{what}");
    }
}

#[test]
fn a_rewind_and_a_clear_give_memory_back() {
    let model = model();
    let mut session = empty(&model, "turbo3", "none");
    feed(&mut session, &text(0, 1200));
    let full = model.kv_bytes();
    session.rewind(512).unwrap();
    // 1,200 tokens reach into ten blocks.
    assert_eq!(model.kv_bytes(), full - 6 * block_bytes("turbo3"));
    assert_eq!(model.kv_bytes(), session.kv().bytes);
    session.clear();
    assert_eq!((model.kv_bytes(), session.kv().bytes), (0, 0));
}

#[test]
fn a_prefix_that_was_attached_or_cut_to_can_be_saved_as_it_is() {
    let model = model();
    let text = text(0, 600);
    for policies in ["none", "sink:16"] {
        let mut first = empty(&model, "turbo3", policies);
        feed(&mut first, &text);
        let mut second = empty(&model, "turbo3", policies);
        assert_eq!(second.attach_prefix(&text), 512);
        let want = bits(&mut first);
        first.rewind(512).unwrap();
        for mut session in [saved_and_loaded(&second), saved_and_loaded(&first), second, first] {
            feed(&mut session, &text[512..]);
            assert_eq!(bits(&mut session), want, "{policies}");
        }
    }
}

fn is_out_of_memory(error: &Error) -> bool {
    matches!(error, Error::Model(ModelError::Kv(KvError::Device(BackendError::OutOfMemory { .. }))))
}

#[test]
fn a_budget_is_an_error_before_anything_is_lost() {
    let model = model();
    let (first, second) = (text(0, 300), text(9, 400));
    let mut want = empty(&model, "turbo3", "none");
    feed(&mut want, &first);
    feed(&mut want, &second);
    let want = bits(&mut want);

    let mut session = empty(&model, "turbo3", "none");
    feed(&mut session, &first);
    let logits = bits(&mut session);
    let before = (session.kv().bytes, model.kv_bytes());
    // Three more blocks are needed: the budget has room for none, one and two of them.
    for blocks in 0..3 {
        model.set_kv_budget(before.1 + blocks * block_bytes("turbo3") + 1);
        let error = session.feed(&second, &mut |_| true).unwrap_err();
        assert!(is_out_of_memory(&error), "{error:?}");
        assert_eq!((session.tokens(), session.kv().tokens), (&first[..], 300));
        assert!(model.kv_bytes() <= before.1 + blocks * block_bytes("turbo3"));
        assert_eq!(session.kv().bytes, before.0, "what was reserved in vain is given back");
        assert_eq!(model.kv_bytes(), before.1);
    }
    let mut none = empty(&model, "turbo3", "none");
    assert!(is_out_of_memory(&none.feed(&second, &mut |_| true).unwrap_err()));
    assert_eq!(none.kv().bytes, 0);
    model.set_kv_budget(usize::MAX);
    // The remaining tokens can be saved and shared.
    let (mut loaded, mut fork) = (saved_and_loaded(&session), session.fork());
    for session in [&mut session, &mut loaded, &mut fork] {
        feed(session, &second);
        assert_eq!(bits(session), want);
        session.rewind(299).unwrap();
        feed(session, &first[299..]);
        assert_eq!(bits(session), logits);
    }
}

#[test]
fn a_budget_that_one_of_several_exceeds_leaves_all_as_they_were() {
    let model = model();
    let mut sessions = [0, 1].map(|seed| {
        let mut session = empty(&model, "q8_0", "none");
        feed(&mut session, &text(seed, 120));
        session
    });
    let (more, bytes) = (text(9, 200), model.kv_bytes());
    model.set_kv_budget(bytes + 3 * block_bytes("q8_0"));
    let together = |sessions: &mut [Session]| {
        let mut feeds: Vec<_> = sessions.iter_mut().map(|session| BatchItem::new(session, &more)).collect();
        Session::step_batch(&mut feeds)
    };
    let error = together(&mut sessions).unwrap_err();
    assert!(is_out_of_memory(&error), "{error:?}");
    assert!(sessions.iter().all(|session| (session.tokens().len(), session.kv().tokens) == (120, 120)));
    assert_eq!(model.kv_bytes(), bytes, "what was reserved in vain is given back");
    model.set_kv_budget(usize::MAX);
    together(&mut sessions).unwrap();
    for (seed, session) in sessions.iter_mut().enumerate() {
        let mut alone = empty(&model, "q8_0", "none");
        feed(&mut alone, &[text(seed as u32, 120), more.clone()].concat());
        assert_eq!(bits(session), bits(&mut alone));
    }
}
