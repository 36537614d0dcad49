//! Vision models against `transformers`: see `tools/reference/images.py`.
//!
//! Tolerance: 1e-4 on logits of order 1 to 10, as for text-only models (`golden.rs`).

use std::path::{Path, PathBuf};
use std::sync::Arc;

use kvant::{
    BatchItem, DeviceChoice, EncodeOptions, EncodedMedia, Error, GenerateOptions, KvOptions, MediaKind,
    Model, OpenOptions, RenderOptions, SamplerParams, Session, SessionOptions,
};
use serde_json::json;

const TOLERANCE: f32 = 1e-4;
const MODELS: [&str; 8] =
    ["smolvlm", "internvl", "pixtral", "mistral3", "lfm2vl", "qwen25vl", "qwen3vl", "paddleocr"];

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../vision/tests")
}

fn image(name: &str) -> Vec<u8> {
    std::fs::read(folder().join(format!("images/{name}.png"))).unwrap()
}

fn open(name: &str) -> Model {
    open_with(name, name).unwrap()
}

/// Opens the text model of a fixture with the vision encoder of another.
fn open_with(name: &str, encoder: &str) -> Result<Model, Error> {
    let models = folder().join("models");
    let mmproj = Some(Arc::new(kvant::open_file(models.join(encoder).join("mmproj.gguf")).unwrap()));
    let options = OpenOptions { mmproj, device: DeviceChoice::Cpu.into(), ..Default::default() };
    Model::open_with(models.join(name).join("text.gguf"), options)
}

fn session(model: &Model, kv: &str) -> Session {
    let kv = KvOptions::symmetric(kv.parse().unwrap());
    model.session(SessionOptions { n_ctx: Some(200), kv }).unwrap()
}

/// Returns the prompt of the golden files.
fn prompt(model: &Model, image: &EncodedMedia) -> Vec<u32> {
    let text_part = |text: &str| json!({ "type": "text", "text": text });
    let content = json!([text_part("See "), { "type": "image" }, text_part("and say what it is.")]);
    let messages = [json!({ "role": "user", "content": content })];
    let options = RenderOptions { add_generation_prompt: true, ..Default::default() };
    model.media_prompt(&messages, &options, std::slice::from_ref(image)).unwrap().1
}

/// Returns the tokens, the token that stands for image rows, and logits `[tokens, n_vocab]`.
fn golden(name: &str, image: &str) -> (Vec<u32>, u32, Vec<f32>) {
    let file = std::fs::read(folder().join(format!("models/{name}/{image}.golden"))).unwrap();
    assert_eq!(&file[..4], b"KVPI");
    let words: Vec<u32> =
        file[4..].chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect();
    let [n_tokens, n_vocab] = [words[0] as usize, words[1] as usize];
    let logits = words[words.len() - n_tokens * n_vocab..].iter().map(|&bits| f32::from_bits(bits));
    (words[6..6 + n_tokens].to_vec(), words[5], logits.collect())
}

#[test]
fn prompts_and_logits_are_those_of_transformers() {
    for name in MODELS {
        let model = open(name);
        let n_vocab = model.n_vocab();
        for of in ["wide", "tall"] {
            let prompt = prompt(&model, &model.encode_image(&image(of)).unwrap());
            let (tokens, placeholder, logits) = golden(name, of);
            let as_placeholder = |&token: &u32| if token as usize >= n_vocab { placeholder } else { token };
            assert_eq!(prompt.iter().map(as_placeholder).collect::<Vec<_>>(), tokens, "{name}, {of}");
            let mut session = session(&model, "f32");
            let mut furthest = 0f32;
            session
                .feed_scored(&prompt, 0, &mut |i, got| {
                    let want = &logits[i * n_vocab..][..n_vocab];
                    let off = got.iter().zip(want).map(|(a, b)| (a - b).abs());
                    // Written so that NaN fails.
                    off.for_each(|off| assert!(off <= TOLERANCE, "{name}, {of}, token {i}: {off}"));
                    furthest = got.iter().zip(want).fold(furthest, |max, (a, b)| max.max((a - b).abs()));
                })
                .unwrap();
            eprintln!("{name}, {of}: logits are off by {furthest} at most");
        }
    }
}

/// In chunks, in a batch, after a rewind into the image, in a fork, behind an attached prefix: the
/// same bits.
#[test]
fn image_rows_are_batch_invariant_tokens() {
    for name in MODELS {
        let model = open(name);
        let [wide, tall] =
            ["wide", "tall"].map(|of| prompt(&model, &model.encode_image(&image(of)).unwrap()));
        let bits = |session: &mut Session| -> Vec<u32> {
            session.logits().unwrap().iter().map(|logit| logit.to_bits()).collect()
        };
        let alone = |prompt: &[u32]| {
            let mut session = session(&model, "turbo3");
            session.feed(prompt, &mut |_| true).unwrap();
            assert!(session.has_media());
            bits(&mut session)
        };
        let want = [alone(&wide), alone(&tall)];
        assert_ne!(want[0], want[1]);
        let mut in_chunks = session(&model, "turbo3");
        wide.chunks(7).for_each(|chunk| in_chunks.feed(chunk, &mut |_| true).unwrap());
        assert_eq!(bits(&mut in_chunks), want[0], "{name} in chunks");
        let mut forked = in_chunks.fork();
        drop(in_chunks);
        forked.rewind(20).unwrap();
        forked.feed(&wide[20..], &mut |_| true).unwrap();
        assert_eq!(bits(&mut forked), want[0], "{name}, forked and read again");
        let mut together = [session(&model, "turbo3"), session(&model, "turbo3")];
        let [a, b] = &mut together;
        Session::step_batch(&mut [BatchItem::new(a, &wide), BatchItem::new(b, &tall)]).unwrap();
        assert_eq!(together.each_mut().map(bits), want, "{name} together");
        let mut error = forked.save(std::env::temp_dir().join("kvant-never-written.ctx")).unwrap_err();
        assert!(
            error.to_string().ends_with("a context with an image or audio cannot be saved yet"),
            "{error}"
        );
        error = forked.to_saved().unwrap_err();
        assert!(matches!(error, Error::ContextFile(_)));
    }
}

