//! Target: context files of the bundled model, modified.

use std::fs;
use std::path::PathBuf;
use std::sync::LazyLock;

use kvant::{Error, KvOptions, Model, OpenOptions, SessionOptions};

use crate::mutate::changed;

/// The model, and a session's file.
static BUNDLED: LazyLock<(Model, Vec<u8>)> = LazyLock::new(|| {
    let options = OpenOptions { n_threads: Some(1), ..Default::default() };
    let model = Model::bundled(options).expect("the bundled model is sound");
    let kv = KvOptions::symmetric(kvant::DType::Turbo2);
    let options = SessionOptions { n_ctx: Some(64), kv };
    let mut session = model.session(options).expect("64 tokens of context");
    let tokens: Vec<u32> = (100..140).collect();
    session.feed(&tokens, &mut |_| true).expect("40 tokens fit");
    let file = place("whole");
    session.save(&file).expect("the folder for temporary files can be written");
    (model, fs::read(&file).expect("it was just written"))
});

fn place(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("kvant-fuzz-{}-{name}", std::process::id()))
}

/// Returns whether a modified file is accepted. It must be rejected in one line, or restore the
/// original session: saved again, it gives the same file. The input encodes the changes
/// (`mutate.rs`); effective changes are worth mutating further.
///
/// # Panics
///
/// If the property is violated.
pub fn context(bytes: &[u8]) -> bool {
    let (model, whole) = &*BUNDLED;
    let file = changed(whole, bytes);
    let path = place("changed");
    fs::write(&path, &file).expect("the folder for temporary files can be written");
    match model.load_session(&path, Some(64)) {
        Ok(session) => {
            session.save(&path).expect("the folder for temporary files can be written");
            assert!(fs::read(&path).expect("it was just written") == *whole, "another session was loaded");
        }
        Err(Error::ContextFile(error)) => assert!(!error.to_string().contains('\n'), "{error}"),
        Err(error) => panic!("{error}"),
    }
    file != *whole
}

/// Returns no change, a changed byte of the header and of the cache, and a truncation.
pub(crate) fn seeds() -> Vec<Vec<u8>> {
    let at = |place: u32| place.to_le_bytes();
    vec![vec![], [&at(100)[..], &[1]].concat(), [&at(9000)[..], &[0x80]].concat(), at(5000).to_vec()]
}
