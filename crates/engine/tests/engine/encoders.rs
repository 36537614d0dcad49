//! Text encoders (`tools/reference/encoders.py`): tiny random ones, whose vectors and scores are
//! those of sentence-transformers and `transformers`, and real ones where they are present.

mod converted;
mod unsound;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use kvant::{
    DType, EmbedOptions, Error, Gguf, KvOptions, Model, ModelError, OpenOptions, Requirements,
    SessionOptions, open_file,
};
use kvant_gguf::{GgufError, GgufWriter, Value as GgufValue};
use kvant_quantize::quantize;
use serde_json::{Value, json};

const EMBEDDERS: [&str; 13] = [
    "bert",
    "bert-cls",
    "distilbert",
    "eurobert",
    "gemma-embedding",
    "jina-bert-v2",
    "jina-bert-v3",
    "modern-bert",
    "mpnet",
    "nomic-bert",
    NOMIC_MOE,
    NEO_BERT,
    "xlm-roberta",
];
/// Nomic Embed v2, whose experts `transformers` lacks (`tools/reference/nomic_experts.py`): a file.
const NOMIC_MOE: &str = "nomicmoe";
/// A file of llama.cpp's converter (`tools/reference/neo_bert.py`).
const NEO_BERT: &str = "neobert";
const RANKERS: [&str; 5] =
    ["bert-ranker", "distilbert-ranker", "modern-bert-ranker", "roberta-ranker", "xlm-roberta-ranker"];

/// Vectors have length 1, and the reference computes in f32 as well: its sums of some hundred
/// products in each of a dozen layers differ by several units of 6e-8 each.
const MAX_ERROR: f32 = 1e-5;

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/encoders").join(name)
}

/// Returns the folder of a model, or its file.
fn source(name: &str) -> PathBuf {
    let file = folder(name).join("model.gguf");
    if file.is_file() { file } else { folder(name) }
}

fn golden(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

fn options() -> OpenOptions<'static> {
    OpenOptions { n_threads: Some(2), ..Default::default() }
}

fn strings(values: &Value) -> Vec<&str> {
    values.as_array().unwrap().iter().map(|text| text.as_str().unwrap()).collect()
}

fn floats(values: &Value) -> Vec<f32> {
    values.as_array().unwrap().iter().map(|value| value.as_f64().unwrap() as f32).collect()
}

/// Returns the largest difference of the vectors of a model from the golden ones; NaN if any is.
fn max_error(model: &Model, golden: &Value) -> f32 {
    let vectors = model.embed(&strings(&golden["texts"]), &EmbedOptions::default()).unwrap();
    let want = golden["vectors"].as_array().unwrap();
    assert_eq!(vectors.len(), want.len());
    let pairs = vectors.iter().zip(want).flat_map(|(got, want)| {
        let want = floats(want);
        assert_eq!(got.len(), want.len());
        got.clone().into_iter().zip(want)
    });
    let worse = |max: f32, (got, want): (f32, f32)| {
        let off = (got - want).abs();
        if off <= max { max } else { off }
    };
    pairs.fold(0.0, worse)
}

fn check_tokens(model: &Model, golden: &Value) {
    for (text, want) in strings(&golden["texts"]).into_iter().zip(golden["tokens"].as_array().unwrap()) {
        assert_eq!(json!(model.embedding_tokens(text).unwrap()), *want, "{text:?}");
    }
}

#[test]
fn vectors_equal_those_of_sentence_transformers() {
    for name in EMBEDDERS {
        let (model, golden) =
            (Model::open_with(source(name), options()).unwrap(), golden(&folder(name).join("golden.json")));
        check_tokens(&model, &golden);
        let error = max_error(&model, &golden);
        assert!(error <= MAX_ERROR, "{name}: {error}");
    }
}

