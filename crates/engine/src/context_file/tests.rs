//! Tests of context files on the bundled model.

use std::path::PathBuf;

use super::*;
use crate::model::OpenOptions;
use crate::session::{KvOptions, SessionOptions};

fn model() -> Model {
    Model::bundled(OpenOptions { n_threads: Some(1), ..Default::default() }).unwrap()
}

fn file(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("kvant-context-{}-{name}", std::process::id()))
}

fn options(k: &str, v: &str, policies: &str, tail: bool) -> SessionOptions {
    let policies = policies.parse().unwrap();
    let kv = KvOptions { k: k.parse().unwrap(), v: v.parse().unwrap(), policies, tail, ..Default::default() };
    SessionOptions { n_ctx: Some(300), kv }
}

/// Arbitrary tokens, distinct within a neighbourhood.
fn tokens(n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| 100 + i * 37 % 3000).collect()
}

fn images(session: &Session) -> Vec<Vec<u8>> {
    let mut images = Vec::new();
    let visit = &mut |image| {
        images.push(image);
        Ok(())
    };
    session.sequence().pages(visit).unwrap();
    images
}

#[test]
fn a_loaded_session_equals_the_saved_one_bit_for_bit() {
    let (model, path) = (model(), file("equal"));
    for (k, v, policies, tail) in [
        ("f16", "f16", "none", true),
        ("turbo3", "turbo3", "none", true),
        ("q8_0", "turbo2", "sink:16,recent:32,alpha:1.01", true),
        ("turbo4", "q4_0", "boundary:1", false),
    ] {
        let mut session = model.session(options(k, v, policies, tail)).unwrap();
        session.feed(&tokens(150), &mut |_| true).unwrap();
        session.rewind(139).unwrap();
        let bytes = session.save(&path).unwrap();
        assert_eq!(bytes, std::fs::metadata(&path).unwrap().len());

        let mut loaded = model.load_session(&path, Some(300)).unwrap();
        assert_eq!(loaded.tokens(), session.tokens());
        assert_eq!(loaded.sequence().plan(), session.sequence().plan());
        assert_eq!(images(&loaded), images(&session), "{k} {v} {policies}");
        // Both continue alike.
        for token in [7, 1000, 3] {
            session.feed(&[token], &mut |_| true).unwrap();
            loaded.feed(&[token], &mut |_| true).unwrap();
            assert_eq!(loaded.logits().unwrap(), session.logits().unwrap(), "{k} {v} {policies}");
        }
        assert_eq!(images(&loaded), images(&session));
    }
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn a_session_saved_in_memory_equals_its_file() {
    let (model, path) = (model(), file("memory"));
    for (k, v, policies, n, tail) in [
        ("turbo3", "turbo3", "none", 0, true),
        ("turbo3", "turbo3", "none", 1, true),
        ("f16", "turbo4", "sink:16,recent:32,alpha:1.01", 130, true),
        ("turbo4", "q8_0", "boundary:1", 150, false),
        ("turbo3", "turbo3", "none", 700, true),
    ] {
        let what = format!("{k} {v} {policies} {n}");
        let opts = || SessionOptions { n_ctx: Some(1000), ..options(k, v, policies, tail) };
        let mut session = model.session(opts()).unwrap();
        if n > 0 {
            session.feed(&tokens(n), &mut |_| true).unwrap();
            session.set_checkpoint();
            session.feed(&[5], &mut |_| true).unwrap();
        }
        let needed = session.saved_bytes();
        let saved = session.to_saved().unwrap();
        session.save(&path).unwrap();
        assert!(*saved.0 == *std::fs::read(&path).unwrap(), "{what}");
        assert_eq!(saved.n_bytes(), needed, "{what}");
        std::fs::remove_file(&path).unwrap();
        assert_eq!(saved.write(&path).unwrap(), needed, "{what}");

        let mut prompt = session.tokens().to_vec();
        prompt.push(7);
        let mut from = [model.session(opts()).unwrap(), model.session(opts()).unwrap()];
        assert_eq!(from[0].load_prefix(&path, &prompt).unwrap(), prompt.len() - 1, "{what}");
        assert_eq!(from[1].load_saved_prefix(&saved, &prompt).unwrap(), prompt.len() - 1, "{what}");
        assert_eq!(images(&from[0]), images(&session), "{what}");
        assert_eq!(images(&from[1]), images(&session), "{what}");
    }
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn a_changed_byte_of_a_saved_session_is_an_error() {
    let model = model();
    let opts = || options("turbo3", "turbo3", "none", true);
    let mut session = model.session(opts()).unwrap();
    session.feed(&tokens(40), &mut |_| true).unwrap();
    let mut saved = session.to_saved().unwrap();
    *saved.0.last_mut().unwrap() ^= 1;
    let mut other = model.session(opts()).unwrap();
    let error = other.load_saved_prefix(&saved, &tokens(50)).unwrap_err().to_string();
    assert!(error.starts_with("(memory): corrupt") && error.contains("checksum"), "{error}");
    assert!(other.tokens().is_empty());
}

#[test]
fn an_empty_session_can_be_saved() {
    let (model, path) = (model(), file("empty"));
    let session = model.session(options("turbo4", "turbo4", "sink:4", true)).unwrap();
    session.save(&path).unwrap();
    assert!(model.load_session(&path, None).unwrap().tokens().is_empty());
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn loading_restores_the_common_prefix_with_the_prompt() {
    let (model, path) = (model(), file("prefix"));
    let opts = || options("turbo3", "turbo3", "none", true);
    let mut whole = model.session(opts()).unwrap();
    whole.feed(&tokens(100), &mut |_| true).unwrap();
    whole.save(&path).unwrap();
    let mut prompt = tokens(70);
    prompt.extend([5, 6, 7]);

    let mut session = model.session(opts()).unwrap();
    // The token after token 70 would attend in 16 bits to tokens that the file has in codes.
    assert_eq!(session.load_prefix(&path, &prompt).unwrap(), 0);
    assert_eq!(session.n_ctx(), 300);
    // The whole prompt is in the file: its last token is left to feed.
    assert_eq!(session.load_prefix(&path, &tokens(100)).unwrap(), 99);
    assert_eq!(session.tokens(), &tokens(99));
    whole.rewind(99).unwrap();
    for token in [7, 8] {
        session.feed(&[token], &mut |_| true).unwrap();
        whole.feed(&[token], &mut |_| true).unwrap();
        assert_eq!(session.logits().unwrap(), whole.logits().unwrap());
    }
    assert_eq!(session.load_prefix(&path, &[9, 9]).unwrap(), 0);
    assert!(session.tokens().is_empty());
    // A context smaller than the file takes a prefix that fits.
    let mut small = model.session(SessionOptions { n_ctx: Some(40), ..opts() }).unwrap();
    assert_eq!(small.load_prefix(&path, &tokens(60)).unwrap(), 0);
    assert_eq!(small.n_ctx(), 40);
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn another_model_layout_rope_or_type_is_refused_by_name() {
    let (model, path) = (model(), file("other"));
    let mut session = model.session(options("turbo3", "turbo3", "none", true)).unwrap();
    session.feed(&tokens(20), &mut |_| true).unwrap();
    session.save(&path).unwrap();
    let header = Header::new(&model, session.sequence()).to_json();
    for (name, _) in header::identity(&model, None) {
        // A file with another value in this field and correct checksums.
        let mut other: serde_json::Value = serde_json::from_str(&header).unwrap();
        other["identity"][name] = "else".into();
        let forged = file("forged");
        kvant_files::write_atomic(&forged, std::convert::identity, |file| {
            let mut writer = Writer::new(file, &other.to_string(), 1)?;
            writer.section(&[])?;
            writer.finish()
        })
        .unwrap();
        let error = model.load_session(&forged, None).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains("the file has else"), "{error}");
        std::fs::remove_file(&forged).unwrap();
    }
    for (opts, want) in [
        (
            options("turbo4", "turbo3", "none", true),
            "type of K, layer 0, head 0: expected turbo4, the file has turbo3",
        ),
        (options("turbo3", "turbo3", "sink:16", true), "sink tokens: expected 16, the file has 0"),
        (options("turbo3", "turbo3", "none", false), "f16 tail: expected false, the file has true"),
        (options("turbo3", "turbo3", "alpha:1.5", true), "alpha: expected 1.5, the file has 1"),
    ] {
        let mut session = model.session(opts).unwrap();
        session.feed(&[1, 2], &mut |_| true).unwrap();
        let error = session.load_prefix(&path, &tokens(20)).unwrap_err().to_string();
        assert!(error.contains(want), "{error}");
        assert_eq!(session.tokens(), [1, 2], "a refused file changes nothing");
    }
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn every_changed_or_missing_byte_is_noticed() {
    let (model, path) = (model(), file("corrupt"));
    let mut session = model.session(options("turbo2", "turbo2", "none", true)).unwrap();
    session.feed(&tokens(40), &mut |_| true).unwrap();
    session.save(&path).unwrap();
    let whole = std::fs::read(&path).unwrap();
    let load = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        model.load_session(&path, None)
    };
    // Every byte of the front, and a sample of the rest. Padding between sections belongs to no
    // checksum.
    let mut n_unnoticed = 0;
    for at in (0..2000).chain((2000..whole.len()).step_by(97)) {
        let mut bytes = whole.clone();
        bytes[at] ^= 0x20;
        match load(&bytes) {
            Err(Error::ContextFile(error)) => assert!(!error.to_string().contains('\n'), "{at}: {error}"),
            Err(error) => panic!("byte {at}: {error}"),
            Ok(loaded) => {
                assert_eq!(images(&loaded), images(&session), "byte {at} changed the cache unnoticed");
                n_unnoticed += 1;
            }
        }
    }
    // The prelude's unused 28 bytes, and padding.
    assert!(n_unnoticed <= 28 + 64 * 12, "{n_unnoticed} changes went unnoticed");
    for len in [0, 7, 11, 63, 64, 500, whole.len() / 2, whole.len() - 1] {
        assert!(matches!(load(&whole[..len]), Err(Error::ContextFile(_))), "cut to {len}");
    }
    std::fs::remove_file(&path).unwrap();
}

/// The file is as long as it declares, but sparse: declared sizes alone allocate no memory.
#[test]
#[cfg(target_os = "linux")]
fn a_file_of_holes_is_refused_before_memory_is_taken() {
    let (model, path) = (model(), file("holes"));
    let mut session = model.session(options("f16", "f16", "none", true)).unwrap();
    session.feed(&tokens(20), &mut |_| true).unwrap();
    session.save(&path).unwrap();
    let whole = std::fs::read(&path).unwrap();
    for (n_sections, len) in [(u32::MAX, 1u64 << 40), (1 << 24, 1 << 32)] {
        let mut bytes = whole.clone();
        bytes[16..20].copy_from_slice(&n_sections.to_le_bytes());
        bytes[24..32].copy_from_slice(&len.to_le_bytes());
        std::fs::write(&path, &bytes).unwrap();
        std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(len).unwrap();
        let error = model.load_session(&path, None).unwrap_err().to_string();
        assert!(error.contains("sections"), "{error}");
    }
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn loaded_sessions_check_n_ctx_and_share_by_owner() {
    let (model, path) = (model(), file("owner"));
    let prompt = tokens(160);
    let mut session = model.session(options("f16", "f16", "none", true)).unwrap();
    session.feed(&prompt[..150], &mut |_| true).unwrap();
    session.save(&path).unwrap();
    drop(session);
    assert!(model.load_session(&path, Some(usize::MAX)).is_err());
    let mut of_alice = model.load_session(&path, Some(300)).unwrap().with_cache_salt(Some("alice".into()));
    of_alice.feed(&prompt[150..], &mut |_| true).unwrap();
    let attached = |owner: Option<&str>| {
        let session = model.session(options("f16", "f16", "none", true)).unwrap();
        session.with_cache_salt(owner.map(Into::into)).attach_prefix(&prompt)
    };
    assert_eq!((attached(None), attached(Some("bob")), attached(Some("alice"))), (0, 0, 128));
    std::fs::remove_file(&path).unwrap();
}

/// The bundled model with another value of one hyper-parameter, which changes neither shapes nor
/// weights.
fn model_with_another_epsilon() -> Model {
    let gguf = kvant_gguf::Gguf::from_bytes(crate::bundled::POCKET).unwrap();
    let mut writer = kvant_gguf::GgufWriter::with_meta(gguf.meta()).unwrap();
    let architecture = gguf.meta().get::<&str>("general.architecture").unwrap();
    writer.set(&format!("{architecture}.attention.layer_norm_rms_epsilon"), 3e-6f32).unwrap();
    gguf.tensors().iter().for_each(|t| writer.add_tensor(&t.name, &t.shape, t.dtype).unwrap());
    let mut bytes = Vec::new();
    let fill = |data: &mut kvant_gguf::TensorSink<'_>| {
        gguf.tensors().iter().try_for_each(|info| data.bytes(&info.name, &gguf.data(info)))
    };
    writer.write_to::<kvant_gguf::GgufError>(&mut bytes, fill).unwrap();
    let gguf = kvant_gguf::Gguf::from_bytes(bytes).unwrap();
    Model::from_gguf(gguf, OpenOptions { n_threads: Some(1), ..Default::default() }).unwrap()
}

#[test]
fn another_norm_epsilon_changes_the_fingerprint() {
    let path = file("epsilon");
    let mut session = model().session(options("turbo3", "turbo3", "none", true)).unwrap();
    session.feed(&tokens(20), &mut |_| true).unwrap();
    session.save(&path).unwrap();
    let other = model_with_another_epsilon();
    let error = other.load_session(&path, None).unwrap_err().to_string();
    assert!(error.contains("model.fingerprint: expected ") && !error.contains('\n'), "{error}");
    std::fs::remove_file(&path).unwrap();
}

/// Set in the child process of the next test: the path to which it saves in a loop.
const SAVE_FOREVER: &str = "KVANT_TEST_SAVE_FOREVER";

#[test]
fn a_kill_in_the_middle_of_a_save_leaves_a_whole_file() {
    if let Some(path) = std::env::var_os(SAVE_FOREVER) {
        let model = model();
        let mut session = model.session(options("f16", "f16", "none", true)).unwrap();
        loop {
            session.clear();
            session.feed(&tokens(200), &mut |_| true).unwrap();
            for _ in 0..20 {
                session.save(&path).unwrap();
            }
        }
    }
    let folder = file("kill");
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join("context");
    let model = model();
    let mut session = model.session(options("f16", "f16", "none", true)).unwrap();
    session.feed(&tokens(200), &mut |_| true).unwrap();
    session.save(&path).unwrap();
    for round in 0..6 {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "context_file::tests::a_kill_in_the_middle_of_a_save_leaves_a_whole_file"])
            .env(SAVE_FOREVER, &path)
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        let before = std::fs::metadata(&path).unwrap().modified().unwrap();
        // Kills after the first save, at a different moment each round.
        while std::fs::metadata(&path).unwrap().modified().unwrap() == before {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        std::thread::sleep(std::time::Duration::from_micros(700 * round));
        child.kill().unwrap();
        child.wait().unwrap();
        let loaded = model.load_session(&path, None).unwrap();
        assert_eq!(images(&loaded), images(&session), "round {round}");
    }
    session.save(&path).unwrap();
    assert_eq!(
        std::fs::read_dir(&folder).unwrap().count(),
        1,
        "what a killed save left is gone with the next"
    );
    std::fs::remove_dir_all(&folder).unwrap();
}
