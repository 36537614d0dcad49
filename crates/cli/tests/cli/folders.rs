//! Tests of Hugging Face folders: `kvant convert`, and every command that takes a model.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use kvant::gguf::Strings;
use kvant::{DType, Gguf, Model};
use kvant_quantize::quantize;
use serde_json::{Map, Value, json};

#[cfg(unix)]
use crate::serve::Server;

fn kvant(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_kvant")).args(args).stdin(Stdio::null()).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn scratch(test: &str) -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("folders").join(test);
    let _ = fs::remove_dir_all(&dir);
    fs::create_dir_all(&dir).unwrap();
    dir
}

/// Returns the `transformers` name of a tensor of the bundled model.
fn theirs(name: &str) -> String {
    let modules = [
        ("attn_norm", "input_layernorm"),
        ("attn_q_norm", "self_attn.q_norm"),
        ("attn_k_norm", "self_attn.k_norm"),
        ("attn_q", "self_attn.q_proj"),
        ("attn_k", "self_attn.k_proj"),
        ("attn_v", "self_attn.v_proj"),
        ("attn_output", "self_attn.o_proj"),
        ("ffn_norm", "post_attention_layernorm"),
        ("ffn_gate", "mlp.gate_proj"),
        ("ffn_up", "mlp.up_proj"),
        ("ffn_down", "mlp.down_proj"),
    ];
    match name {
        "token_embd.weight" => "model.embed_tokens.weight".to_owned(),
        "output_norm.weight" => "model.norm.weight".to_owned(),
        _ => {
            let mut parts = name.split('.').skip(1);
            let (layer, module) = (parts.next().unwrap(), parts.next().unwrap());
            let module = modules.iter().find(|(ours, _)| *ours == module).unwrap().1;
            format!("model.layers.{layer}.{module}.weight")
        }
    }
}

/// Writes the bundled model as a Hugging Face folder, in f32.
pub fn write_bundled(dir: &Path) {
    fs::create_dir_all(dir).unwrap();
    let plain = dir.join("f32.gguf");
    quantize(&Model::bundled_file().unwrap(), &plain, DType::F32, &mut |_| ()).unwrap();
    let gguf = Gguf::open(&plain).unwrap();
    let (mut header, mut data) = (Map::new(), Vec::new());
    for info in gguf.tensors() {
        let begin = data.len();
        data.extend_from_slice(&gguf.data(info));
        let shape: Vec<usize> = info.shape.iter().rev().copied().collect();
        let record = json!({"dtype": "F32", "shape": shape, "data_offsets": [begin, data.len()]});
        header.insert(theirs(&info.name), record);
    }
    let header = Value::Object(header).to_string();
    let file = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data].concat();
    fs::write(dir.join("model.safetensors"), file).unwrap();
    write_json(dir, &gguf);
    fs::remove_file(plain).unwrap();
}

fn write_json(dir: &Path, gguf: &Gguf) {
    let write = |name: &str, value: Value| fs::write(dir.join(name), value.to_string()).unwrap();
    let meta = gguf.meta();
    let number = |key: &str| meta.get::<u32>(&format!("qwen3.{key}")).unwrap();
    write(
        "config.json",
        json!({
            "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "tie_word_embeddings": true,
            "num_hidden_layers": number("block_count"), "hidden_size": number("embedding_length"),
            "intermediate_size": number("feed_forward_length"), "num_attention_heads": number("attention.head_count"),
            "num_key_value_heads": number("attention.head_count_kv"), "head_dim": number("attention.key_length"),
            "max_position_embeddings": number("context_length"), "rms_norm_eps": 1e-6, "rope_theta": 100000.0,
            "vocab_size": 4096,
        }),
    );
    let strings = |key: &str| -> Vec<String> { meta.get::<Strings>(key).unwrap().map(text).collect() };
    let tokens = strings("tokenizer.ggml.tokens");
    let kinds: Vec<i32> = meta.get("tokenizer.ggml.token_type").unwrap();
    let is_normal = |id: &usize| kinds[*id] == 1;
    let all = 0..tokens.len();
    let vocab: Map<String, Value> =
        all.clone().filter(is_normal).map(|id| (tokens[id].clone(), id.into())).collect();
    let added: Vec<Value> = all
        .filter(|id| !is_normal(id))
        .map(|id| json!({"id": id, "content": tokens[id], "special": true, "normalized": false}))
        .collect();
    let merges: Vec<Value> = strings("tokenizer.ggml.merges")
        .iter()
        .map(|merge| merge.split_once(' ').map(|(left, right)| json!([left, right])).unwrap())
        .collect();
    write(
        "tokenizer.json",
        json!({
            "version": "1.0", "added_tokens": added, "normalizer": null,
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
            "post_processor": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": false, "use_regex": true},
            "decoder": {"type": "ByteLevel"},
            "model": {"type": "BPE", "unk_token": null, "byte_fallback": false, "ignore_merges": false, "vocab": vocab, "merges": merges},
        }),
    );
    let template: &str = meta.get("tokenizer.chat_template").unwrap();
    fs::write(dir.join("chat_template.jinja"), template).unwrap();
    write(
        "tokenizer_config.json",
        json!({"bos_token": "<|endoftext|>", "eos_token": {"content": "<|im_end|>"}, "pad_token": "<|endoftext|>"}),
    );
    write("generation_config.json", json!({"eos_token_id": [2, 0]}));
}