#[test]
fn vectors_of_real_models_equal_the_reference() {
    for name in ["minilm", "mpnet"] {
        let folder =
            PathBuf::from(std::env::var_os("KVANT_MODELS").unwrap_or("/tmp/models".into())).join(name);
        let path = folder.join("kvant-golden.json");
        if !path.is_file() {
            eprintln!("skipped: no {} (tools/reference/encoders.py FOLDER)", path.display());
            continue;
        }
        let (model, golden) = (Model::open_with(&folder, options()).unwrap(), golden(&path));
        check_tokens(&model, &golden);
        let error = max_error(&model, &golden);
        assert!(error <= MAX_ERROR, "{name}: {error}");
        // The error of one of 384 values or more is smaller than in the tiny models.
        let converted = OpenOptions { weights: Some(DType::Q8_0), ..options() };
        let error = max_error(&Model::open_with(&folder, converted).unwrap(), &golden);
        assert!(error <= 0.02, "{name} as q8_0: {error}");
    }
}

#[test]
fn vectors_are_invariant_to_batch_and_threads() {
    for name in EMBEDDERS {
        let texts = golden(&folder(name).join("golden.json"));
        let texts = strings(&texts["texts"]);
        let together = Model::open_with(source(name), options())
            .unwrap()
            .embed(&texts, &EmbedOptions::default())
            .unwrap();
        let alone = Model::open_with(source(name), OpenOptions { n_threads: Some(1), ..options() }).unwrap();
        for (text, want) in texts.into_iter().zip(together) {
            assert_eq!(alone.embed(&[text], &EmbedOptions::default()).unwrap(), [want], "{name}: {text:?}");
        }
    }
}

#[test]
fn scores_of_pairs_equal_those_of_transformers() {
    RANKERS.into_iter().for_each(scores_equal_those_of_transformers);
}

fn scores_equal_those_of_transformers(name: &str) {
    let (model, golden) =
        (Model::open_with(source(name), options()).unwrap(), golden(&folder(name).join("golden.json")));
    let scores = floats(&golden["scores"]);
    let [min, max] = [f32::min, f32::max].map(|of| scores.iter().copied().reduce(of).unwrap());
    assert!(max - min > 0.3, "{scores:?}");
    for (pair, want) in golden["pairs"].as_array().unwrap().iter().zip(scores) {
        let pair = strings(pair);
        let got = model.rerank(pair[0], &pair[1..], &KvOptions::default()).unwrap();
        let want = 1.0 / (1.0 + (-want).exp());
        assert!((got[0] - want).abs() <= MAX_ERROR, "{name}: {pair:?}: {got:?}, {want}");
    }
    let error = model.embed(&["x"], &EmbedOptions::default()).unwrap_err().to_string();
    assert!(error.contains("rank: this model scores texts"), "{error}");
}

/// q8_0 has steps of 1/127 of the largest of 32 weights, an error of 1/254 of it at most and of
/// 1/440 in the mean square; inputs are rounded alike. Of the sums, about as large as one product,
/// that is below 1%, in each of six products of two layers: 3% of a vector of length 1. An
/// expert of Nomic's that a token selects instead of another has nearly its weight and an unrelated
/// output: it may change a tenth. Attention of the tiny NeoBERT is so sharp that roundings of its
/// scores change which tokens it reads: the same roundings in torch change 0.037.
#[test]
fn converted_files_have_the_vectors_of_their_folders() {
    for name in EMBEDDERS {
        let golden = golden(&folder(name).join("golden.json"));
        let path = std::env::temp_dir().join(format!("kvant-{name}-{}.gguf", std::process::id()));
        let own = open_file(source(name)).unwrap();
        let of_q8 = if [NOMIC_MOE, NEO_BERT].contains(&name) { 0.1 } else { 0.03 };
        for (dtype, bound) in [(DType::F32, MAX_ERROR), (DType::Q8_0, of_q8)] {
            quantize(&own, &path, dtype, &mut |_| ()).unwrap();
            let model = Model::open_with(&path, options()).unwrap();
            let error = max_error(&model, &golden);
            assert!(error <= bound, "{name} {dtype}: {error}");
            let converted = OpenOptions { weights: Some(dtype), ..options() };
            let error = max_error(&Model::open_with(source(name), converted).unwrap(), &golden);
            assert!(error <= bound, "{name} as {dtype}: {error}");
        }
        fs::remove_file(&path).unwrap();
    }
}

