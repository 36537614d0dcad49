//! Everything around merges: normalizers, properties of added tokens, duplicate tokens, BOS and
//! EOS.

use kvant_gguf::{GgufError, GgufWriter};

use super::*;

/// Encodes a text and joins its tokens as spelt in the vocabulary.
fn spelt(t: &Tokenizer, text: &str, special: Special<'_>) -> String {
    let ids = t.encode(text, special, false).unwrap();
    ids.iter().map(|&id| format!("{} ", t.token_text(id).unwrap())).collect()
}

fn normalizer(words: &[&str]) -> Option<Normalizer> {
    Some(Normalizer::from_words(words.iter().copied(), None).unwrap())
}

/// Builds a file with these keys.
fn file(set: impl Fn(&mut GgufWriter)) -> Gguf {
    let (mut writer, mut bytes) = (GgufWriter::new(), Vec::new());
    set(&mut writer);
    writer.write_to::<GgufError>(&mut bytes, |_| Ok(())).unwrap();
    Gguf::from_bytes(bytes).unwrap()
}

/// Writes the keys of a vocabulary of all bytes and a token for é, with this pre-tokenizer.
fn write_bytes(writer: &mut GgufWriter, pre: &str) {
    let data = byte_level(&["Ã©"], &["Ã ©"]);
    writer.set("tokenizer.ggml.model", "gpt2").unwrap();
    writer.set("tokenizer.ggml.pre", pre).unwrap();
    writer.set_array("tokenizer.ggml.tokens", data.tokens.iter().map(String::as_str)).unwrap();
    let merges = data.merges.unwrap();
    writer.set_array("tokenizer.ggml.merges", merges.iter().map(String::as_str)).unwrap();
}

#[test]
fn pre_tokenizers_imply_nfc_unless_a_normalizer_is_given() {
    let n = |pre: &str, words: Option<&[&str]>| {
        let gguf = file(|writer| {
            write_bytes(writer, pre);
            if let Some(words) = words {
                writer.set_array("kvant.tokenizer.normalizer", words.iter().copied()).unwrap();
            }
        });
        Tokenizer::from_gguf(&gguf).unwrap().encode("e\u{301}", Special::AsText, false).unwrap().len()
    };
    for pre in [
        "qwen2",
        "qwen35",
        "deepseek-r1-qwen",
        "command-r",
        "olmo",
        "mpt",
        "modern-bert",
        "stablelm2",
        "hunyuan",
    ] {
        assert_eq!((n(pre, None), n(pre, Some(&[]))), (1, 3), "{pre}");
    }
    for pre in ["gpt-2", "smollm", "llama-bpe", "gpt-4o", "tekken"] {
        let n = |words| match pre {
            "llama-bpe" | "tekken" => {
                let mut data = byte_level(&["Ã©"], &["Ã ©"]);
                (data.pre, data.add_bos, data.normalizer) = (Some(pre.to_owned()), Some(false), words);
                Tokenizer::new(data).unwrap().encode("e\u{301}", Special::AsText, false).unwrap().len()
            }
            _ => n(pre, words.is_some().then_some(&["nfkc"])),
        };
        assert_eq!((n(None), n(normalizer(&["nfkc"]))), (3, 1), "{pre}");
    }
    let gguf = file(|writer| {
        write_bytes(writer, "qwen2");
        writer.set_array("kvant.tokenizer.normalizer", ["nfc", "nmt"]).unwrap();
    });
    let error = Tokenizer::from_gguf(&gguf).unwrap_err();
    assert!(matches!(&error, TokenizerError::Normalizer { got, .. } if got == "'nmt'"), "{error}");
}

#[test]
fn added_token_properties_of_a_file_override_those_of_its_name() {
    let read = |lstrip: &[u32], rstrip: Option<&[u32]>| {
        let gguf = file(|writer| {
            write_bytes(writer, "gpt-2");
            writer.set_array("tokenizer.ggml.merges", [""; 0]).unwrap();
            writer
                .set_array("tokenizer.ggml.token_type", (0..257).map(|id| if id == 256 { 4 } else { 1 }))
                .unwrap();
            writer.set("general.name", "Phi-3").unwrap();
            writer.set_array("kvant.tokenizer.lstrip", lstrip.iter().copied()).unwrap();
            if let Some(rstrip) = rstrip {
                writer.set_array("kvant.tokenizer.normalizer", [""; 0]).unwrap();
                writer.set_array("kvant.tokenizer.rstrip", rstrip.iter().copied()).unwrap();
            }
        });
        Tokenizer::from_gguf(&gguf)
    };
    // A user-defined token matches its literal text, which is not é.
    let n = |t: Tokenizer| t.encode(" Ã© ", Special::AsText, false).unwrap().len();
    assert_eq!(n(read(&[256], None).unwrap()), 2);
    assert_eq!(n(read(&[256], Some(&[])).unwrap()), 2);
    assert_eq!(n(read(&[256], Some(&[256])).unwrap()), 1);
    assert_eq!(n(read(&[], Some(&[])).unwrap()), 3);
    let error = read(&[9, 257], Some(&[])).unwrap_err();
    let expected = "'kvant.tokenizer.lstrip': expected tokens below 257, got 257";
    assert_eq!(error.to_string(), expected);
}