const QUESTION: [&str; 4] = ["What is the capital of France?", "--temp", "0", "--quiet"];

fn answer(model: &[&str]) -> String {
    let output = kvant(&[&["run"], model, &QUESTION[..]].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stdout)
}

#[test]
fn a_folder_and_its_conversion_give_the_same_answer() {
    let dir = scratch("convert");
    let (folder, out) = (dir.join("pocket"), dir.join("pocket-q8_0.gguf"));
    write_bundled(&folder);
    let (folder, out) = (folder.to_str().unwrap(), out.to_str().unwrap());
    let output = kvant(&["convert", folder, out, "q8_0"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let lines = text(&output.stderr);
    assert!(lines.contains(&format!("{folder}: ")) && lines.contains(&format!(" -> {out}: ")), "{lines}");
    assert!(lines.contains(" s\nq8_0: 36 matrices"), "{lines}");
    let bundled = answer(&["-m", "bundled"]);
    assert!(bundled.contains("Paris"), "{bundled}");
    assert_eq!(answer(&["-m", out]), bundled);
    assert_eq!(answer(&[folder, "--weights", "q8_0"]), bundled);
    assert_eq!(answer(&["-m", folder]), bundled);
    let output = kvant(&["inspect", folder, "--json"]);
    assert_eq!(
        serde_json::from_slice::<Value>(&output.stdout).unwrap()["metadata"]["general.architecture"],
        "qwen3"
    );
    // Without a type argument.
    assert!(kvant(&["convert", folder, out, "--quiet"]).status.success());
    let gguf = Gguf::open(out).unwrap();
    assert_eq!(gguf.tensor("token_embd.weight").unwrap().info.dtype, DType::F32);
    let keys = ["tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.chat_template"];
    let bundled = Model::bundled_file().unwrap();
    for key in keys {
        assert_eq!(gguf.meta().value(key), bundled.meta().value(key), "{key}");
    }
    for (key, id) in [("bos", 0_u32), ("eos", 2), ("eot", 0), ("padding", 0)] {
        assert_eq!(gguf.meta().get::<u32>(&format!("tokenizer.ggml.{key}_token_id")).unwrap(), id, "{key}");
    }
    let tokens = |gguf: &Gguf| {
        gguf.meta().get::<Strings>("tokenizer.ggml.tokens").unwrap().map(text).collect::<Vec<_>>()
    };
    assert_eq!(tokens(&gguf), tokens(&bundled));
}

/// The text after a dot in a folder's name is no file extension.
#[test]
fn the_plan_of_a_folder_is_beside_it_with_its_name() {
    let dir = scratch("plan");
    let folder = dir.join("Pocket-1.5");
    write_bundled(&folder);
    let plan = dir.join("Pocket-1.5.kvplan");
    let made = kvant(&["plan", folder.to_str().unwrap(), "--budget", "3.5", "-c", "128", "--json"]);
    assert!(made.status.success(), "{}", text(&made.stderr));
    assert_eq!(serde_json::from_slice::<Value>(&made.stdout).unwrap()["path"], plan.to_str().unwrap());
    // Each name of the folder, absolute and relative.
    for (place, name) in [(&dir, "Pocket-1.5/"), (&folder, ".")] {
        let command = ["run", "-m", name, "-p", "hi", "-n", "1"];
        let output = Command::new(env!("CARGO_BIN_EXE_kvant")).args(command).current_dir(place).output();
        let lines = text(&output.unwrap().stderr);
        assert!(lines.contains("KV mixed/mixed (auto, Pocket-1.5.kvplan)"), "{name}: {lines}");
    }
    assert!(text(&kvant(&["inspect", folder.to_str().unwrap()]).stdout).contains("bits per value"));
}

#[test]
fn unset_sampling_options_follow_the_model() {
    const QUESTION: &str = "What is the capital of France?";
    let dir = scratch("recommended");
    let (folder, out) = (dir.join("pocket"), dir.join("pocket.gguf"));
    write_bundled(&folder);
    let generation = json!({
        "do_sample": true, "eos_token_id": [2, 0, 1], "temperature": 0.5, "top_k": 1, "top_p": 0.75, "repetition_penalty": 1.5,
    });
    fs::write(folder.join("generation_config.json"), generation.to_string()).unwrap();
    let (folder, out) = (folder.to_str().unwrap(), out.to_str().unwrap());
    assert!(kvant(&["convert", folder, out, "--quiet"]).status.success());
    let notes_of = |args: &[&str]| {
        let output = kvant(&[&["run", "-p", QUESTION, "-n", "3"], args].concat());
        assert!(output.status.success(), "{}", text(&output.stderr));
        text(&output.stderr)
    };
    for model in [folder, out] {
        let all = "| the model's temp 0.5, top-k 1, top-p 0.75, repeat-penalty 1.5";
        let lines = notes_of(&["-m", model]);
        assert!(lines.contains(all), "{lines}");
        #[cfg(unix)]
        {
            let server = Server::start(&["-m", model]);
            assert!(server.banner.contains(all), "{}", server.banner);
            // As a run with --temp 0: the model's penalties do not apply.
            let body = json!({ "messages": [{ "role": "user", "content": QUESTION }], "temperature": 0, "max_tokens": 32 });
            let answer = server.request(&body.to_string());
            let ran = kvant(&["run", "-m", model, "-p", QUESTION, "-n", "32", "--temp", "0", "--json"]);
            let ran: Value = serde_json::from_slice(&ran.stdout).unwrap();
            let expected = json!({ "content": ran["text"].as_str().unwrap().trim() }).to_string();
            assert!(answer.contains(expected.trim_matches(['{', '}'])), "{answer} {expected}");
        }
        let lines = notes_of(&["-m", model, "--temp", "0.9", "--repeat-penalty", "1"]);
        assert!(lines.contains("| the model's top-k 1, top-p 0.75") && !lines.contains("penalty"), "{lines}");
        // Greedy sampling ignores the recommendation.
        let lines = notes_of(&["-m", model, "--temp", "0"]);
        assert!(!lines.contains("the model's") && !lines.contains("seed"), "{lines}");
        let output = kvant(&["run", "-m", model, "-p", "x", "-n", "1", "--json", "--min-p", "0.25"]);
        let object: Value = serde_json::from_slice(&output.stdout).unwrap();
        let want = json!({
            "temperature": 0.5, "top_k": 1, "top_p": 0.75, "min_p": 0.25, "repeat_penalty": 1.5, "repeat_last_n": 64,
        });
        assert_eq!(object["sampler"], want);
    }
    let lines = notes_of(&["-m", "bundled"]);
    assert!(!lines.contains("the model's") && lines.contains("seed"), "{lines}");
    let gguf = Gguf::open(out).unwrap();
    assert_eq!(gguf.meta().get::<u32>("tokenizer.ggml.eom_token_id").unwrap(), 1);
    assert_eq!(gguf.meta().get::<i32>("general.sampling.top_k").unwrap(), 1);
    // `do_sample: false` selects greedy sampling.
    fs::write(Path::new(folder).join("generation_config.json"), r#"{"do_sample": false, "top_k": 9}"#)
        .unwrap();
    assert!(!notes_of(&["-m", folder]).contains("the model's"));
    fs::write(Path::new(folder).join("generation_config.json"), r#"{"temperature": -1}"#).unwrap();
    let output = kvant(&["run", folder, "hello"]);
    assert_eq!(output.status.code(), Some(1));
    let want =
        "the model's recommended sampling settings: temperature should be a number from 0 up, but is -1";
    assert!(text(&output.stderr).contains(want), "{}", text(&output.stderr));
}

#[test]
fn invalid_folders_are_rejected_in_one_line_and_write_no_file() {
    let dir = scratch("refused");
    let (folder, out) = (dir.join("pocket"), dir.join("out.gguf"));
    let refused = |change: &dyn Fn(), words: &[&str]| {
        write_bundled(&folder);
        change();
        let names = [folder.to_str().unwrap(), out.to_str().unwrap()];
        for args in [&["convert", names[0], names[1]][..], &["run", "-m", names[0], "-p", "x"]] {
            let output = kvant(args);
            let line = text(&output.stderr);
            assert_eq!(output.status.code(), Some(1), "{args:?}: {line}");
            assert!(line.starts_with("error: ") && line.trim_end().lines().count() == 1, "{line}");
            assert!(words.iter().all(|word| line.contains(word)), "{words:?} in {line}");
            assert!(!out.exists());
        }
        fs::remove_dir_all(&folder).unwrap();
    };
    let edit = |name: &str, change: &dyn Fn(&mut Value)| {
        let path = folder.join(name);
        let mut value: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        change(&mut value);
        fs::write(path, value.to_string()).unwrap();
    };
    let remove = |name: &str| fs::remove_file(folder.join(name)).unwrap();
    refused(&|| remove("config.json"), &["pocket: ", "no config.json"]);
    refused(&|| remove("model.safetensors"), &["pocket: ", "no model.safetensors"]);
    refused(
        &|| fs::rename(folder.join("model.safetensors"), folder.join("pytorch_model.bin")).unwrap(),
        &["pytorch_model.bin, which is not read"],
    );
    refused(&|| fs::write(folder.join("config.json"), "{\"a\":").unwrap(), &["config.json: not sound JSON"]);
    refused(
        &|| {
            let places = json!({"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}});
            fs::write(folder.join("model.safetensors.index.json"), places.to_string()).unwrap();
        },
        &["model-00002-of-00002.safetensors: ", "No such file"],
    );
    refused(
        &|| {
            let places = json!({"weight_map": {"model.norm.weight": "../model.safetensors"}});
            fs::write(folder.join("model.safetensors.index.json"), places.to_string()).unwrap();
        },
        &["'model.norm.weight': expected the name of a file"],
    );
    refused(
        &|| edit("tokenizer.json", &|json| json["model"]["type"] = "Unigram".into()),
        &["'type': expected BPE, got Unigram"],
    );
    refused(
        &|| edit("tokenizer.json", &|json| json["pre_tokenizer"]["type"] = "Whitespace".into()),
        &["tokenizer.json: an unknown pre-tokenizer", "Whitespace"],
    );
    refused(
        &|| edit("tokenizer.json", &|json| json["normalizer"] = json!({"type": "Nmt"})),
        &["the normalizer {\"type\":\"Nmt\"}"],
    );
    refused(
        &|| edit("tokenizer.json", &|json| json["model"]["merges"][3] = json!(["a"])),
        &["'merges': expected pairs"],
    );
    refused(
        &|| edit("tokenizer.json", &|json| json["model"]["vocab"]["a"] = 4096.into()),
        &["'a': expected a number below the 4096"],
    );
    refused(
        &|| edit("config.json", &|json| json["quantization_config"] = json!({"quant_method": "aqlm"})),
        &["quantized as aqlm, which is not supported"],
    );
    refused(
        &|| {
            let mut bytes = fs::read(folder.join("model.safetensors")).unwrap();
            bytes[..8].copy_from_slice(&100_000_000_u64.to_le_bytes());
            fs::write(folder.join("model.safetensors"), bytes).unwrap();
        },
        &["claims a header of 100000000 bytes"],
    );
    let absent = kvant(&["convert", "nowhere", out.to_str().unwrap()]);
    assert!(text(&absent.stderr).starts_with("error: nowhere: No such file"), "{}", text(&absent.stderr));
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/assets/pocket-q8_0.gguf");
    let output = kvant(&["convert", file.to_str().unwrap(), out.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("expected a folder (kvant quantize takes GGUF files)"));
}
