//! Real files.

use std::path::{Path, PathBuf};

use kvant_codec::DType;
use kvant_gguf::{Gguf, Strings, oracle};

/// Returns a file that we cannot distribute; returns `None` and prints a line where this machine
/// lacks it.
fn asset(path: &str) -> Option<PathBuf> {
    let path = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/assets")).join(path);
    if !path.exists() {
        eprintln!("skipped: {} is not there", path.display());
        return None;
    }
    Some(path)
}

#[test]
fn every_vocabulary_can_be_read_and_rewritten() {
    let Some(folder) = asset("vocab") else { return };
    let mut count = 0;
    for file in std::fs::read_dir(folder).unwrap() {
        let path = file.unwrap().path();
        if path.extension().is_none_or(|e| e != "gguf") {
            continue;
        }
        let gguf = Gguf::open(&path).unwrap();
        let meta = gguf.meta();
        let tokens = meta.get::<Strings>("tokenizer.ggml.tokens").unwrap().count();
        assert!(tokens > 1000, "{}", path.display());
        assert_eq!(meta.get::<Vec<i32>>("tokenizer.ggml.token_type").unwrap().len(), tokens);
        assert!(!meta.get::<&str>("tokenizer.ggml.model").unwrap().is_empty());
        assert!(gguf.tensors().is_empty());
        oracle::check(&std::fs::read(&path).unwrap());
        count += 1;
    }
    assert!(count >= 15, "only {count} vocabularies");
}

#[test]
fn bundled_model_can_be_read_and_rewritten() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/assets/pocket-q8_0.gguf");
    let gguf = Gguf::open(&path).unwrap();
    let meta = gguf.meta();
    assert_eq!(meta.get::<&str>("general.architecture").unwrap(), "qwen3");
    assert_eq!(meta.get::<usize>("qwen3.block_count").unwrap(), 5);
    assert_eq!(meta.get::<f32>("qwen3.rope.freq_base").unwrap(), 100_000.0);
    assert_eq!(meta.get::<Strings>("tokenizer.ggml.tokens").unwrap().count(), 4096);
    let embedding = gguf.tensor("token_embd.weight").unwrap();
    assert_eq!((&embedding.info.shape[..], embedding.info.dtype), (&[256, 4096][..], DType::Q8_0));
    assert_eq!(embedding.bytes.len(), 34 * 256 / 32 * 4096);
    assert_eq!(gguf.tensor("output_norm.weight").unwrap().info.shape, [256]);
    assert_eq!(gguf.tensors().len(), 57);
    oracle::check(&std::fs::read(&path).unwrap());
}