#[test]
fn equal_images_have_equal_tokens() {
    let model = open("smolvlm");
    let [wide, tall] = ["wide", "tall"].map(image);
    let first = model.encode_image(&wide).unwrap();
    let other = model.encode_image(&tall).unwrap();
    assert_eq!(first.tokens(), model.encode_image(&wide).unwrap().tokens());
    let rows = |image: &EncodedMedia| {
        image.tokens().iter().filter(|&&token| token as usize >= model.n_vocab()).copied().collect::<Vec<_>>()
    };
    assert!(rows(&first).iter().all(|row| !rows(&other).contains(row)));
    // Another owner's equal image has other ids.
    let options = EncodeOptions { owner: Some("another owner"), ..EncodeOptions::default() };
    let encode = || model.encode_media(MediaKind::Image, &wide, &options).unwrap();
    let theirs = encode();
    assert!(rows(&first).iter().all(|row| !rows(&theirs).contains(row)));
    assert_eq!(theirs, encode());
    // An id of no image is rejected.
    let unknown = rows(&theirs).last().unwrap() + 1;
    let error = session(&model, "f16").feed(&[1, unknown], &mut |_| true).unwrap_err().to_string();
    assert_eq!(error, format!("token {unknown} is not in the vocabulary of {}", model.n_vocab()));
}

/// KV blocks may outlive the rows of their image: such blocks are not attached.
#[test]
fn prefixes_of_freed_images_are_not_attached() {
    let model = open("smolvlm");
    let prompt = prompt(&model, &model.encode_image(&image("tall")).unwrap());
    let long = [&prompt[..50], &[7; 140]].concat();
    let mut first = session(&model, "f32");
    first.feed(&long, &mut |_| true).unwrap();
    let mut second = session(&model, "f32");
    assert_eq!((second.attach_prefix(&long), second.has_media()), (128, true));
    // The prefix before an id without a row.
    let missing = u32::MAX;
    let unread: Vec<u32> =
        long.iter().enumerate().map(|(i, &token)| if i == 150 { missing } else { token }).collect();
    assert_eq!(session(&model, "f32").attach_prefix(&unread), 128);
}

#[test]
fn image_prompts_work_with_speculation_and_penalties() {
    let model = open("smolvlm");
    let prompt = prompt(&model, &model.encode_image(&image("wide")).unwrap());
    let answer = |draft_max| {
        let sampler = SamplerParams { repeat_penalty: 1.1, ..SamplerParams::greedy() };
        let options = GenerateOptions { sampler, max_tokens: Some(24), draft_max, ..Default::default() };
        let mut session = session(&model, "turbo3");
        session.generate(&prompt, options).unwrap().map(|token| token.unwrap().id).collect::<Vec<_>>()
    };
    assert_eq!(answer(Some(0)), answer(Some(8)));
    assert!(answer(None).iter().all(|&token| (token as usize) < model.n_vocab()));
}

#[test]
fn unusable_images_and_encoders_are_errors() {
    let text_only = Model::bundled(OpenOptions::default()).unwrap();
    let error = text_only.encode_image(&image("wide")).unwrap_err().to_string();
    assert!(error.starts_with("image: expected a model with a vision encoder"), "{error}");
    let model = open("internvl");
    let error = model.encode_image(b"no image").unwrap_err().to_string();
    assert!(error.starts_with("not a readable image"), "{error}");
    // The vision encoder of another model.
    let mmproj = kvant::open_file(folder().join("models/smolvlm/mmproj.gguf")).unwrap();
    let options = OpenOptions { mmproj: Some(Arc::new(mmproj)), ..Default::default() };
    let error = Model::bundled(options).unwrap_err().to_string();
    assert!(error.starts_with("mmproj: expected the encoder of this model"), "{error}");
    // As wide, but rows of the other have no positions in a plane.
    for (text, encoder, got) in [
        ("paddleocr", "internvl", "positions in a plane, got one position per row"),
        ("internvl", "paddleocr", "one position per row, got positions in a plane"),
    ] {
        let error = open_with(text, encoder).unwrap_err().to_string();
        assert!(error.ends_with(got), "{error}");
    }
    let options =
        OpenOptions { mmproj: Some(Arc::new(Model::bundled_file().unwrap())), ..Default::default() };
    let error = Model::bundled(options).unwrap_err().to_string();
    assert!(error.starts_with("general.architecture: expected clip"), "{error}");
}
