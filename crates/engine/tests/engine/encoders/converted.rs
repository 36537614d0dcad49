//! Folders are described as llama.cpp's converter writes them
//! (`tools/reference/converted_encoders.py`): hyper-parameters, and tensors to the bit.

use kvant::{Gguf, open_file};
use serde_json::Value;

use super::{folder, golden};

const NAMES: [&str; 5] = ["eurobert", "gemma-embedding", "jina-bert-v2", "modern-bert", "modern-bert-ranker"];

/// Keys that readers of text encoders do not need.
const UNNEEDED: [&str; 3] = ["vocab_size", "rope.scaling.type", "classifier.output_labels"];

#[test]
fn folders_equal_the_files_of_llama_cpp_s_converter() {
    for name in NAMES {
        let (own, theirs) = (open_file(folder(name)).unwrap(), golden(&folder(name).join("llama-cpp.json")));
        for (key, value) in theirs["keys"].as_object().unwrap() {
            check_key(&own, name, key, value);
        }
        let tensors = theirs["tensors"].as_object().unwrap();
        assert_eq!(own.tensors().len(), tensors.len(), "{name}");
        for (tensor, theirs) in tensors {
            let view = own.tensor(tensor).unwrap();
            assert_eq!(serde_json::json!(view.info.shape), theirs["shape"], "{name}: {tensor}");
            assert_eq!(format!("{:016x}", fnv(&view.bytes)), theirs["hash"], "{name}: {tensor}");
        }
    }
}

fn check_key(own: &Gguf, name: &str, key: &str, theirs: &Value) {
    let short = key.split_once('.').unwrap().1;
    let is_head = short == "classifier.pooling_type" && !name.ends_with("-ranker");
    if UNNEEDED.contains(&short) || is_head {
        return;
    }
    // Its name for `norm_eps`, which configurations on the hub have beside `layer_norm_eps`: its
    // reader requires the latter.
    let is_modern = name.starts_with("modern-bert");
    let own_key =
        if is_modern { key.replace("layer_norm_rms_epsilon", "layer_norm_epsilon") } else { key.to_owned() };
    let meta = own.meta();
    let is_equal = match theirs {
        Value::Bool(flag) => meta.get::<bool>(&own_key).unwrap() == *flag,
        Value::String(text) => meta.get::<&str>(&own_key).unwrap() == text,
        Value::Number(n) if n.is_f64() => meta.get::<f32>(&own_key).unwrap() == n.as_f64().unwrap() as f32,
        Value::Number(n) => u64::from(meta.get::<u32>(&own_key).unwrap()) == n.as_u64().unwrap(),
        other => panic!("{key}: {other}"),
    };
    assert!(is_equal, "{name}: {key} is {theirs}");
}

/// FNV-1a of 64 bits.
fn fnv(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}