#[test]
fn text_normalized_to_a_special_token_matches_only_if_trusted() {
    let mut data = mark(mark(byte_level(&["<s>", "<t>"], &[]), "<s>", 3), "<t>", 4);
    data.normalizer = normalizer(&["lowercase", "nfkc"]);
    data.added = Some(AddedTokens { normalized: vec![256, 257], ..AddedTokens::default() });
    let t = Tokenizer::new(data).unwrap();
    assert_eq!(spelt(&t, "<S>A<\u{ff33}>", Special::Parse), "<s> a <s> ");
    assert_eq!(spelt(&t, "<S>", Special::AsText), "< s > ");
    assert_eq!(spelt(&t, "<T>", Special::AsText), "<t> ");
    // A preceding ligature shifts offsets; no match crosses the end of a trusted range.
    let text = "\u{fb01}<S><S>";
    let own = 3..6;
    assert_eq!(spelt(&t, text, Special::Within(std::slice::from_ref(&own))), "f i <s> < s > ");
    let own = [3..5, 5..6];
    assert_eq!(spelt(&t, text, Special::Within(&own)), "f i < s >< s > ".replace("><", "> <"));
}

#[test]
fn a_prompt_that_is_continued_ends_without_eos() {
    let mut data = sentence_piece(&[("▁", -1.0), ("a", -2.0), ("▁a", -3.0)]);
    data.add_eos = Some(true);
    let t = Tokenizer::new(data).unwrap();
    assert_eq!(t.encode("a", Special::Parse, true).unwrap(), [1, 5, 2]);
    assert_eq!(t.encode_prompt("a", Special::Parse).unwrap(), [1, 5]);
    assert_eq!(t.encode_prompt("<s>a", Special::Parse).unwrap(), [1, 5]);
    assert_eq!(t.encode_prompt("<s>a</s>", Special::Parse).unwrap(), [1, 5, 2]);
    assert_eq!(t.encode_prompt("", Special::Parse).unwrap(), [1]);
}

#[test]
fn spelling_neither_normalizes_nor_adds_a_space_prefix() {
    let mut data = mark(byte_level(&["Ã©", "<s>"], &["Ã ©"]), "<s>", 3);
    data.normalizer = normalizer(&["nfc"]);
    let t = Tokenizer::new(data).unwrap();
    let text = "e\u{301}<s>\u{e9}";
    let bytes: Vec<u8> =
        t.encode_exact(text).unwrap().iter().flat_map(|&id| t.token_bytes(id).to_vec()).collect();
    assert_eq!(bytes, text.as_bytes());
    assert!(!t.encode_exact(text).unwrap().contains(&257));
    let t = Tokenizer::new(sentence_piece(&[("▁", -1.0), ("a", -2.0), ("▁a", -3.0)])).unwrap();
    assert_eq!((t.encode_exact("a").unwrap(), t.encode_exact(" a").unwrap()), (vec![4], vec![5]));
}

#[test]
fn the_first_of_equal_tokens_is_found() {
    let t = Tokenizer::new(byte_level(&["th", "th"], &["t h"])).unwrap();
    assert_eq!(t.encode("th", Special::AsText, false).unwrap(), [256]);
    assert_eq!((t.decode(&[256]), t.decode(&[257]), t.token_id("th")), ("th".into(), "th".into(), Some(256)));
    // Special tokens and byte tokens.
    let mut data = byte_level(&["<s>", "<s>"], &[]);
    data.token_types = Some((0..258).map(|id| if id < 256 { 1 } else { 3 }).collect());
    assert_eq!(Tokenizer::new(data).unwrap().encode("<s>", Special::Parse, false).unwrap(), [256]);
    let mut data = sentence_piece(&[("▁", -1.0), ("<0x41>", 0.0), ("<0x41>", 0.0)]);
    data.add_space_prefix = Some(false);
    let types = data.token_types.as_mut().unwrap();
    (types[4], types[5]) = (6, 6);
    let t = Tokenizer::new(data).unwrap();
    assert_eq!(t.encode("A", Special::AsText, false).unwrap(), [4]);
    // A normal token takes precedence over a special one.
    let data = mark(byte_level(&["th", "th"], &["t h"]), "th", 3);
    assert_eq!(Tokenizer::new(data).unwrap().encode("th", Special::AsText, false).unwrap(), [257]);
}

