//! Folders of Qwen4-Exp, whose table of n-grams is in many tensors.

use std::collections::BTreeSet;

use kvant::{DType, Gguf, Model, open_file};
use kvant_quantize::quantize;
use serde_json::{Value, json};

use super::saved::{Saved, Scratch, fixture, saved, write_folder};
use super::{assert_same_tensors, changed, logits, options};

const NAME: &str = "qwen4exp-h64-g2-ngrams";
const TABLE: &str = "per_layer_token_embd.weight";
const PART: &str = "model.layers.2.ple.ple_embedding.ngram_embedding.shard_";

/// Divides the table into parts of these rows.
fn divide(config: &mut Value, tensors: &mut Vec<Saved>, rows: &[usize]) {
    config["split_ngram_parts"] = json!(rows.len());
    let at = tensors.iter().position(|tensor| tensor.name.starts_with(PART)).unwrap();
    let whole = tensors.remove(at);
    let dim = whole.shape[1].as_u64().unwrap() as usize;
    let row_bytes = whole.bytes.len() / whole.shape[0].as_u64().unwrap() as usize;
    let mut left = &whole.bytes[..];
    for (index, n) in rows.iter().enumerate() {
        let (bytes, others) = left.split_at(n * row_bytes);
        left = others;
        let name = format!("{PART}{index}.weight");
        tensors.push(Saved { name, dtype: whole.dtype, shape: json!([n, dim]), bytes: bytes.to_vec() });
    }
    assert!(left.is_empty());
}

#[test]
fn a_table_in_parts_equals_it_in_one() {
    let want = fixture(NAME);
    let (mut config, mut tensors) = saved(NAME);
    // The eleventh is second by name.
    let rows = [[44; 11].as_slice(), &[28]].concat();
    divide(&mut config, &mut tensors, &rows);
    let scratch = Scratch::new("parts");
    write_folder(&scratch.0, &config, &tensors);
    let got = open_file(&scratch.0).unwrap();
    assert_same_tensors(NAME, &got, &want);
    let [table, of_file] = [&got, &want].map(|gguf| gguf.find_info(TABLE).unwrap());
    assert_eq!((got.n_parts(table), want.n_parts(of_file)), (12, 1));
    let parts: Vec<u8> = (0..12).flat_map(|index| got.part(table, index).to_vec()).collect();
    assert!(parts == *want.part(of_file, 0));
    // Bytes of the mapped file, which no other memory holds.
    assert!((0..12).all(|index| matches!(got.part(table, index), std::borrow::Cow::Borrowed(_))));
    let [got, want] = [got, want].map(|gguf| Model::from_gguf(gguf, options(None)).unwrap());
    assert_eq!(logits(&got), logits(&want));
    for dtype in [DType::Q8_0, DType::F16] {
        let files = [(&got, "parts.gguf"), (&want, "whole.gguf")].map(|(model, name)| {
            let path = scratch.0.join(name);
            quantize(model.gguf(), &path, dtype, &mut |_| ()).unwrap();
            Gguf::open(path).unwrap()
        });
        for info in files[1].tensors() {
            let found = files[0].find_info(&info.name).unwrap();
            assert_eq!(found.dtype, info.dtype, "{}", info.name);
            assert!(
                files[0].data(found) == files[1].data(info) || info.name.ends_with("ssm_a"),
                "{}",
                info.name
            );
        }
    }
}