fn refusal<T>(result: Result<T, Error>) -> String {
    match result {
        Err(error @ Error::Model(ModelError::TextEncoder { .. })) => error.to_string(),
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("not refused"),
    }
}

#[test]
fn encoders_have_no_sessions_and_say_so_in_one_line() {
    const LINE: &str = "a text encoder ('bert'), which embeds or ranks texts and generates none";
    let model = Model::open_with(folder("bert"), options()).unwrap();
    assert!(model.is_encoder());
    assert_eq!(refusal(model.session(SessionOptions::default())), LINE);
    assert_eq!(refusal(model.check_generates()), LINE);
    let needs = OpenOptions { needs: Requirements::ChatTemplate, ..options() };
    assert_eq!(refusal(Model::open_with(folder("bert"), needs)), LINE);
    let config = kvant::Config::from_gguf(&open_file(folder("bert")).unwrap());
    assert_eq!(config.unwrap_err().to_string(), LINE);
}

#[test]
fn options_of_models_that_generate_are_refused() {
    let error = |options| Model::open_with(folder("bert"), options).unwrap_err().to_string();
    let device = "wgpu".parse::<kvant::DeviceChoice>().unwrap().into();
    assert_eq!(
        error(OpenOptions { device, ..options() }),
        "device: expected cpu or cuda:N for a text encoder: adapters lack bidirectional attention, got wgpu:0"
    );
    let error_of_layers = error(OpenOptions { n_gpu_layers: Some(2), ..options() });
    assert!(error_of_layers.starts_with("n_gpu_layers: expected 0"), "{error_of_layers}");
    let draft = Some(std::sync::Arc::new(Model::bundled_file().unwrap()));
    assert_eq!(error(OpenOptions { draft, ..options() }), "draft: expected none for a text encoder, got one");
    assert_eq!(
        error(OpenOptions { maps_experts: true, ..options() }),
        "maps_experts: expected none for a text encoder, got one"
    );
}

