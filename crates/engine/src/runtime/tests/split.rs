//! A model split over devices has the bits of the whole one.

use std::path::Path;

use kvant_codec::random::Random;
use kvant_codec::{DType, Side};
use kvant_cpu::CpuDevice;
use kvant_gguf::Gguf;
use kvant_kv::{BlockKey, Policies};
use kvant_model::{EmbeddingInput, LayerRange, Lora};

use super::super::*;
use crate::bundled::POCKET;

/// The bundled model, split into these parts.
fn cut(gguf: &Arc<Gguf>, parts: &[LayerRange]) -> Arc<LayerPipeline> {
    let part = |part: &LayerRange| {
        let device = CpuDevice::from_env(Some(1)).unwrap();
        load(device, Config::from_gguf(gguf).unwrap(), part, gguf, &mut |_| ()).unwrap()
    };
    Arc::new(LayerPipeline::new(parts.iter().map(part).collect()))
}

fn start(pipeline: &Arc<LayerPipeline>) -> Sequence {
    start_with(pipeline, &Policies::default())
}

fn start_with(pipeline: &Arc<LayerPipeline>, policies: &Policies) -> Sequence {
    let plan = Plan::new(&pipeline.properties().kv_shape, DType::Turbo3, DType::Q8_0, policies).unwrap();
    Sequence::start(Arc::clone(pipeline) as Arc<dyn LoadedModel>, plan, ContextSize::Exactly(700)).unwrap()
}

fn logits(sequence: &Sequence, tokens: &[u32]) -> Vec<u32> {
    let batch = [sequence.step_row(tokens.len(), LogitsFor::Last)];
    let logits = sequence.loaded().step(&batch, Entry::Tokens(tokens), None, None).unwrap().unwrap();
    let mut row = vec![f32::NAN; sequence.loaded().properties().n_vocab];
    logits.read(0, &mut row).unwrap();
    row.iter().map(|logit| logit.to_bits()).collect()
}

/// Returns the hidden states of these tokens after the last layer, `[tokens, n_embd]`.
fn left(sequence: &Sequence, tokens: &[u32]) -> Vec<f32> {
    let (batch, mut left) = ([sequence.step_row(tokens.len(), LogitsFor::None)], Vec::new());
    sequence.loaded().step(&batch, Entry::Tokens(tokens), Some(&mut left), None).unwrap();
    left
}

fn images(sequence: &Sequence) -> Vec<Vec<u8>> {
    let mut images = Vec::new();
    let visit = &mut |image| {
        images.push(image);
        Ok(())
    };
    sequence.pages(visit).unwrap();
    images
}

fn text(n: u32) -> Vec<u32> {
    (0..n).map(|i| i * 37 % 500).collect()
}

#[test]
fn lora_scales_of_a_sequence_apply_to_all_parts() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures");
    let open = |name: &str| Arc::new(Gguf::open(folder.join(name)).unwrap());
    let (gguf, adapter) = (open("llama-h64-g8.gguf"), open("adapters/llama-h64-g8.gguf"));
    let adapted = |part: LayerRange| part.with_loras(vec![Lora::new(adapter.clone(), 1.0, &gguf).unwrap()]);
    let [whole, halves] =
        [cut(&gguf, &[adapted(LayerRange::whole(2))]), cut(&gguf, &LayerRange::split(2, 1).map(adapted))];
    let text: Vec<u32> = (0..40).map(|i| i * 29 % 64).collect();
    let by_strength = [None, Some(0.0), Some(0.5)].map(|strength| {
        let start = |pipeline| start(pipeline).with_strengths(strength.map(|strength| [strength].into()));
        let whole_logits = logits(&start(&whole), &text);
        assert_eq!(logits(&start(&halves), &text), whole_logits, "{strength:?}");
        whole_logits
    });
    assert!(
        by_strength[0] != by_strength[1]
            && by_strength[1] != by_strength[2]
            && by_strength[0] != by_strength[2]
    );
    assert_eq!(by_strength[1], logits(&start(&cut(&gguf, &[LayerRange::whole(2)])), &text));
}

/// DeepStack adds image features behind the first two layers, so both must be in the first
/// part.
#[test]
fn image_rows_enter_the_first_part() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../vision/tests/models/qwen3vl");
    let gguf = Arc::new(Gguf::open(folder.join("text.gguf")).unwrap());
    let (n_layers, n_embd) = (3, Config::from_gguf(&gguf).unwrap().n_embd);
    let rows = |seed: u64| {
        let mut rows = vec![0.0; 6 * n_embd];
        Random::new(seed).fill_gaussian(&mut rows, 0.5);
        rows
    };
    let shown = |pipeline: &Arc<LayerPipeline>| {
        let given = EmbeddingInput { rows: (0..3).map(rows).collect(), columns: Some(3) };
        let shown = pipeline.properties().soft_tokens.add(given, None).unwrap();
        let text: Vec<u32> = (1..9).chain(shown.tokens()).chain(30..40).collect();
        (shown, text)
    };
    let whole = cut(&gguf, &[LayerRange::whole(n_layers)]);
    let (_kept, text) = shown(&whole);
    let expected = logits(&start(&whole), &text);
    let parts = cut(&gguf, &LayerRange::split(n_layers, 2));
    let (_kept, text) = shown(&parts);
    assert_eq!(logits(&start(&parts), &text), expected);
    let parts = cut(&gguf, &LayerRange::split(n_layers, 1));
    let (_kept, text) = shown(&parts);
    let sequence = start(&parts);
    let batch = [sequence.step_row(text.len(), LogitsFor::Last)];
    let error = parts.step(&batch, Entry::Tokens(&text), None, None).err().unwrap().to_string();
    assert!(error.contains("fewer than 2 layers on the first device"), "{error}");
}

