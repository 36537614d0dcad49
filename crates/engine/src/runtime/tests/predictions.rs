//! Predictions of MTP layers and draft heads equal those of a `transformers` model on the same
//! inputs (generator: `tools/reference`).

use std::fs;
use std::path::PathBuf;

use kvant_codec::DType;
use kvant_cpu::CpuDevice;
use kvant_gguf::Gguf;
use kvant_kv::{BlockKey, Policies};
use kvant_model::LayerRange;

use super::super::*;

/// Tolerance of a difference between two logits, each of which may be off by 1e-4, as in the model
/// tests.
const TOLERANCE: f32 = 2e-4;
/// The same for draft heads, whose caches are in f16: keys and values of about 1 are off by 2^-12
/// on average, logits by several times that.
const F16_TOLERANCE: f32 = 4e-3;

struct Golden {
    tokens: Vec<u32>,
    /// Of a margin.
    tolerance: f32,
    /// Predicted tokens behind each of the last tokens, with the margins of their logits.
    chains: Vec<Vec<(u32, f32)>>,
}

/// A model that drafts for itself: with its own MTP layer, or with a draft head.
struct Case {
    what: String,
    model: PathBuf,
    head: Option<PathBuf>,
}

/// Returns the files with this extension in a folder of the tests.
fn files(folder: &str, extension: &str) -> Vec<PathBuf> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests").join(folder);
    let mut files: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|file| file.extension().is_some_and(|of| of == extension));
    files.sort();
    files
}

fn cases() -> Vec<Case> {
    let what = |file: &PathBuf| file.file_stem().unwrap().to_str().unwrap().to_owned();
    let own = files("predictions", "gguf").into_iter();
    let own = own.map(|model| Case { what: what(&model), model, head: None });
    let heads = ["llama-h64-g2-six", "qwen3-h64-g2-five"].into_iter().flat_map(|of| {
        let of_model = files(&format!("heads/{of}"), "predictions").into_iter();
        of_model.map(move |file| {
            let (what, model) = (format!("{of}, {}", what(&file)), file.with_file_name("model.gguf"));
            Case { what, model, head: Some(file.with_extension("gguf")) }
        })
    });
    let cases: Vec<_> = own.chain(heads).collect();
    assert!(cases.len() >= 7);
    cases
}

fn open(case: &Case, drafts: bool) -> (Arc<dyn LoadedModel>, Golden) {
    let gguf = Arc::new(Gguf::open(&case.model).unwrap());
    let config = Config::from_gguf(&gguf).unwrap();
    let head = case.head.as_ref().filter(|_| drafts).map(|head| Arc::new(Gguf::open(head).unwrap()));
    let whole =
        LayerRange::whole(config.layers.len()).with_mtp(drafts && case.head.is_none()).with_draft_head(head);
    let model = load(CpuDevice::from_env(Some(2)).unwrap(), config, &whole, &gguf, &mut |_| ()).unwrap();
    let file = case.head.as_ref().unwrap_or(&case.model);
    let bytes = fs::read(file.with_extension("predictions")).unwrap();
    assert_eq!(&bytes[..4], b"KVPR");
    let words: Vec<[u8; 4]> = bytes[4..].chunks_exact(4).map(|word| word.try_into().unwrap()).collect();
    let [n_tokens, n_places, n_chain] = [0, 1, 2].map(|i| u32::from_le_bytes(words[i]) as usize);
    let (tokens, rest) = words[3..].split_at(n_tokens);
    let (chains, leads) = rest.split_at(n_places * n_chain);
    let pairs =
        chains.iter().zip(leads).map(|(&token, &lead)| (u32::from_le_bytes(token), f32::from_le_bytes(lead)));
    let pairs: Vec<_> = pairs.collect();
    let golden = Golden {
        tolerance: if case.head.is_some() { F16_TOLERANCE } else { TOLERANCE },
        tokens: tokens.iter().map(|&token| u32::from_le_bytes(token)).collect(),
        chains: pairs.chunks(n_chain).map(<[_]>::to_vec).collect(),
    };
    (model, golden)
}

