//! Conversion of tokenizers to GGUF keys.

use std::fs;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvant_gguf::{FromValue, Gguf, GgufError, Strings};
use kvant_text::tokenizer::{Special, Tokenizer};
use serde_json::json;

use super::*;

/// Converts a folder with these files, for an embedding of `n_vocab` rows.
fn keys(files: &[(&str, Value)], n_vocab: usize) -> Result<Gguf, String> {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let next = NEXT.fetch_add(1, Ordering::Relaxed);
    let dir = std::env::temp_dir().join(format!("kvant-hf-tokenizer-{}-{next}", std::process::id()));
    fs::create_dir_all(&dir).unwrap();
    for (name, value) in files {
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let path = dir.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    let mut folder = Folder::new(&dir);
    let config = folder.json("config.json").unwrap().unwrap();
    let mut writer = GgufWriter::new();
    let generation = folder.json("generation_config.json").unwrap();
    let generation = generation.as_ref().map(|generation| generation.object().unwrap());
    let config = config.object().unwrap();
    let settings = Settings { config, generation, keeps_merges: config.value("keeps_merges").is_some() };
    let written = write(&mut writer, &mut folder, settings, n_vocab);
    fs::remove_dir_all(&dir).unwrap();
    written.map_err(|error| error.to_string())?;
    let mut bytes = Vec::new();
    writer.write_to::<GgufError>(&mut bytes, |_| Ok(())).unwrap();
    Ok(Gguf::from_bytes(bytes).unwrap())
}

fn get<'a, T: FromValue<'a>>(gguf: &'a Gguf, key: &str) -> T {
    gguf.meta().get(&format!("tokenizer.{key}")).unwrap()
}

fn texts(gguf: &Gguf, key: &str) -> Vec<String> {
    get::<Strings<'_>>(gguf, key).map(|text| String::from_utf8(text.to_vec()).unwrap()).collect()
}

/// A vocabulary like Llama 2's.
fn marked() -> Value {
    json!({
        "added_tokens": [
            {"id": 0, "content": "<unk>", "special": true},
            {"id": 1, "content": "<s>", "special": true},
            {"id": 7, "content": "<|user|>", "special": false},
            {"id": 8, "content": "▁▁", "special": false},
            {"id": 99, "content": "<image>", "special": true},
        ],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ]},
        "pre_tokenizer": null,
        "post_processor": {"type": "TemplateProcessing", "single": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
        ]},
        "model": {
            "type": "BPE", "byte_fallback": true, "unk_token": "<unk>",
            "vocab": {"<unk>": 0, "<s>": 1, "<0x0A>": 2, "▁": 3, "a": 4, "aa": 5, "▁a": 6},
            "merges": ["▁ a", ["a", "a"]],
        },
    })
}

/// A vocabulary like Llama 3's.
fn bytes() -> Value {
    json!({
        "added_tokens": [{"id": 3, "content": "<s>", "special": true}],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "use_regex": true},
        "model": {"type": "BPE", "vocab": {"Ġ": 0, "a": 1, "Ġa": 2}, "merges": [["Ġ", "a"]]},
    })
}

