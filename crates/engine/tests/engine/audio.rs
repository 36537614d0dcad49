//! Audio models against `transformers`: see `tools/reference/audio.py`.
//!
//! Tolerance: 1e-4 on logits of order 1 to 10, as for text-only models (`golden.rs`).

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kvant::gguf::{GgufError, GgufWriter, TensorSink};
use kvant::{
    BatchItem, DeviceChoice, EncodeOptions, EncodedMedia, Error, Gguf, KvOptions, MediaKind, Message, Model,
    OpenOptions, RenderOptions, Session, SessionOptions,
};
use serde_json::{Value, json};

const TOLERANCE: f32 = 1e-4;

/// Models and samples of their golden clips.
const MODELS: [(&str, &[usize]); 6] = [
    ("voxtral", &[11_701, 23_402]),
    ("qwen2audio", &[5_003, 11_701]),
    ("qwen3asr", &[5_003, 11_701, 152_113]),
    ("gemma3n", &[5_003, 99_001]),
    ("gemma4", &[5_003, 11_701, 99_001]),
    ("gemma4unified", &[5_003, 11_701]),
];

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../audio/tests")
}

/// Returns the first `n` samples of the repeated clip as a WAV file of 16-bit integers at 16 kHz.
fn clip(n: usize) -> Vec<u8> {
    let file = std::fs::read(folder().join("clips/clip.wav")).unwrap();
    let (head, data) = file.split_at(44);
    let mut wav = head.to_vec();
    wav[4..8].copy_from_slice(&(36 + 2 * n as u32).to_le_bytes());
    wav[40..44].copy_from_slice(&(2 * n as u32).to_le_bytes());
    wav.extend(data.iter().cycle().take(2 * n));
    wav
}

fn open_with(text: PathBuf, mmproj: Gguf) -> Model {
    let options = OpenOptions {
        mmproj: Some(Arc::new(mmproj)),
        device: DeviceChoice::Cpu.into(),
        ..Default::default()
    };
    Model::open_with(text, options).unwrap()
}

fn open(name: &str) -> Model {
    let folder = folder().join("models").join(name);
    open_with(folder.join("text.gguf"), kvant::open_file(folder.join("mmproj.gguf")).unwrap())
}

fn session(model: &Model, kv: &str) -> Session {
    let kv = KvOptions::symmetric(kv.parse().unwrap());
    model.session(SessionOptions { n_ctx: Some(256), kv }).unwrap()
}

fn messages() -> [Value; 1] {
    let text_part = |text: &str| json!({ "type": "text", "text": text });
    let content = json!([text_part("Hear "), { "type": "audio" }, text_part("and say what it is.")]);
    [json!({ "role": "user", "content": content })]
}

/// Returns the prompt of the golden files.
fn prompt(model: &Model, clip: &EncodedMedia) -> Vec<u32> {
    let options = RenderOptions { add_generation_prompt: true, ..Default::default() };
    model.media_prompt(&messages(), &options, std::slice::from_ref(clip)).unwrap().1
}

/// The outputs of `transformers`.
struct Golden {
    tokens: Vec<u32>,
    /// The token that stands for rows.
    audio_token: u32,
    /// `[tokens, n_vocab]`
    logits: Vec<f32>,
}

impl Golden {
    fn read(name: &str, n: usize) -> Self {
        let file = std::fs::read(folder().join(format!("models/{name}/{n}.golden"))).unwrap();
        assert_eq!(&file[..4], b"KVPA");
        let words: Vec<u32> =
            file[4..].chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect();
        let [n_tokens, n_vocab] = [words[0] as usize, words[1] as usize];
        let logits = words[words.len() - n_tokens * n_vocab..].iter().map(|&bits| f32::from_bits(bits));
        Self { tokens: words[7..7 + n_tokens].to_vec(), audio_token: words[6], logits: logits.collect() }
    }
}