#[test]
fn the_text_model_of_qwen_4_vision_has_the_keys_of_the_file() {
    let want = fixture(NAME);
    let (mut text, mut tensors) = saved(NAME);
    // As published.
    text["layer_types"] = json!(["linear_attention", "full_attention", "linear_attention", "full_attention"]);
    text["rope_parameters"]["mrope_section"] = json!([3, 3, 2]);
    text.as_object_mut().unwrap().remove("architectures").unwrap();
    for tensor in &mut tensors {
        tensor.name = tensor.name.replacen("model.", "model.language_model.", 1);
    }
    for name in ["model.visual.patch_embed.proj.weight", "mtp.fc.weight"] {
        tensors.push(Saved { name: name.to_owned(), dtype: "F32", shape: json!([1]), bytes: vec![0; 4] });
    }
    let config = json!({
        "architectures": ["Qwen4ExpForConditionalGeneration"], "text_config": text, "image_token_id": 61
    });
    let scratch = Scratch::new("seeing");
    write_folder(&scratch.0, &config, &tensors);
    let got = open_file(&scratch.0).unwrap();
    assert_same_tensors(NAME, &got, &want);
    // Where layers alternate, a period describes them.
    let elsewhere = BTreeSet::from(["qwen4exp.vocab_size", "qwen4exp.attention.recurrent_layers"]);
    let keys = want.meta().iter().filter(|(key, _)| key.starts_with("qwen4exp.") && !elsewhere.contains(key));
    for (key, value) in keys {
        assert_eq!(got.meta().value(key).as_ref(), Some(&value), "{key}");
    }
    assert_eq!(got.meta().get::<u32>("qwen4exp.full_attention_interval").unwrap(), 2);
    assert_eq!(got.meta().get::<u32>("qwen4exp.ple.image_token_id").unwrap(), 61);
    let [got, want] = [got, want].map(|gguf| logits(&Model::from_gguf(gguf, options(None)).unwrap()));
    assert_eq!(got, want);
}

#[test]
fn faults_of_qwen_4_are_reported_by_key_or_name() {
    for (key, value, want) in [
        ("output_gate_type", json!("silu"), "'output_gate_type': expected sigmoid, got silu"),
        ("output_gate_type", Value::Null, "'output_gate_type': expected sigmoid, got nothing"),
        ("indexer_kv_heads", json!(2), "'indexer_kv_heads': expected 1, as GGUF readers assume"),
        ("indexer_n_heads", Value::Null, "'indexer_n_heads': expected a number, got nothing"),
        ("indexer_head_dim", json!(48), "expected heads of 48 rows, the last of which is the key"),
        ("attention_bias", json!(true), "'attention_bias': expected false"),
        ("ple_layer_ids", json!([1, 3]), "'ple_layer_ids': expected one layer, as GGUF readers assume"),
        ("ple_layer_ids", json!([0]), "'ple_layer_ids': expected one layer"),
        ("ple_layer_ids", json!([1]), "'layers.0.ple.ple_embedding.layer_multipliers' is missing"),
        ("ple_layer_ids", json!([]), "layer_multipliers' is unknown in the family Qwen4ExpForCausalLM"),
        ("eos_token_id", json!([]), "'eos_token_id': expected a token, got nothing"),
        ("split_ngram_parts", json!(3), "'per_layer_token_embd.weight' is missing: part 1 of 3"),
        ("split_ngram_parts", json!(0), "is unknown in the family"),
    ] {
        let error = changed(NAME, |config, _| config[key] = value);
        assert!(error.contains(want), "{key}: {error}");
    }
    let of_tensor = |end: &str, change: &dyn Fn(&mut Saved)| {
        let change = |_: &mut Value, tensors: &mut Vec<Saved>| {
            change(tensors.iter_mut().find(|tensor| tensor.name.ends_with(end)).unwrap());
        };
        changed(NAME, change)
    };
    let error = of_tensor("layer_multipliers", &|tensor| tensor.dtype = "F64");
    assert!(error.contains("layer_multipliers"), "{error}");
    let error = of_tensor("layer_multipliers", &|tensor| tensor.name += "_of_others");
    assert!(error.contains("'layers.2.ple.ple_embedding.layer_multipliers' is missing"), "{error}");
    let error = of_tensor("shard_0.weight", &|tensor| tensor.shape = json!([512, 4, 4]));
    assert!(error.contains("has the shape [512, 4, 4], expected a matrix"), "{error}");
    let error = of_tensor("layers.3.self_attn.indexer.index_qk_proj.weight", &|tensor| tensor.name += "s");
    assert!(error.contains("is unknown in the family Qwen4ExpForCausalLM"), "{error}");
    let error = changed(NAME, |config, tensors| {
        divide(config, tensors, &[256, 256]);
        let last = tensors.last_mut().unwrap();
        last.shape = json!([512, 8]);
    });
    assert!(
        error.contains("shard_1.weight' has the shape [512, 8], expected rows of [16] in f16"),
        "{error}"
    );
}