fn start(model: &Arc<dyn LoadedModel>, dtype: DType) -> Sequence {
    let plan = Plan::new(&model.properties().kv_shape, dtype, dtype, &Policies::default()).unwrap();
    Sequence::start(Arc::clone(model), plan, ContextSize::Exactly(1000)).unwrap()
}

fn feed(sequence: &Sequence, tokens: &[u32]) {
    let batch = [sequence.step_row(tokens.len(), LogitsFor::Last)];
    sequence.loaded().step(&batch, Entry::Tokens(tokens), None, None).unwrap();
}

/// Returns at most `max` predictions behind all tokens of a sequence and `next`.
fn predict(sequence: &Sequence, next: u32, max: usize) -> Vec<(u32, f32)> {
    let mut chain = Vec::new();
    sequence.predict(sequence.len(), next, &mut |token, lead| {
        chain.push((token, lead));
        chain.len() < max
    });
    chain
}

/// Asserts that `got` begins the chain at `place`; returns the number of tokens compared.
fn assert_chain(golden: &Golden, place: usize, got: &[(u32, f32)], what: &str) -> usize {
    let first = golden.tokens.len() + 1 - golden.chains.len();
    let want = &golden.chains[place - first];
    for (i, ((token, lead), want)) in got.iter().zip(want).enumerate() {
        let error = (lead - want.1).abs();
        // Written so that NaN fails.
        assert!(
            *token == want.0 && error <= golden.tolerance,
            "{what}, {place} tokens, prediction {i}: {token} leads by {lead}, want {want:?}"
        );
    }
    got.len().min(want.len())
}

#[test]
fn predictions_equal_those_of_transformers() {
    for case in cases() {
        let (model, golden) = open(&case, true);
        assert!(model.properties().has_draft_head);
        let n_chain = golden.chains[0].len();
        let first = golden.tokens.len() + 1 - golden.chains.len();
        for pieces in [1, 3, 8, 20] {
            let what = format!("{}, {pieces} at once", case.what);
            let [sequence, other] = [(); 2].map(|()| start(&model, DType::F32));
            feed(&sequence, &golden.tokens[..first - 1]);
            let (mut at, mut n_predicted, mut n_places) = (first - 1, 0, 0);
            while at < golden.tokens.len() {
                let next = golden.tokens[at];
                let chain = predict(&sequence, next, n_chain);
                n_predicted += assert_chain(&golden, at + 1, &chain, &what);
                n_places += 1;
                // A fork predicts the same, and leaves the original unchanged.
                let fork = sequence.fork();
                assert_eq!(predict(&fork, next, n_chain), chain, "{what}: a fork");
                feed(&fork, &[next ^ 1]);
                let n = pieces.min(golden.tokens.len() - at);
                let others: Vec<u32> = (0..5).map(|i| i * 7 % 64).collect();
                let batch = [(&other, 5), (&sequence, n)];
                let batch = batch.map(|(sequence, n)| sequence.step_row(n, LogitsFor::Last));
                let entered = [&others, &golden.tokens[at..][..n]].concat();
                model.step(&batch, Entry::Tokens(&entered), None, None).unwrap();
                at += n;
            }
            assert!(n_predicted * 2 > n_places * n_chain, "{what}: {n_predicted} at {n_places} places only");
        }
    }
}

/// Rejected draft tokens do not affect later predictions.
#[test]
fn rejected_draft_tokens_do_not_affect_predictions() {
    for case in cases() {
        let (model, golden) = open(&case, true);
        let what = &case.what;
        let n_chain = golden.chains[0].len();
        let first = golden.tokens.len() + 1 - golden.chains.len();
        let sequence = start(&model, DType::F32);
        let mut n_predicted = 0;
        for at in first - 1..golden.tokens.len() {
            // As in sessions: two wrong draft tokens; tokens that the cache cannot keep are
            // recomputed.
            let known = &golden.tokens[sequence.len()..at];
            sequence.reserve_draft(known.len(), 2);
            feed(&sequence, &[known, &[golden.tokens[at] ^ 3, 5]].concat());
            let left = sequence.truncate(at);
            assert!(left <= at);
            let mut chain = Vec::new();
            sequence.predict(at, golden.tokens[at], &mut |token, lead| {
                chain.push((token, lead));
                chain.len() < n_chain
            });
            n_predicted += assert_chain(&golden, at + 1, &chain, what);
        }
        assert!(n_predicted > golden.chains.len(), "{what}: {n_predicted}");
    }
}