#[test]
fn marked_tokens_score_by_the_rank_of_their_merge() {
    let gguf =
        keys(&[("config.json", json!({"eos_token_id": [7, 1]})), ("tokenizer.json", marked())], 10).unwrap();
    assert_eq!((get(&gguf, "ggml.model"), get(&gguf, "ggml.pre")), ("llama", "default"));
    let want = ["<unk>", "<s>", "<0x0A>", "▁", "a", "aa", "▁a", "<|user|>", "  ", "[PAD9]"];
    assert_eq!(texts(&gguf, "ggml.tokens"), want);
    let kinds: Vec<i32> = get(&gguf, "ggml.token_type");
    let want = [UNKNOWN, CONTROL, BYTE, NORMAL, NORMAL, NORMAL, NORMAL, CONTROL, USER_DEFINED, UNUSED];
    assert_eq!(kinds, want);
    let scores: Vec<f32> = get(&gguf, "ggml.scores");
    assert_eq!(scores, [-3.0, -3.0, -3.0, -3.0, -3.0, -1.0, 0.0, -3.0, -3.0, -3.0]);
    assert!(get::<bool>(&gguf, "ggml.add_space_prefix"));
    // Only the configuration defines EOS, and only the post-processor BOS.
    assert_eq!((get::<u32>(&gguf, "ggml.bos_token_id"), get::<u32>(&gguf, "ggml.eos_token_id")), (1, 7));
    assert!(get::<bool>(&gguf, "ggml.add_bos_token") && !get::<bool>(&gguf, "ggml.add_eos_token"));
    let named = json!({"bos_token": {"content": "<s>"}, "eos_token": "<s>"});
    let files = [("config.json", json!({})), ("tokenizer.json", marked()), ("tokenizer_config.json", named)];
    let gguf = keys(&files, 10).unwrap();
    assert!(get::<bool>(&gguf, "ggml.add_bos_token") && !get::<bool>(&gguf, "ggml.add_eos_token"));
    assert_eq!((get::<u32>(&gguf, "ggml.bos_token_id"), get::<u32>(&gguf, "ggml.eos_token_id")), (1, 1));
}

/// As in Gemma 4: tool-call tokens are text, and no space is prepended.
#[test]
fn gemma_4_keeps_the_merges_of_marked_tokens() {
    let mut file = marked();
    file["normalizer"] = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
    file["pre_tokenizer"] =
        json!({"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious"});
    let called = json!({"id": 9, "content": "<|tool_call>", "special": true});
    file["added_tokens"].as_array_mut().unwrap().push(called);
    let config = ("config.json", json!({"keeps_merges": true}));
    let gguf = keys(&[config.clone(), ("tokenizer.json", file)], 10).unwrap();
    assert_eq!(get::<&str>(&gguf, "ggml.model"), "gemma4");
    assert_eq!(texts(&gguf, "ggml.merges"), ["▁ a", "a a"]);
    let kinds: Vec<i32> = get(&gguf, "ggml.token_type");
    assert_eq!((kinds[1], kinds[7], kinds[9]), (CONTROL, CONTROL, USER_DEFINED));
    assert!(gguf.meta().get::<Vec<f32>>("tokenizer.ggml.scores").is_err());
    let error = keys(&[config, ("tokenizer.json", marked())], 10).err().unwrap();
    assert!(error.contains("a space prefix"), "{error}");
}

#[test]
fn the_space_prefix_follows_the_folder() {
    let metaspace = |scheme: &str| json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme});
    for (normalizer, pre, want) in [
        (json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"}), Value::Null, false),
        (Value::Null, metaspace("first"), true),
        (Value::Null, metaspace("never"), false),
    ] {
        let mut file = marked();
        (file["normalizer"], file["pre_tokenizer"]) = (normalizer, pre);
        let gguf = keys(&[("config.json", json!({})), ("tokenizer.json", file)], 10).unwrap();
        assert_eq!(get::<bool>(&gguf, "ggml.add_space_prefix"), want);
    }
}

#[test]
fn byte_level_keeps_merges_and_bos_eos_settings() {
    let settings =
        json!({"bos_token": "<s>", "eos_token": "<s>", "add_bos_token": true, "chat_template": "a"});
    let files =
        [("config.json", json!({})), ("tokenizer.json", bytes()), ("tokenizer_config.json", settings)];
    let gguf = keys(&files, 4).unwrap();
    assert_eq!((get(&gguf, "ggml.model"), get(&gguf, "ggml.pre")), ("gpt2", "gpt-2"));
    assert_eq!(texts(&gguf, "ggml.merges"), ["Ġ a"]);
    assert!(get::<bool>(&gguf, "ggml.add_bos_token") && !get::<bool>(&gguf, "ggml.add_eos_token"));
    assert_eq!(get::<&str>(&gguf, "chat_template"), "a");
    let [config, tokenizer, settings] = files;
    // A separate file has priority; a post-processor that adds nothing overrides the settings.
    let mut without_added = tokenizer.clone();
    without_added.1["post_processor"] = json!({"type": "ByteLevel"});
    let gguf =
        keys(&[config.clone(), without_added, settings, ("chat_template.jinja", json!("b"))], 4).unwrap();
    assert_eq!(get::<&str>(&gguf, "chat_template"), "b");
    assert!(!get::<bool>(&gguf, "ggml.add_bos_token"));
    let several = json!([{"name": "default", "template": "c"}, {"name": "tool_use", "template": "d"}]);
    let settings = ("tokenizer_config.json", json!({"chat_template": several}));
    let gguf = keys(&[config, tokenizer, settings], 4).unwrap();
    assert_eq!((get(&gguf, "chat_template"), get(&gguf, "chat_template.tool_use")), ("c", "d"));
}

