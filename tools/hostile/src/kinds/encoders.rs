//! Folders of text encoders: changed configurations, headers, weights and tokenizers.

use std::fs;
use std::io;
use std::path::Path;

use crate::case::{Case, Expect};
use crate::chance::Choices;
use crate::fixtures::Fixtures;
use crate::kinds::folder_files::{header_end, replaced, with_header, with_setting};
use crate::kinds::models::mutated;

/// The files of a folder.
struct EncoderFiles {
    config: &'static str,
    weights: &'static [u8],
    tokenizer: &'static str,
    /// Whether it scores pairs of texts.
    ranks: bool,
}

macro_rules! file {
    ($include:ident, $name:literal, $file:literal) => {
        $include!(concat!("../../../../crates/engine/tests/encoders/", $name, "/", $file))
    };
}

macro_rules! folder {
    ($name:literal, $ranks:literal) => {
        EncoderFiles {
            config: file!(include_str, $name, "config.json"),
            weights: file!(include_bytes, $name, "model.safetensors"),
            tokenizer: file!(include_str, $name, "tokenizer.json"),
            ranks: $ranks,
        }
    };
}

/// One folder of each family.
static FOLDERS: [EncoderFiles; 15] = [
    folder!("bert", false),
    folder!("mpnet", false),
    folder!("nomic-bert", false),
    folder!("bert-ranker", true),
    folder!("distilbert", false),
    folder!("roberta-ranker", true),
    folder!("xlm-roberta", false),
    folder!("xlm-roberta-ranker", true),
    folder!("distilbert-ranker", true),
    folder!("eurobert", false),
    folder!("gemma-embedding", false),
    folder!("jina-bert-v2", false),
    folder!("jina-bert-v3", false),
    folder!("modern-bert", false),
    folder!("modern-bert-ranker", true),
];

/// The configuration and the weights of a product behind pooling.
const DENSE: &str = file!(include_str, "gemma-embedding", "2_Dense/config.json");
static DENSE_WEIGHTS: &[u8] = file!(include_bytes, "gemma-embedding", "2_Dense/model.safetensors");

const MODULES: &str = r#"[{"path": "", "type": "Transformer"}, {"path": "1_Pooling", "type": "Pooling"}]"#;
const WITH_DENSE: &str =
    r#"[{"path": "1_Pooling", "type": "Pooling"}, {"path": "2_Dense", "type": "Dense"}]"#;

/// Values that no setting of an encoder has, and some that it may have.
const VALUES: [&str; 14] = [
    "0",
    "1",
    "2",
    "3",
    "7",
    "64",
    "1000000",
    "4294967295",
    "-1",
    "1e300",
    "null",
    "\"gelu_new\"",
    "[]",
    "true",
];