#[test]
fn a_draft_head_predicts_and_keeps_the_logits() {
    for case in cases() {
        let [with, without] = [true, false].map(|drafts| open(&case, drafts));
        let logits = |(model, golden): &(Arc<dyn LoadedModel>, Golden)| {
            let sequence = start(model, DType::Turbo3);
            let batch = [sequence.step_row(golden.tokens.len(), LogitsFor::Last)];
            let logits = model.step(&batch, Entry::Tokens(&golden.tokens), None, None).unwrap().unwrap();
            let mut row = vec![f32::NAN; model.properties().n_vocab];
            logits.read(0, &mut row).unwrap();
            (row.iter().map(|x| x.to_bits()).collect::<Vec<_>>(), predict(&sequence, 1, 3).len())
        };
        let (logits_with, n_with) = logits(&with);
        let (logits_without, n_without) = logits(&without);
        assert_eq!(logits_with, logits_without);
        assert!(n_with > 0 && n_without == 0, "{n_with}, {n_without}");
        assert!(with.0.properties().weight_bytes > without.0.properties().weight_bytes);
        assert!(!without.0.properties().has_draft_head);
    }
}

/// The predicted size includes the head's cache, in every type.
#[test]
fn the_predicted_cache_size_includes_the_draft_head() {
    for case in cases() {
        let [(with, golden), (without, _)] = [true, false].map(|drafts| open(&case, drafts));
        let text: Vec<u32> = golden.tokens.iter().cycle().copied().take(400).collect();
        let what = &case.what;
        for dtype in [DType::F16, DType::Q8_0, DType::Turbo3] {
            let taken = [&with, &without].map(|model| {
                let sequence = start(model, dtype);
                text.chunks(100).for_each(|piece| feed(&sequence, piece));
                let expected = model.bytes_for(sequence.plan(), text.len());
                assert_eq!(sequence.n_bytes(), expected, "{what}, {dtype:?}");
                expected
            });
            assert!(taken[0] > taken[1], "{taken:?}");
        }
    }
}

/// A sequence with an attached prefix predicts the same; one restored from page images predicts
/// nothing.
#[test]
fn attached_prefixes_predict_and_restored_ones_do_not() {
    let cases = cases();
    for case in [&cases[0], &cases[cases.len() - 1]] {
        let (model, golden) = open(case, true);
        let text: Vec<u32> = golden.tokens.iter().cycle().copied().take(400).collect();
        let first = start(&model, DType::F16);
        first.caches(|cache| cache.set_prefix_root(BlockKey::root(&[b"test"])));
        text.chunks(130).for_each(|piece| feed(&first, piece));
        first.caches(|cache| cache.register_prefix(&text));
        let second = start(&model, DType::F16);
        second.caches(|cache| cache.set_prefix_root(BlockKey::root(&[b"test"])));
        let n = second.attach_prefix(&text, 1000);
        assert!(n > 100, "{n}");
        feed(&second, &text[n..]);
        let predicted = predict(&first, 9, 3);
        assert!(!predicted.is_empty());
        // The first token behind the shared prefix lacks the hidden state before it, so margins may
        // differ.
        assert_eq!(
            predict(&second, 9, 3).iter().map(|(token, _)| token).collect::<Vec<_>>(),
            predicted.iter().map(|(token, _)| token).collect::<Vec<_>>()
        );
        let mut images = Vec::new();
        let visit = &mut |image| {
            images.push(image);
            Ok(())
        };
        first.pages(visit).unwrap();
        let (plan, state) = (first.plan().clone(), first.state());
        let restored =
            Sequence::restore(Arc::clone(&model), plan, 1000, state, &mut |i| Ok(images[i].clone())).unwrap();
        feed(&restored, &[1]);
        assert!(predict(&restored, 9, 3).is_empty());
        restored.truncate(0);
    }
}