#[test]
fn a_malformed_model_name_is_not_an_error() {
    for name in [Value::String(b"Phi-3 \xff"), Value::U32(3)] {
        let gguf = file(|writer| {
            write_bytes(writer, "gpt-2");
            for key in ["general.name", "general.author", "general.description", "general.license"] {
                writer.set(key, name).unwrap();
            }
        });
        let data = VocabData::from_meta(&gguf.meta()).unwrap();
        assert_eq!(data.strip_after_special, matches!(name, Value::String(_)));
        Tokenizer::new(data).unwrap();
    }
}

#[test]
fn scores_may_be_whole_numbers() {
    let gguf = file(|writer| {
        writer.set("tokenizer.ggml.model", "llama").unwrap();
        writer.set_array("tokenizer.ggml.tokens", ["<unk>", "a", "aa"]).unwrap();
        writer.set_array("tokenizer.ggml.scores", [0, -1, -2]).unwrap();
    });
    assert_eq!(VocabData::from_meta(&gguf.meta()).unwrap().scores, Some(vec![0.0, -1.0, -2.0]));
}

#[test]
fn rwkv_files_need_neither_scores_nor_merges() {
    let gguf = file(|writer| {
        writer.set("tokenizer.ggml.model", "rwkv").unwrap();
        writer.set_array("tokenizer.ggml.tokens", ["<s>", r"\xe4", r"\xbd\xa0", r"\n\n", "[PAD4]"]).unwrap();
        writer.set_array("tokenizer.ggml.token_type", [3, 1, 1, 1, 5]).unwrap();
        writer.set("tokenizer.ggml.eot_token_id", 3).unwrap();
    });
    let t = Tokenizer::from_gguf(&gguf).unwrap();
    assert_eq!((t.model().name(), t.pre(), t.eog_ids()), ("rwkv", None, &[3][..]));
    assert_eq!(t.encode("<s>\u{4f60}\n\n", Special::Parse, true).unwrap(), [0, 1, 2, 3]);
}

#[test]
fn word_piece_preserves_case_and_accents_if_configured() {
    let tokens = ["[UNK]", "[CLS]", "[SEP]", "▁É", "▁é", "▁E", "▁e"];
    let text = |lowercase, strip_accents| {
        let mut data = VocabData::new(TokenizerModel::Bert, tokens.map(str::to_owned).to_vec());
        (data.special.unk, data.special.cls, data.special.sep) = (Some(0), Some(1), Some(2));
        (data.lowercase, data.strip_accents) = (lowercase, strip_accents);
        spelt(&Tokenizer::new(data).unwrap(), "É", Special::AsText)
    };
    assert_eq!(text(None, None), "▁e ");
    assert_eq!(text(Some(false), None), "▁É ");
    assert_eq!(text(Some(false), Some(true)), "▁E ");
    assert_eq!(text(Some(true), Some(false)), "▁é ");
    let gguf = file(|writer| {
        writer.set("tokenizer.ggml.model", "bert").unwrap();
        writer.set_array("tokenizer.ggml.tokens", tokens).unwrap();
        writer.set("tokenizer.ggml.normalizer.lowercase", false).unwrap();
        writer.set("tokenizer.ggml.normalizer.strip_accents", true).unwrap();
    });
    let data = VocabData::from_meta(&gguf.meta()).unwrap();
    assert_eq!((data.lowercase, data.strip_accents), (Some(false), Some(true)));
}

/// The expected tokens come from `tokenizers` with Qwen 3's own `tokenizer.json`.
#[test]
fn qwen_encodes_composed_and_decomposed_text_alike() {
    let Some(dir) = assets("vocab") else { return };
    let t = open(&dir.join("ggml-vocab-qwen2.gguf"));
    let vietnamese = ["Ti\u{1ebf}ng Vi\u{1ec7}t", "Tie\u{302}\u{301}ng Vie\u{323}\u{302}t"];
    let korean = ["\u{d55c}\u{ad6d}", "\u{1112}\u{1161}\u{11ab}\u{1100}\u{116e}\u{11a8}"];
    for (texts, want) in [
        (vietnamese, &[45351, 26068, 968, 128324][..]),
        (korean, &[23573, 124785]),
        (["Caf\u{e9}", "Cafe\u{301}"], &[34, 2577, 963]),
    ] {
        for text in texts {
            assert_eq!(t.encode(text, Special::AsText, false).unwrap(), want, "{text:?}");
        }
    }
}