/// The fixture is generated by `tools/reference/normalizers.py`.
#[test]
fn folders_tokenize_as_hugging_faces_tokenizers_do() {
    let cases: Value = serde_json::from_str(include_str!("../../tests/tokenizers.json")).unwrap();
    for case in cases.as_array().unwrap() {
        let (name, file) = (case["name"].as_str().unwrap(), case["file"].clone());
        let ids = |value: &Value| -> Vec<u32> { serde_json::from_value(value.clone()).unwrap() };
        let n_vocab =
            1 + file["added_tokens"].as_array().unwrap().last().unwrap()["id"].as_u64().unwrap() as usize;
        let gguf = keys(&[("config.json", json!({})), ("tokenizer.json", file)], n_vocab).unwrap();
        let tokenizer = Tokenizer::from_gguf(&gguf).unwrap();
        let (texts, want) = (case["texts"].as_array().unwrap(), case["ids"].as_array().unwrap());
        assert_eq!(texts.len(), want.len());
        for (text, want) in texts.iter().zip(want) {
            let text = text.as_str().unwrap();
            let got = tokenizer.encode(text, Special::Parse, false).unwrap();
            assert_eq!(got, ids(want), "{name}: {text:?}");
            assert!(tokenizer.min_tokens(text) <= got.len(), "{name}: {text:?}");
        }
    }
}

#[test]
fn normalizers_become_words_or_are_rejected() {
    let words = |normalizer: Value, is_marked: bool| {
        let mut file = if is_marked { marked() } else { bytes() };
        file["normalizer"] = normalizer;
        keys(&[("config.json", json!({})), ("tokenizer.json", file)], 10).map(|gguf| {
            let words: Vec<String> = gguf
                .meta()
                .get::<Strings<'_>>(normalizer::KEY)
                .unwrap()
                .map(|word| String::from_utf8(word.to_vec()).unwrap())
                .collect();
            words.join(" ")
        })
    };
    let sequence = |steps: &[Value]| json!({"type": "Sequence", "normalizers": steps});
    let nfc = json!({"type": "NFC"});
    let mark = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
    let prepend = json!({"type": "Prepend", "prepend": "▁"});
    assert_eq!(words(Value::Null, false).unwrap(), "");
    assert_eq!(words(sequence(&[]), false).unwrap(), "");
    let strip = json!({"type": "Strip", "strip_left": true, "strip_right": true});
    let nested = sequence(&[nfc.clone(), sequence(&[strip, prepend.clone()]), mark.clone()]);
    assert_eq!(words(nested, false).unwrap(), "nfc strip_left strip_right prepend ▁ replace   ▁");
    // Space marks belong to the kind of vocabulary.
    assert_eq!(words(sequence(&[nfc.clone(), prepend, mark.clone()]), true).unwrap(), "nfc");
    let regex = json!({"type": "Replace", "pattern": {"Regex": " +"}, "content": "_"});
    for (normalizer, is_marked, want) in [
        (sequence(&[nfc.clone(), regex]), false, "{\"type\":\"Replace\",\"pattern\":{\"Regex\":\" +\"}"),
        (json!({"type": "Nmt"}), false, "the normalizer {\"type\":\"Nmt\"}"),
        (json!({"type": "Strip", "strip_left": true}), false, "{\"type\":\"Strip\",\"strip_left\":true}"),
        // Spaces created by compatibility composition would stay unmarked.
        (sequence(&[mark, nfc]), true, "the normalizer {\"type\":\"NFC\"}"),
    ] {
        let error = words(normalizer, is_marked).unwrap_err();
        assert!(error.contains(want), "{error}");
    }
}