#[test]
fn audio_prompts_and_logits_are_those_of_transformers() {
    for (name, clips) in MODELS {
        let model = open(name);
        let n_vocab = model.n_vocab();
        assert_eq!([model.supports_audio(), model.supports_images()], [true, false]);
        for &n in clips {
            let prompt = prompt(&model, &model.encode_audio(&clip(n)).unwrap());
            let golden = Golden::read(name, n);
            let as_placeholder =
                |&token: &u32| if token as usize >= n_vocab { golden.audio_token } else { token };
            assert_eq!(prompt.iter().map(as_placeholder).collect::<Vec<_>>(), golden.tokens, "{name}, {n}");
            let mut furthest = 0f32;
            session(&model, "f32")
                .feed_scored(&prompt, 0, &mut |i, got| {
                    let want = &golden.logits[i * n_vocab..][..n_vocab];
                    for off in got.iter().zip(want).map(|(a, b)| (a - b).abs()) {
                        // Written so that NaN fails.
                        assert!(off <= TOLERANCE, "{name}, {n}, token {i}: {off}");
                        furthest = furthest.max(off);
                    }
                })
                .unwrap();
            eprintln!("{name}, {n} samples: logits are off by {furthest} at most");
        }
    }
}

/// In chunks, in a batch, after a rewind into the clip, in a fork: the same bits.
#[test]
fn audio_rows_are_batch_invariant_tokens() {
    for (name, clips) in MODELS {
        let model = open(name);
        let [a, b] = [clips[0], clips[1]].map(|n| prompt(&model, &model.encode_audio(&clip(n)).unwrap()));
        let bits = |session: &mut Session| -> Vec<u32> {
            session.logits().unwrap().iter().map(|logit| logit.to_bits()).collect()
        };
        let alone = |prompt: &[u32]| {
            let mut session = session(&model, "turbo3");
            session.feed(prompt, &mut |_| true).unwrap();
            assert!(session.has_media());
            bits(&mut session)
        };
        let want = [alone(&a), alone(&b)];
        assert_ne!(want[0], want[1]);
        let mut in_chunks = session(&model, "turbo3");
        a.chunks(7).for_each(|chunk| in_chunks.feed(chunk, &mut |_| true).unwrap());
        assert_eq!(bits(&mut in_chunks), want[0], "{name} in chunks");
        let mut forked = in_chunks.fork();
        forked.rewind(20).unwrap();
        forked.feed(&a[20..], &mut |_| true).unwrap();
        assert_eq!(bits(&mut forked), want[0], "{name}, forked and read again");
        let mut together = [session(&model, "turbo3"), session(&model, "turbo3")];
        let [first, second] = &mut together;
        Session::step_batch(&mut [BatchItem::new(first, &a), BatchItem::new(second, &b)]).unwrap();
        assert_eq!(together.each_mut().map(bits), want, "{name} together");
        let error = forked.to_saved().unwrap_err().to_string();
        assert!(error.ends_with("a context with an image or audio cannot be saved yet"), "{error}");
    }
}

#[test]
fn equal_clips_have_equal_tokens() {
    let model = open("voxtral");
    let [a, b] = [11_701, 5_003].map(clip);
    let first = model.encode_audio(&a).unwrap();
    assert_eq!(first.kind(), MediaKind::Audio);
    assert_eq!(first.tokens(), model.encode_audio(&a).unwrap().tokens());
    let rows = |clip: &EncodedMedia| {
        clip.tokens().iter().filter(|&&token| token as usize >= model.n_vocab()).copied().collect::<Vec<_>>()
    };
    assert_eq!(rows(&first).len(), 12);
    for other in [
        model.encode_audio(&b).unwrap(),
        model
            .encode_media(
                MediaKind::Audio,
                &a,
                &EncodeOptions { owner: Some("another"), ..Default::default() },
            )
            .unwrap(),
    ] {
        assert!(rows(&first).iter().all(|row| !rows(&other).contains(row)));
    }
}

/// Returns a file with the keys and tensors of both.
fn joined(a: &Gguf, b: &Gguf) -> Gguf {
    let mut writer = GgufWriter::with_meta(a.meta()).unwrap();
    for (key, value) in b.meta().iter().filter(|(key, _)| key.starts_with("clip.")) {
        writer.set(key, value).unwrap();
    }
    let tensors = || [a, b].into_iter().flat_map(|file| file.tensors().iter().map(move |info| (file, info)));
    tensors().for_each(|(_, info)| writer.add_tensor(&info.name, &info.shape, info.dtype).unwrap());
    let mut bytes = Vec::new();
    let fill = |sink: &mut TensorSink<'_>| {
        tensors().try_for_each(|(file, info)| sink.bytes(&info.name, &file.data(info)))
    };
    writer.write_to::<GgufError>(&mut bytes, fill).unwrap();
    Gguf::from_bytes(bytes).unwrap()
}

