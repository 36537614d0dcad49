//! Folders of embedding models, as sentence-transformers saves them: tensors and pooling.

use std::fs;

use kvant::{EmbedOptions, HfError, Model, Pooling, open_file};
use serde_json::{Value, json};

use super::saved::{Scratch, fixture, saved, write_folder};
use super::{assert_same_tensors, options};

const NAME: &str = "qwen3-h80-g2-linear";

/// A folder as sentence-transformers saves it: without an output matrix, and with a pooling module.
fn folder(modules: &Value, pooling: &Value) -> Scratch {
    let scratch = Scratch::new("embedder");
    let (mut config, mut tensors) = saved(NAME);
    config["tie_word_embeddings"] = true.into();
    for tensor in &mut tensors {
        tensor.name = tensor.name.replacen("model.", "", 1);
    }
    write_folder(&scratch.0, &config, &tensors);
    fs::write(scratch.0.join("modules.json"), modules.to_string()).unwrap();
    fs::create_dir(scratch.0.join("1_Pooling")).unwrap();
    fs::write(scratch.0.join("1_Pooling/config.json"), pooling.to_string()).unwrap();
    scratch
}

fn modules(path: &str) -> Value {
    json!([
        { "idx": 0, "path": "", "type": "sentence_transformers.models.Transformer" },
        { "idx": 1, "path": path, "type": "sentence_transformers.models.Pooling" },
        { "idx": 2, "path": "2_Normalize", "type": "sentence_transformers.models.Normalize" },
    ])
}

#[test]
fn embedding_folders_equal_their_base_and_declare_pooling() {
    for (pooling, expected) in [
        (json!({ "pooling_mode_lasttoken": true, "pooling_mode_mean_tokens": false }), Pooling::Last),
        (json!({ "pooling_mode_lasttoken": false, "pooling_mode_mean_tokens": true }), Pooling::Mean),
        (json!({ "pooling_mode": "mean" }), Pooling::Mean),
        (json!({ "pooling_mode": "lasttoken" }), Pooling::Last),
    ] {
        let scratch = folder(&modules("1_Pooling"), &pooling);
        let gguf = open_file(&scratch.0).unwrap();
        assert_same_tensors(NAME, &gguf, &fixture(NAME));
        assert_eq!(Model::from_gguf(gguf, options(None)).unwrap().pooling().unwrap(), expected, "{pooling}");
    }
    // CLS pooling is unsupported; embedding returns an error, loading does not.
    let scratch = folder(&modules("1_Pooling"), &json!({ "pooling_mode_cls_token": true }));
    let model = Model::open_with(&scratch.0, options(None)).unwrap();
    let error = model.embed(&["x"], &EmbedOptions::default()).unwrap_err().to_string();
    assert!(error.starts_with("pooling: expected mean, last, or cls in a text encoder, got cls"), "{error}");
}

#[test]
fn invalid_pooling_modules_are_errors_and_missing_ones_are_not() {
    let plain = json!({ "pooling_mode": "mean" });
    for (modules, pooling, complaint) in [
        (modules("../1_Pooling"), &plain, "'path': expected a folder in this one"),
        (modules(""), &plain, "'path': expected a folder in this one"),
        (modules("/etc"), &plain, "'path': expected a folder in this one"),
        (json!({}), &plain, "expected a list of objects, got an object"),
        (json!([3]), &plain, "expected a list of objects, got a number"),
        (
            modules("1_Pooling"),
            &json!({ "pooling_mode": "max" }),
            "'pooling_mode': expected mean, cls or lasttoken",
        ),
        (modules("1_Pooling"), &json!({ "pooling_mode_mean_tokens": 1 }), "expected true or false"),
    ] {
        let scratch = folder(&modules, pooling);
        let error = open_file(&scratch.0).err().unwrap();
        assert!(matches!(&error, kvant::Error::Hf(HfError::Value { .. })), "{error}");
        assert!(error.to_string().contains(complaint), "{error}");
    }
    // A folder without the module, and one whose module is missing, declare no pooling.
    for modules in [json!([]), modules("3_Other")] {
        let scratch = folder(&modules, &plain);
        assert_eq!(Model::open_with(&scratch.0, options(None)).unwrap().pooling().unwrap(), Pooling::Last);
    }
}
