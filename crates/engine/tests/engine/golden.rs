//! Every family equals Hugging Face `transformers` on tiny random models (generator:
//! `tools/reference`).
//!
//! Tolerance: 1e-4 on logits of order 1 to 10, a twentieth of the 2e-3 required of a family. The
//! reference runs in f32 too, with another order of sums: over all 196,544 comparisons the largest
//! difference is 7.2e-5 (scalar) and 5.5e-5 (avx2, avxvnni, avx512, avx512vbmi), both of Granite,
//! whose factors amplify rounding errors.

use std::fs;
use std::path::{Path, PathBuf};

use kvant::{BatchItem, HiddenStatePool, KvOptions, Model, Pooling, Session, SessionOptions};

const TOLERANCE: f32 = 1e-4;

struct Golden {
    n_prompt: usize,
    tokens: Vec<u32>,
    n_vocab: usize,
    /// `[tokens, n_vocab]`
    logits: Vec<f32>,
}

impl Golden {
    /// Reads magic `KVGD`, u32 n_prompt, n_steps, n_vocab, i32 tokens, f32 logits; little endian.
    fn read(path: &Path) -> Self {
        let bytes = fs::read(path).unwrap();
        assert_eq!(&bytes[..4], b"KVGD", "{}", path.display());
        let words: Vec<[u8; 4]> = bytes[4..].chunks_exact(4).map(|word| word.try_into().unwrap()).collect();
        let size = |i: usize| u32::from_le_bytes(words[i]) as usize;
        let (n_prompt, n_steps, n_vocab) = (size(0), size(1), size(2));
        let (tokens, logits) = words[3..].split_at(n_prompt + n_steps);
        assert_eq!(logits.len(), tokens.len() * n_vocab, "{}", path.display());
        Self {
            n_prompt,
            tokens: tokens.iter().map(|&word| u32::from_le_bytes(word)).collect(),
            n_vocab,
            logits: logits.iter().map(|&word| f32::from_le_bytes(word)).collect(),
        }
    }

    fn row(&self, token: usize) -> &[f32] {
        &self.logits[token * self.n_vocab..][..self.n_vocab]
    }
}

fn models() -> Vec<PathBuf> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures");
    let files = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let mut models: Vec<_> = files.filter(|path| path.extension().is_some_and(|ext| ext == "gguf")).collect();
    models.sort();
    assert!(models.len() >= 9, "only {} fixtures", models.len());
    models
}

fn session(path: &Path) -> Session {
    let model = Model::open(path).unwrap();
    let kv = KvOptions::symmetric("f32".parse().unwrap());
    model.session(SessionOptions { n_ctx: Some(128), kv }).unwrap()
}

fn assert_close(got: &[f32], want: &[f32], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let error = (got - want).abs();
        // Written so that NaN fails.
        assert!(error <= TOLERANCE, "{what}, logit {i}: got {got}, want {want}");
    }
}

#[test]
fn logits_of_a_prompt_and_of_decoded_steps_equal_transformers() {
    for path in models() {
        let name = path.file_stem().unwrap().to_str().unwrap();
        let golden = Golden::read(&path.with_extension("golden"));
        let mut session = session(&path);
        let (prompt, steps) = golden.tokens.split_at(golden.n_prompt);
        session
            .feed_scored(prompt, 0, &mut |i, logits| {
                assert_close(logits, golden.row(i), &format!("{name}, prompt token {i}"));
            })
            .unwrap();
        for (i, &token) in steps.iter().enumerate() {
            session.feed(&[token], &mut |_| true).unwrap();
            assert_close(
                session.logits().unwrap(),
                golden.row(golden.n_prompt + i),
                &format!("{name}, step {i}"),
            );
        }
    }
}

#[test]
fn logits_survive_chunks_rewinds_forks_and_saving() {
    for path in models() {
        let name = path.file_stem().unwrap().to_str().unwrap();
        let golden = Golden::read(&path.with_extension("golden"));
        let prompt = &golden.tokens[..golden.n_prompt];
        let mut session = session(&path);
        for piece in [&prompt[..7], &prompt[7..8], &prompt[8..41]] {
            session.feed(piece, &mut |_| true).unwrap();
        }
        let mut fork = session.fork();
        session.rewind(19).unwrap();
        session.feed(&prompt[19..], &mut |_| true).unwrap();
        assert_close(session.logits().unwrap(), golden.row(golden.n_prompt - 1), &format!("{name}, rewound"));
        let file = std::env::temp_dir().join(format!("kvant-golden-{}-{name}", std::process::id()));
        fork.save(&file).unwrap();
        fork.feed(&prompt[41..], &mut |_| true).unwrap();
        assert_close(fork.logits().unwrap(), golden.row(golden.n_prompt - 1), &format!("{name}, forked"));
        let restored = fork.model().load_session(&file, None);
        fs::remove_file(&file).unwrap();
        let mut restored = restored.unwrap();
        restored.feed(&prompt[41..], &mut |_| true).unwrap();
        let logits = restored.logits().unwrap();
        assert_close(logits, golden.row(golden.n_prompt - 1), &format!("{name}, restored"));
    }
}

/// Computes the logits of a hidden state with the model's output matrix, in plain f64.
fn logits_of(model: &Model, state: &[f32]) -> Vec<f32> {
    let output = ["output.weight", "token_embd.weight"].map(|name| model.gguf().find_tensor(name));
    let output = output.into_iter().flatten().next().unwrap();
    let mut weights = vec![0.0; output.info.elements()];
    kvant_codec::decode(output.info.dtype, &output.bytes, &mut weights).unwrap();
    let dot = |row: &[f32]| row.iter().zip(state).map(|(&w, &x)| f64::from(w) * f64::from(x)).sum::<f64>();
    let mut biases = vec![0.0; weights.len() / state.len()];
    if let Some(bias) = model.gguf().find_tensor("output.bias") {
        kvant_codec::decode(bias.info.dtype, &bias.bytes, &mut biases).unwrap();
    }
    let cap = model.config().logit_soft_cap;
    let capped = |logit: f64| cap.map_or(logit, |cap| f64::from(cap) * (logit / f64::from(cap)).tanh());
    let rows = weights.chunks_exact(state.len()).zip(biases);
    rows.map(|(row, bias)| capped(dot(row) + f64::from(bias)) as f32).collect()
}

#[test]
fn hidden_states_give_the_logits_of_transformers() {
    for path in models() {
        let name = path.file_stem().unwrap().to_str().unwrap();
        let golden = Golden::read(&path.with_extension("golden"));
        let mut session = session(&path);
        let model = session.model().clone();
        let mut at = 0;
        for n in [1, 30, 1, 11, 1, 1] {
            let mut pooled = HiddenStatePool::new(&model, Pooling::Last);
            let tokens = &golden.tokens[at..at + n];
            let feed = BatchItem { pooled: Some(&mut pooled), ..BatchItem::new(&mut session, tokens) };
            Session::step_batch(&mut [feed]).unwrap();
            at += n;
            let logits = logits_of(&model, &pooled.vector().unwrap());
            assert_close(&logits, golden.row(at - 1), &format!("{name}, token {}", at - 1));
        }
        assert!(session.logits().is_err(), "states come without logits");
        session.feed(&golden.tokens[at..at + 1], &mut |_| true).unwrap();
        assert_close(session.logits().unwrap(), golden.row(at), &format!("{name}, then token {at}"));
    }
}
