//! Files with invalid numbers or missing tensors: in every family a one-line error that names the
//! fault, never a crash.

use std::path::{Path, PathBuf};

use kvant::gguf::{GgufError, GgufWriter, TensorSink, Value};
use kvant::{DeviceChoice, Gguf, KvOptions, Model, OpenOptions, SessionOptions};

/// Returns the tiny models of all families.
fn fixtures() -> Vec<PathBuf> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures");
    let files = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<_> = files.filter(|path| path.extension().is_some_and(|ext| ext == "gguf")).collect();
    files.sort();
    assert!(files.len() >= 32, "only {} fixtures", files.len());
    files
}

pub fn named(name: &str) -> Gguf {
    let all = fixtures();
    let path = all.iter().find(|path| path.file_stem().unwrap() == name);
    Gguf::open(path.unwrap_or_else(|| panic!("no {name}"))).unwrap()
}

/// Rewrites the file with changed keys, and each tensor under the names that `names` returns.
pub fn rewritten<'a>(
    gguf: &'a Gguf,
    set: impl FnOnce(&mut GgufWriter),
    names: impl Fn(&'a str) -> Vec<&'a str>,
) -> Gguf {
    let mut writer = GgufWriter::with_meta(gguf.meta()).unwrap();
    set(&mut writer);
    let named =
        || gguf.tensors().iter().flat_map(|info| names(&info.name).into_iter().map(move |name| (name, info)));
    named().for_each(|(name, info)| writer.add_tensor(name, &info.shape, info.dtype).unwrap());
    let mut bytes = Vec::new();
    let fill =
        |sink: &mut TensorSink<'_>| named().try_for_each(|(name, info)| sink.bytes(name, &gguf.data(info)));
    writer.write_to::<GgufError>(&mut bytes, fill).unwrap();
    Gguf::from_bytes(bytes).unwrap()
}

pub fn with(gguf: &Gguf, key: &str, value: u32) -> Gguf {
    rewritten(gguf, |writer| writer.set(key, value).unwrap(), |name| vec![name])
}

pub fn without(gguf: &Gguf, tensor: &str) -> Gguf {
    rewritten(gguf, |_| (), |name| if name == tensor { vec![] } else { vec![name] })
}

fn open(gguf: Gguf) -> Result<Model, String> {
    let options = OpenOptions { device: DeviceChoice::Cpu.into(), n_threads: Some(1), ..Default::default() };
    Model::from_gguf(gguf, options).map_err(|error| error.to_string())
}

pub fn is_a_line(error: &str) -> bool {
    !error.is_empty() && error.lines().count() == 1 && error.len() < 400
}

/// Returns whether a model may lack the tensor: without it, it is a different model, or another
/// tensor takes its role.
fn is_optional(model: &Path, name: &str) -> bool {
    let attention = ["attn_q", "attn_k", "attn_v", "attn_output", "norm", "output"];
    let ends = [&attention[..], &["exp_probs_b", "ffn_gate_inp", "ffn_gate", "ffn_up", "ffn_down"]].concat();
    let is_bias = |end: &&str| name.ends_with(&format!("{end}.bias"));
    // The only layer whose value projection is optional.
    let only = [(SHARED, "blk.2.attn_v.weight"), (EXPERTS, "blk.1.attn_v.weight")];
    let only = only.iter().any(|of| model.file_stem().is_some_and(|stem| stem == of.0) && name == of.1);
    let whole = ["output.weight", "rope_freqs.weight"].contains(&name);
    // Of the first layer of RWKV-7, whose values are those that others mix with their own.
    let unused = ["v0", "v1", "v2"].iter().any(|of| name == format!("blk.0.time_mix_{of}.weight"));
    let optional = ["layer_output_scale.weight", "ffn_routed_norm.weight"];
    only || unused || whole || optional.iter().any(|end| name.ends_with(end)) || ends.iter().any(is_bias)
}

#[test]
fn a_missing_tensor_of_any_family_is_reported_by_name() {
    for path in fixtures() {
        let (gguf, model) = (Gguf::open(&path).unwrap(), path.display());
        let names = gguf.tensors().iter().map(|info| &info.name);
        for name in names.filter(|name| !is_optional(&path, name)) {
            let error = open(without(&gguf, name)).err().unwrap_or_else(|| panic!("{model} without {name}"));
            // Where one tensor holds several, the error names the first of them.
            let first = name.replace("attn_qkv", "attn_q").replace("attn_kv_b", "attn_k_b");
            let first = first.replace("ffn_up", "ffn_gate").replace("gate_up_exps", "gate_exps");
            let names_it = error.contains(name.as_str()) || error.contains(&first);
            assert!(names_it && is_a_line(&error), "{model} without {name}: {error}");
        }
    }
}

/// One model of each family, with every integer of its metadata set to invalid values.
#[test]
fn numbers_that_make_no_sense_are_refused_or_harmless() {
    let mut seen = Vec::new();
    for path in fixtures() {
        let gguf = Gguf::open(&path).unwrap();
        let family: String = gguf.meta().get::<&str>("general.architecture").unwrap().to_owned();
        if seen.contains(&family) {
            continue;
        }
        let keys = gguf.meta().iter().filter(|(key, _)| key.starts_with(&format!("{family}.")));
        let numbers = keys.filter_map(|(key, value)| match value {
            Value::U32(n) => Some((key, n)),
            _ => None,
        });
        for (key, n) in numbers {
            for value in [0, 1, n / 2, n.saturating_sub(1), n + 1, 2 * n + 1, u32::MAX] {
                let what = || format!("{} with {key} = {value}", path.display());
                match open(with(&gguf, key, value)) {
                    Err(error) => assert!(is_a_line(&error), "{}: {error}", what()),
                    Ok(model) => {
                        let kv = KvOptions::symmetric("q8_0".parse().unwrap());
                        let session = model.session(SessionOptions { n_ctx: Some(40), kv });
                        let Ok(mut session) = session else { continue };
                        let fed = session.feed(&[1, 2, 3], &mut |_| true);
                        let logits = fed.and_then(|_| session.logits().map(<[f32]>::to_vec));
                        if let Err(error) = logits {
                            assert!(is_a_line(&error.to_string()), "{}: {error}", what());
                        }
                    }
                }
            }
        }
        seen.push(family);
    }
    assert!(seen.len() >= 20, "only {seen:?}");
}