/// Creates an encoder with a changed file.
pub fn encoder(chance: &mut Choices, _: &Fixtures, folder: &Path) -> io::Result<Case> {
    let of = &FOLDERS[chance.below(FOLDERS.len())];
    let (mut config, mut tokenizer) = (of.config.to_owned(), of.tokenizer.to_owned());
    let mut weights = of.weights.to_vec();
    let (mut modules, mut pooling, mut limits) = (MODULES.to_owned(), mean(), String::from("{}"));
    let (mut dense, mut dense_weights) = (DENSE.to_owned(), DENSE_WEIGHTS.to_vec());
    let head = header_end(&weights);
    let expect = match chance.below(8) {
        0 => {
            weights.truncate(chance.below(weights.len()));
            Expect::Refused
        }
        // Sizes and other settings.
        1 => {
            config = with_value(&config, chance);
            Expect::Either
        }
        // Names and shapes.
        2 => {
            let pairs = [
                ("F32", "I64"),
                ("F32", "F16"),
                ("LayerNorm", "norm"),
                ("embeddings", "embedding"),
                ("layer.1", "layer.9"),
                ("layers.1", "layers.0"),
                ("weight", "gamma"),
                ("[32,", "[16,"),
                (",32]", ",64]"),
                ("[160", "[2"),
            ];
            weights = with_header(chance, &weights, &pairs);
            Expect::Either
        }
        3 => mutated(chance, &mut weights, 8, head),
        4 => {
            let end = weights.len();
            mutated(chance, &mut weights, head, end)
        }
        // Pooling and the longest text.
        5 => {
            let poolings = [
                r#"{"pooling_mode_cls_token": true}"#,
                r#"{"pooling_mode_max_tokens": true}"#,
                r#"{"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": true}"#,
                r#"{"pooling_mode": 3}"#,
                "[",
            ];
            pooling = chance.of(&poolings).to_owned();
            modules = if chance.one_in(3) { modules.replace("Transformer", "Dense") } else { modules };
            limits = format!("{{\"max_seq_length\": {}}}", chance.of(&VALUES));
            Expect::Either
        }
        // A product behind pooling.
        6 => {
            modules = WITH_DENSE.to_owned();
            match chance.below(3) {
                0 => {
                    let pairs = [
                        ("48", "32"),
                        ("48", "0"),
                        ("32", "4294967295"),
                        ("linear.Identity", "activation.Tanh"),
                        ("in_features", "features"),
                        ("{", ""),
                    ];
                    dense = replaced(chance, &dense, &pairs);
                }
                1 => {
                    let pairs = [("linear.weight", "linear.bias"), ("[48,", "[24,"), ("F32", "F16")];
                    dense_weights = with_header(chance, &dense_weights, &pairs);
                }
                _ => {
                    let end = dense_weights.len();
                    mutated(chance, &mut dense_weights, 8, end);
                }
            }
            Expect::Either
        }
        // The vocabulary and its marks.
        _ => {
            let pairs = [
                ("\"[UNK]\"", "\"[unknown]\""),
                ("\"[CLS]\"", "\"[SEP]\""),
                ("\"</s>\"", "\"<s>\""),
                ("WordPiece", "BPE"),
                ("Unigram", "WordPiece"),
                ("Metaspace", "Split"),
                ("\"always\"", "\"first\""),
                ("{2,}", "{3,}"),
                ("AAAA", "AQAA"),
                ("AAQAAA", "/wQAAA"),
                ("gAEA", "/////"),
                ("-8.", "-1e39"),
                ("\"unk_id\": 3", "\"unk_id\": 3000"),
                ("BertNormalizer", "NFC"),
                ("\"##", "\"#"),
                (": 1,", ": 4000000000,"),
                (": 2,", ": 1,"),
                (": 100", ": 0"),
                ("TemplateProcessing", "RobertaProcessing"),
                ("\"byte_fallback\": true", "\"byte_fallback\": false"),
                ("\"<0x", "\"<1x"),
                ("}", ""),
            ];
            tokenizer = replaced(chance, &tokenizer, &pairs);
            Expect::Either
        }
    };
    let texts = ["A cat sleeps.", "", "\u{feff}\u{301}[CLS] <s> ##", "é漢字"];
    let text = match chance.below(4) {
        0 => "x ".repeat(chance.below(2000)),
        _ => chance.of(&texts).to_owned(),
    };
    let case = match chance.below(6) {
        0 => Case::new(folder, ["inspect", ".", "-v"]),
        1 => Case::new(folder, ["quantize", ".", "out.gguf", "q8_0"]).output("out.gguf"),
        2 => Case::new(folder, ["bench", ".", "-p", "1", "-n", "1", "-r", "1", "-t", "1"])
            .expect(Expect::Refused),
        _ if of.ranks => Case::new(folder, ["embed", ".", "-t", "1", "--query", "cat", &text]),
        _ => Case::new(folder, ["embed", ".", "-t", "1", &text]),
    };
    let expect = if case.expect == Expect::Refused { Expect::Refused } else { expect };
    fs::create_dir_all(folder.join("1_Pooling"))?;
    fs::create_dir_all(folder.join("2_Dense"))?;
    case.expect(expect)
        .file("config.json", config.into_bytes())?
        .file("model.safetensors", weights)?
        .file("tokenizer.json", tokenizer.into_bytes())?
        .file("modules.json", modules.into_bytes())?
        .file("1_Pooling/config.json", pooling.into_bytes())?
        .file("2_Dense/config.json", dense.into_bytes())?
        .file("2_Dense/model.safetensors", dense_weights)?
        .file("sentence_bert_config.json", limits.into_bytes())
}

fn mean() -> String {
    r#"{"pooling_mode_mean_tokens": true}"#.to_owned()
}

/// Replaces the value of one setting.
fn with_value(config: &str, chance: &mut Choices) -> String {
    let keys = [
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "max_position_embeddings",
        "layer_norm_eps",
        "relative_attention_num_buckets",
        "rope_theta",
        "hidden_act",
        "hidden_activation",
        "num_key_value_heads",
        "local_attention",
        "sliding_window",
        "layer_types",
        "norm_eps",
        "query_pre_attn_scalar",
        "classifier_pooling",
        "use_bidirectional_attention",
        "vocab_size",
        "head_dim",
        "architectures",
    ];
    let (key, value) = (chance.of(&keys), chance.of(&VALUES));
    with_setting(config, key, || value)
}