#[test]
fn a_model_split_anywhere_gives_the_same_bits() {
    let gguf = Arc::new(Gguf::from_bytes(POCKET).unwrap());
    let n_layers = Config::from_gguf(&gguf).unwrap().layers.len();
    let whole = cut(&gguf, &[LayerRange::whole(n_layers)]);
    let text = text(60);
    let expected = start(&whole);
    let after_prompt = logits(&expected, &text[..50]);
    let after_token = logits(&expected, &text[50..51]);
    let leaves = left(&expected.fork(), &text[51..]);
    for n in 1..n_layers {
        let pipeline = cut(&gguf, &LayerRange::split(n_layers, n));
        let sequence = start(&pipeline);
        assert_eq!(logits(&sequence, &text[..50]), after_prompt, "cut before layer {n}");
        let fork = sequence.fork();
        assert_eq!(logits(&sequence, &text[50..51]), after_token);
        // A token outside the vocabulary leaves nothing in the caches.
        let bad = [sequence.step_row(1, LogitsFor::Last)];
        assert!(pipeline.step(&bad, Entry::Tokens(&[u32::MAX]), None, None).is_err());
        assert_eq!(sequence.len(), 51);
        assert_eq!(logits(&fork, &text[50..51]), after_token, "a fork");
        assert_eq!(left(&fork.fork(), &text[51..]), leaves);
        assert_eq!(fork.n_bytes(), expected.n_bytes());
        for layer in [0, n_layers - 1] {
            let rows = |pipeline: &LayerPipeline, of: &Sequence| {
                pipeline.kv_rows(of.id(), layer, 0, Side::K).unwrap()
            };
            assert_eq!(rows(&pipeline, &fork), rows(&whole, &expected));
        }
    }
}

#[test]
fn sequences_of_a_split_model_batch_and_share_prefixes() {
    let gguf = Arc::new(Gguf::from_bytes(POCKET).unwrap());
    let n_layers = Config::from_gguf(&gguf).unwrap().layers.len();
    let pipeline = cut(&gguf, &LayerRange::split(n_layers, 2));
    let text = text(600);
    let [a, b, alone] = [(); 3].map(|()| start(&pipeline));
    logits(&a, &text[..500]);
    let batch = [a.step_row(50, LogitsFor::None), b.step_row(7, LogitsFor::Last)];
    let entered = [&text[500..550], &text[..7]].concat();
    let together = pipeline.step(&batch, Entry::Tokens(&entered), None, None).unwrap().unwrap();
    let mut got = vec![f32::NAN; pipeline.properties().n_vocab];
    together.read(0, &mut got).unwrap();
    let want = logits(&alone, &text[..7]);
    assert!(got.iter().map(|logit| logit.to_bits()).eq(want));

    let root = BlockKey::root(&[b"test"]);
    a.caches(|cache| cache.set_prefix_root(root));
    a.caches(|cache| cache.register_prefix(&text[..550]));
    let c = start(&pipeline);
    c.caches(|cache| cache.set_prefix_root(root));
    assert_eq!(c.attach_prefix(&text, usize::MAX - 1), 512);
    assert_eq!(a.truncate(512), 512);
    assert_eq!(logits(&c, &text[512..540]), logits(&a, &text[512..540]));
}

#[test]
fn a_split_model_restores_its_own_page_images() {
    let gguf = Arc::new(Gguf::from_bytes(POCKET).unwrap());
    let n_layers = Config::from_gguf(&gguf).unwrap().layers.len();
    let halves = cut(&gguf, &LayerRange::split(n_layers, 1));
    // With the second plan, the first part codes nothing.
    for policies in ["none", "boundary:1"] {
        let sequence = start_with(&halves, &policies.parse().unwrap());
        logits(&sequence, &text(300));
        let images_of = images(&sequence);
        let state = sequence.state();
        let restore = |next: &mut dyn FnMut(usize) -> Result<Vec<u8>, Error>| {
            let plan = sequence.plan().clone();
            Sequence::restore(Arc::clone(&halves) as _, plan, 400, state, next)
        };
        let restored = restore(&mut |index| Ok(images_of[index].clone())).unwrap();
        assert_eq!(images(&restored), images_of, "{policies}");
        assert_eq!(logits(&restored, &[7]), logits(&sequence, &[7]), "{policies}");
        drop(restored);

        // After a failure in the last part, the first part holds nothing.
        let bytes = halves.pool_bytes();
        let last = images_of.len() - 1;
        let broken = restore(&mut |index| Ok(if index == last { vec![] } else { images_of[index].clone() }));
        assert!(broken.is_err(), "{policies}");
        assert_eq!(halves.pool_bytes(), bytes, "{policies}");
    }
}

#[test]
fn parts_own_every_tensor_between_them() {
    let gguf = Gguf::from_bytes(POCKET).unwrap();
    let n_layers = Config::from_gguf(&gguf).unwrap().layers.len();
    let whole = LayerRange::whole(n_layers).n_bytes(&gguf);
    assert_eq!(whole, gguf.tensors().iter().map(|info| gguf.data(info).len()).sum::<usize>());
    // The embedding is also the output matrix, so both ends have it.
    let embedding = gguf.tensor("token_embd.weight").unwrap().bytes.len();
    for n in 1..n_layers {
        let halves = LayerRange::split(n_layers, n).map(|part| part.n_bytes(&gguf));
        assert_eq!(halves[0] + halves[1], whole + embedding, "cut before layer {n}");
    }
}