/// Gemma 4 models: one whose values are its keys, one with shared keys and values and per-layer
/// embeddings, one with experts.
const KEYS: &str = "gemma4-h64-h128-g4-window20-keys";
const SHARED: &str = "gemma4-h64-h96-g2-window24-shared-given";
const EXPERTS: &str = "gemma4-h64-g2-window20-experts";

#[test]
fn inconsistent_gemma_4_layers_are_refused_with_one_line() {
    for (name, key, value, want) in [
        (KEYS, "attention.sliding_window", 0, "sliding_window: expected a positive number, got 0"),
        (
            KEYS,
            "attention.key_length_swa",
            63,
            "key_length_swa: expected an even head size from 2 to 1024, got 63",
        ),
        (KEYS, "attention.key_length", 0, "key_length: expected a positive number, got 0"),
        (
            KEYS,
            "attention.key_length",
            2048,
            "key_length: expected an even head size from 2 to 1024, got 2048",
        ),
        (
            KEYS,
            "attention.value_length",
            64,
            "value_length: expected the 128 of a key, as values are key projections, got 64",
        ),
        (KEYS, "attention.value_length_swa", 32, "blk.0.attn_v.weight"),
        (KEYS, "attention.head_count", 3, "head_count: expected a multiple of the 2 KV heads, got 3"),
        (
            KEYS,
            "rope.dimension_count_swa",
            66,
            "dimension_count_swa: expected an even number up to 64, got 66",
        ),
        (KEYS, "rope.dimension_count", 64, "rope_freqs.weight"),
        (KEYS, "embedding_length_per_layer_input", 8, "per_layer_token_embd.weight"),
        (KEYS, "expert_count", 4, "\"gemma4.expert_used_count\""),
        (
            SHARED,
            "attention.shared_kv_layers",
            5,
            "shared_kv_layers: expected fewer than the 5 layers, got 5",
        ),
        (
            SHARED,
            "attention.shared_kv_layers",
            u32::MAX,
            "shared_kv_layers: expected fewer than the 5 layers",
        ),
        (
            SHARED,
            "attention.shared_kv_layers",
            3,
            "shared_kv_layers: expected a layer without a window before the last ones, for layer 2 to share with, got 3",
        ),
        (SHARED, "attention.shared_kv_layers", 0, "blk.3.attn_k.weight"),
        (SHARED, "embedding_length_per_layer_input", 0, "not supported yet: tensor 'blk.0.inp_gate.weight'"),
        (SHARED, "embedding_length_per_layer_input", 25, "per_layer_token_embd.weight"),
    ] {
        let key = format!("gemma4.{key}");
        let error = open(with(&named(name), &key, value)).err();
        let error = error.unwrap_or_else(|| panic!("{key} {value}: taken"));
        assert!(error.contains(want) && is_a_line(&error), "{key}: {error}");
    }
    // A sliding-window layer must have values of its own.
    let error = open(without(&named(KEYS), "blk.2.attn_v.weight")).unwrap_err();
    assert!(error.contains("\"blk.2.attn_v.weight\": is missing"), "{error}");
    // Where one global layer has a value projection, all have.
    let gguf = named(KEYS);
    let names =
        |name| if name == "blk.0.attn_v.weight" { vec![name, "blk.1.attn_v.weight"] } else { vec![name] };
    let error = open(rewritten(&gguf, |_| (), names)).unwrap_err();
    assert!(error.contains("\"blk.3.attn_v.weight\": is missing"), "{error}");
}

#[test]
fn lists_of_layers_that_do_not_fit_are_refused_in_a_line() {
    let list = |key: &str, values: &[u32]| {
        let key = format!("gemma4.{key}");
        let set = |writer: &mut GgufWriter| writer.set_array(&key, values.iter().copied()).unwrap();
        open(rewritten(&named(KEYS), set, |name| vec![name])).map(|_| ())
    };
    let heads = "attention.head_count_kv";
    list(heads, &[2, 1, 2, 1]).unwrap();
    for (key, values, want) in [
        (heads, &[2, 1, 2][..], "head_count_kv: expected 4 layers, got 3"),
        (heads, &[2, 1, 0, 1], "head_count_kv: expected KV heads in every layer, got 0"),
        (heads, &[2, 3, 2, 1], "head_count: expected a multiple of the 3 KV heads, got 4"),
        (heads, &[2, 1, 4, 1], "blk.2.attn_k.weight"),
        ("feed_forward_length", &[48, 48], "feed_forward_length: expected 4 layers, got 2"),
        (
            "feed_forward_length",
            &[48, 0, 48, 48],
            "feed_forward_length: expected a positive number for each layer, got 0",
        ),
        ("feed_forward_length", &[48, 48, 50, 48], "blk.2.ffn_gate.weight"),
        ("attention.sliding_window_pattern", &[1, 0, 1, 0], "gemma4.attention.sliding_window_pattern"),
    ] {
        let error = list(key, values).err().unwrap_or_else(|| panic!("{key} {values:?}: taken"));
        assert!(error.contains(want) && is_a_line(&error), "{key}: {error}");
    }
}