#[test]
fn added_token_properties_are_preserved() {
    let mut file = bytes();
    file["added_tokens"] = json!([
        {"id": 3, "content": "<s>", "special": true, "lstrip": true, "normalized": true},
        {"id": 1, "content": "a", "special": false, "lstrip": true, "rstrip": false},
    ]);
    let gguf = keys(&[("config.json", json!({})), ("tokenizer.json", file.clone())], 4).unwrap();
    let ids = |key: &str| gguf.meta().find::<Vec<u32>>(&format!("kvant.tokenizer.{key}")).unwrap();
    assert_eq!((ids("lstrip"), ids("normalized")), (Some(vec![3, 1]), Some(vec![3])));
    assert_eq!((ids("rstrip"), ids("single_word")), (None, None));
    file["added_tokens"][0]["lstrip"] = json!("yes");
    let error = keys(&[("config.json", json!({})), ("tokenizer.json", file)], 4).err().unwrap();
    assert!(error.contains("'lstrip': expected true or false, got \"yes\""), "{error}");
}

#[test]
fn named_templates_are_found_in_every_location() {
    let several = json!([{"name": "default", "template": "c"}, {"name": "tool-use", "template": "d"}]);
    let files = [
        ("config.json", json!({})),
        ("tokenizer.json", bytes()),
        ("tokenizer_config.json", json!({"chat_template": several})),
        ("additional_chat_templates/rag.jinja", json!("e")),
        ("chat_template.jinja", json!("f")),
    ];
    let gguf = keys(&files, 4).unwrap();
    assert_eq!(get::<&str>(&gguf, "chat_template"), "f");
    assert_eq!((get(&gguf, "chat_template.tool_use"), get(&gguf, "chat_template.rag")), ("d", "e"));
    assert_eq!(texts(&gguf, "chat_templates"), ["rag", "tool_use"]);
}

#[test]
fn tokenizer_model_alone_is_rejected() {
    let gguf = keys(&[("config.json", json!({}))], 4).unwrap();
    assert_eq!(get::<&str>(&gguf, "ggml.model"), "none");
    let error = keys(&[("config.json", json!({})), ("tokenizer.model", json!("x"))], 4).err().unwrap();
    assert!(error.contains("tokenizer.model alone"), "{error}");
}

#[test]
fn inconsistent_vocabularies_are_rejected_by_token() {
    let change = |change: &dyn Fn(&mut Value)| {
        let mut file = marked();
        change(&mut file);
        keys(&[("config.json", json!({})), ("tokenizer.json", file)], 10).err().unwrap()
    };
    for (error, want) in [
        (
            change(&|file| file["model"]["vocab"]["a"] = json!(5)),
            "'aa': expected a number other than that of 'a', got 5",
        ),
        (change(&|file| file["model"]["vocab"]["a"] = json!(10)), "'a': expected a number below the 10 rows"),
        (change(&|file| file["model"]["vocab"]["a"] = json!("b")), "'a': expected a number"),
        (
            change(&|file| file["model"]["merges"] = json!([["a", "▁"]])),
            "expected pairs that make a token, got a ▁",
        ),
        (change(&|file| file["model"]["merges"] = Value::Null), "'merges': expected a list, got nothing"),
        (change(&|file| file["added_tokens"][0] = json!({"id": 0})), "expected tokens with id and content"),
        (change(&|file| file["pre_tokenizer"] = json!({"type": "Whitespace"})), "an unknown pre-tokenizer"),
        (
            change(&|file| file["normalizer"] = json!({"type": "Precompiled"})),
            "the normalizer {\"type\":\"Precompiled\"}",
        ),
        (change(&|file| file["model"] = json!([])), "'model': expected an object, got a list"),
    ] {
        assert!(error.contains("tokenizer.json: ") && error.contains(want), "{error}");
    }
}