/// Files of omni models have two encoders, which name their projectors by modality.
#[test]
fn a_file_may_have_a_vision_and_an_audio_encoder() {
    let vision = folder().join("../../vision/tests");
    let file = |path: PathBuf| kvant::open_file(path).unwrap();
    let [see, hear] =
        [vision.join("models/qwen3vl/mmproj.gguf"), folder().join("models/qwen3asr/mmproj.gguf")].map(file);
    let text = vision.join("models/qwen3vl/text.gguf");
    let model = open_with(text.clone(), joined(&see, &hear));
    assert_eq!([model.supports_audio(), model.supports_images()], [true, true]);
    let image = std::fs::read(vision.join("images/tall.png")).unwrap();
    let media = [model.encode_audio(&clip(5_003)).unwrap(), model.encode_image(&image).unwrap()];
    let message = Message::user("Which?").with_media(media.iter().map(EncodedMedia::kind));
    let prompt = model.chat_prompt_with_media(std::slice::from_ref(&message), &media).unwrap();
    session(&model, "f32").feed(&prompt, &mut |_| true).unwrap();
    // In another order than in the message.
    let [audio, image] = media;
    let error = model.chat_prompt_with_media(&[message], &[image, audio]).unwrap_err().to_string();
    assert_eq!(error, "media: expected audio, image, got image, audio");
    // Of two encoders, one may be unknown: it is named where it is needed.
    let mut unknown = GgufWriter::with_meta(hear.meta()).unwrap();
    unknown.set("clip.audio.projector_type", "glma").unwrap();
    let mut bytes = Vec::new();
    unknown.write_to::<GgufError>(&mut bytes, |_| Ok(())).unwrap();
    let model = open_with(text, joined(&see, &Gguf::from_bytes(bytes).unwrap()));
    assert_eq!([model.supports_audio(), model.supports_images()], [false, true]);
    let error = model.encode_audio(&clip(5_003)).unwrap_err().to_string();
    assert!(error.ends_with("gemma4a, gemma4ua, for audio, got glma"), "{error}");
}

#[test]
fn encoding_is_limited_and_cancelled() {
    for (model, kind, file, n_rows) in [
        (open("voxtral"), MediaKind::Audio, clip(23_402), 24),
        (open("qwen3asr"), MediaKind::Audio, clip(152_113), 124),
    ] {
        let encode = |max_tokens, go_on: &dyn Fn() -> bool| {
            model.encode_media(kind, &file, &EncodeOptions { max_tokens, go_on, ..Default::default() })
        };
        let error = encode(n_rows - 1, &|| panic!("an encoding that does not fit")).unwrap_err();
        assert!(
            matches!(error, Error::PromptTooLong { tokens, n_ctx } if [tokens, n_ctx] == [n_rows, n_rows - 1])
        );
        let calls = Cell::new(0);
        let second = || calls.replace(calls.get() + 1) < 1;
        assert!(matches!(encode(n_rows, &second), Err(Error::Cancelled)));
        assert_eq!(calls.get(), 2);
        encode(n_rows, &|| true).unwrap();
    }
}

#[test]
fn unusable_audio_is_refused_with_a_line() {
    let text_only = Model::bundled(OpenOptions::default()).unwrap();
    let error = text_only.encode_audio(&clip(5_003)).unwrap_err().to_string();
    assert!(error.starts_with("audio: expected a model with an audio encoder"), "{error}");
    let model = open("qwen2audio");
    let error = model.encode_audio(b"no audio").unwrap_err().to_string();
    assert!(error.starts_with("not readable audio"), "{error}");
    let error = model.encode_audio(&clip(16_001)).unwrap_err().to_string();
    assert_eq!(error, "duration of the audio: expected 0.02 to 1 s for this model, got 1.0000625 s");
    let error = model.encode_image(b"").unwrap_err().to_string();
    assert!(error.starts_with("image: expected a model with a vision encoder"), "{error}");
    let error = model.media_prompt(&messages(), &RenderOptions::default(), &[]).unwrap_err().to_string();
    assert_eq!(error, "media: expected audio, got none");
}