/// The file of an encoder with other values for some keys, without the tensor that `drops` names.
fn changed(name: &str, changes: &[(&str, GgufValue<'_>)], drops: &str) -> Gguf {
    let own = open_file(source(name)).unwrap();
    let mut writer = GgufWriter::with_meta(own.meta()).unwrap();
    for (key, value) in changes {
        writer.set(key, *value).unwrap();
    }
    written(writer, &own, drops)
}

/// The file of these keys with the tensors of another, except one.
fn written(mut writer: GgufWriter, own: &Gguf, drops: &str) -> Gguf {
    let kept = || own.tensors().iter().filter(|info| info.name != drops);
    for info in kept() {
        writer.add_tensor(&info.name, &info.shape, info.dtype).unwrap();
    }
    let mut bytes = Vec::new();
    let copied = writer.write_to::<GgufError>(&mut bytes, |data| {
        kept().try_for_each(|info| data.bytes(&info.name, &own.data(info)))
    });
    copied.unwrap();
    Gguf::from_bytes(bytes).unwrap()
}

/// The vectors of fixtures depend on what tells their families apart.
#[test]
fn features_of_fixtures_matter() {
    for (name, key, value) in [
        ("modern-bert", "modern-bert.attention.sliding_window", GgufValue::U32(0)),
        ("modern-bert", "modern-bert.attention.sliding_window", 6_u32.into()),
        ("modern-bert", "modern-bert.attention.sliding_window_pattern", 2_u32.into()),
        ("modern-bert", "modern-bert.rope.freq_base_swa", 160_000_f32.into()),
        ("modern-bert", "modern-bert.hidden_activation", "silu".into()),
        ("gemma-embedding", "gemma-embedding.attention.sliding_window", 0_u32.into()),
        ("gemma-embedding", "gemma-embedding.attention.sliding_window_pattern", 3_u32.into()),
        ("gemma-embedding", "gemma-embedding.rope.freq_base", 10_000_f32.into()),
        ("gemma-embedding", "gemma-embedding.rope.freq_base_swa", 1e6_f32.into()),
        ("eurobert", "eurobert.rope.freq_base", 20_000_f32.into()),
        ("jina-bert-v3", "jina-bert-v3.rope.freq_base", 10_000_f32.into()),
        (NOMIC_MOE, "nomic-bert-moe.expert_used_count", 1_u32.into()),
        (NOMIC_MOE, "nomic-bert-moe.expert_weights_norm", true.into()),
    ] {
        let model = Model::from_gguf(changed(name, &[(key, value)], ""), options()).unwrap();
        let error = max_error(&model, &golden(&folder(name).join("golden.json")));
        assert!(error > 100.0 * MAX_ERROR, "{key}: {error}");
    }
    for (name, key, value) in [
        ("modern-bert-ranker", "modern-bert.classifier.pooling_type", GgufValue::U32(2)),
        ("modern-bert-ranker", "kvant.encoder.head_activation", "tanh".into()),
        ("distilbert-ranker", "kvant.encoder.head_activation", "tanh".into()),
    ] {
        let [own, other] = [vec![], vec![(key, value)]].map(|changes| {
            let model = Model::from_gguf(changed(name, &changes, ""), options()).unwrap();
            let score = model.rerank("cat", &["The lazy dog."], &KvOptions::default()).unwrap()[0];
            // The logit: the score itself is near 1.
            (score / (1.0 - score)).ln()
        });
        assert!((own - other).abs() > 0.1, "{key}: {own}, {other}");
    }
}

/// A file that llama.cpp's converter writes without the products behind pooling.
#[test]
fn products_behind_pooling_are_applied_in_order() {
    let name = "gemma-embedding";
    let embed = |file| Model::from_gguf(file, options()).unwrap().embed(&["cat"], &EmbedOptions::default());
    let without = embed(changed(name, &[], "dense_3.weight")).unwrap();
    assert_eq!(without[0].len(), 48);
    let error = Model::from_gguf(changed(name, &[], "dense_2.weight"), options()).unwrap_err().to_string();
    assert!(error.contains("tensor 'dense_3.weight': expected shape [32, 32]"), "{error}");
}

/// llama.cpp's converter writes the marks as CLS and SEP alone, and none of Kvant's keys.
#[test]
fn files_of_llama_cpp_have_the_same_vectors() {
    for name in
        ["bert", "bert-cls", "gemma-embedding", "jina-bert-v2", "jina-bert-v3", "modern-bert", "nomic-bert"]
    {
        let own = open_file(source(name)).unwrap();
        let mut writer = GgufWriter::new();
        // Of other vocabularies it writes all marks, and the merges' pre-tokenizer.
        let is_bert = own.meta().get::<&str>("tokenizer.ggml.model").unwrap() == "bert";
        let is_ours = |key: &str| {
            let marks = ["bos_token_id", "eos_token_id", "add_bos_token", "add_eos_token"];
            let is_mark = marks.iter().any(|mark| key == format!("tokenizer.ggml.{mark}"));
            key.starts_with("kvant.") || is_bert && is_mark
        };
        for (key, value) in own.meta().iter() {
            if !is_ours(key) {
                writer.set(key, value).unwrap();
            }
        }
        if name == "modern-bert" {
            writer.set("tokenizer.ggml.pre", "modern-bert").unwrap();
        }
        let texts = ["A cat sleeps on the mat.", "", "Zürich, naïve cafe\u{301}"];
        let vectors = |file| {
            let model = Model::from_gguf(file, options()).unwrap();
            model.embed(&texts, &EmbedOptions::default()).unwrap()
        };
        let file = written(writer, &own, "");
        assert!(file.meta().value("kvant.encoder.max_tokens").is_none());
        assert_eq!(vectors(file), vectors(own), "{name}");
    }
}

#[test]
fn unsupported_pooling_is_an_error_of_embedding() {
    for (pooling, complaint) in [(4_u32, "rank: this model scores texts"), (9, "got 9")] {
        let file = changed("bert", &[("bert.pooling_type", pooling.into())], "");
        let model = Model::from_gguf(file, options()).unwrap();
        let error = model.embed(&["x"], &EmbedOptions::default()).unwrap_err().to_string();
        assert!(error.contains(complaint), "{error}");
        assert!(model.scorer().is_err());
    }
}

/// A copy of a folder with a changed JSON file.
struct ChangedFolder(PathBuf);

impl ChangedFolder {
    fn new(name: &str, file: &str, change: impl FnOnce(&mut Value)) -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("kvant-encoder-{}-{number}", std::process::id()));
        copy_folder(&folder(name), &path);
        let mut value = golden(&path.join(file));
        change(&mut value);
        fs::write(path.join(file), value.to_string()).unwrap();
        Self(path)
    }
}

fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let to = to.join(entry.file_name());
        match entry.file_type().unwrap().is_dir() {
            true => copy_folder(&entry.path(), &to),
            false => _ = fs::copy(entry.path(), to).unwrap(),
        }
    }
}

impl Drop for ChangedFolder {
    fn drop(&mut self) {
        _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn texts_end_at_the_longest_of_the_folder() {
    let limits = "sentence_bert_config.json";
    for (limit, expected) in [(json!(10), 10), (json!(100_000), 160), (json!(null), 160)] {
        let changed = ChangedFolder::new("bert", limits, |all| all["max_seq_length"] = limit);
        let model = Model::open_with(&changed.0, options()).unwrap();
        let tokens = model.embedding_tokens(&"cat ".repeat(500)).unwrap();
        assert_eq!((tokens.len(), model.config().n_ctx_train), (expected, expected));
        assert_eq!(tokens.last(), model.embedding_tokens("").unwrap().last());
    }
}

/// The names of settings in the configurations that the authors of ModernBERT and EmbeddingGemma
/// publish.
#[test]
fn published_configurations_give_the_same_vectors() {
    for (name, periods, bases, drops) in [
        (
            "modern-bert",
            json!({ "global_attn_every_n_layers": 3 }),
            json!({ "global_rope_theta": 160_000.0, "local_rope_theta": 10_000.0, "rope_scaling": null }),
            &["layer_types", "rope_parameters"][..],
        ),
        (
            "gemma-embedding",
            json!({}),
            json!({ "rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": null }),
            &["rope_parameters"],
        ),
    ] {
        let changed = ChangedFolder::new(name, "config.json", |config| {
            let config = config.as_object_mut().unwrap();
            config.retain(|key, _| !drops.contains(&&**key));
            for more in [periods, bases] {
                config.extend(more.as_object().unwrap().clone());
            }
        });
        let model = Model::open_with(&changed.0, options()).unwrap();
        let error = max_error(&model, &golden(&folder(name).join("golden.json")));
        assert!(error <= MAX_ERROR, "{name}: {error}");
    }
}

/// The names of settings in the configurations that Nomic publishes.
#[test]
fn older_names_of_settings_give_the_same_vectors() {
    let older = json!({
        "architectures": ["NomicBertModel"], "n_embd": 32, "n_layer": 2, "n_head": 2, "n_inner": 64,
        "n_positions": 8192, "max_trained_positions": 160, "layer_norm_epsilon": 1e-12,
        "activation_function": "swiglu", "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": false, "rotary_scaling_factor": null, "prenorm": false, "causal": false,
        "parallel_block": false, "use_rms_norm": false, "type_vocab_size": 2, "scale_attn_weights": true,
    });
    let changed = ChangedFolder::new("nomic-bert", "config.json", |config| *config = older);
    let model = Model::open_with(&changed.0, options()).unwrap();
    let error = max_error(&model, &golden(&folder("nomic-bert").join("golden.json")));
    assert!(error <= MAX_ERROR, "{error}");
}
