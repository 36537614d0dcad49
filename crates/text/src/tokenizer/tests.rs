//! Tests of the whole tokenizer: llama.cpp's vectors, hostile vocabularies, long texts.

use std::path::PathBuf;

use kvant_gguf::{Gguf, Value};

use super::*;

mod whole;

/// Returns the shared assets, or prints a message and returns `None` if they are absent.
fn assets(dir: &str) -> Option<PathBuf> {
    let path = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/assets")).join(dir);
    if path.is_dir() {
        return Some(path);
    }
    eprintln!("skipped: {} is not there", path.display());
    None
}

fn open(path: &std::path::Path) -> Tokenizer {
    let gguf = Gguf::open(path).unwrap();
    Tokenizer::from_gguf(&gguf).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Parses the ids of one line of a vector file.
fn ids(line: &str) -> Vec<u32> {
    line.split_whitespace().map(|id| id.parse().unwrap()).collect()
}

#[test]
fn every_vocabulary_agrees_with_its_vectors() {
    let Some(dir) = assets("vocab") else { return };
    let mut compared = 0;
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|e| e != "gguf") {
            continue;
        }
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let tokenizer = open(&path);
        let read = |ext: &str| std::fs::read_to_string(path.with_file_name(format!("{name}.{ext}")));
        let (Ok(inputs), Ok(outputs)) = (read("inp"), read("out")) else {
            eprintln!("{name}: loads; has no vectors");
            continue;
        };
        let inputs: Vec<_> = inputs.split_terminator("\n__ggml_vocab_test__\n").collect();
        assert_eq!(inputs.len(), outputs.lines().count(), "{name}");
        for (text, want) in inputs.iter().zip(outputs.lines()) {
            let got = tokenizer.encode(text, Special::AsText, false).unwrap();
            assert_eq!(got, ids(want), "{name}: {text:?}");
            // WordPiece lowercases and strips; the others are lossless.
            if tokenizer.model() != TokenizerModel::Bert {
                assert_eq!(tokenizer.decode(&got), *text, "{name}");
            }
        }
        compared += 1;
    }
    assert!(compared >= 13, "only {compared} vocabularies had vectors");
}

#[test]
fn every_vocabulary_streams_as_it_decodes_and_accepts_any_id() {
    let Some(dir) = assets("vocab") else { return };
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|e| e != "gguf") {
            continue;
        }
        let tokenizer = open(&path);
        let all: Vec<u32> = (0..tokenizer.n_vocab() as u32).rev().collect();
        let mut stream = DecodeStream::default();
        let mut text: String = all.iter().map(|&id| stream.push(&tokenizer, id)).collect();
        text.push_str(&stream.flush());
        let whole = tokenizer.decode(&all);
        assert!(text == whole || text.strip_prefix(' ') == Some(&whole), "{}", path.display());
        for id in [u32::MAX, u32::MAX - 1, tokenizer.n_vocab() as u32] {
            assert_eq!(tokenizer.decode(&[id]), "");
            assert_eq!(stream.push(&tokenizer, id), "");
            assert!(tokenizer.token_bytes(id).is_empty() && tokenizer.token_text(id).is_none());
            assert!(tokenizer.kind(id).is_none() && !tokenizer.is_eog(id));
        }
    }
}

/// A byte-level vocabulary of all bytes, `extra` tokens and `merges`.
fn byte_level(extra: &[&str], merges: &[&str]) -> VocabData {
    let alphabet = (33u32..=126).chain(161..=172).chain(174..=255).chain(256..324);
    let mut tokens: Vec<String> = alphabet.filter_map(char::from_u32).map(String::from).collect();
    tokens.extend(extra.iter().map(|t| (*t).to_owned()));
    let mut data = VocabData::new(TokenizerModel::Gpt2, tokens);
    data.pre = Some("gpt-2".to_owned());
    data.merges = Some(merges.iter().map(|m| (*m).to_owned()).collect());
    data
}

/// A SentencePiece vocabulary: unknown, BOS, EOS, then `tokens` with their scores.
fn sentence_piece(tokens: &[(&str, f32)]) -> VocabData {
    let special = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)];
    let all: Vec<_> = special.iter().chain(tokens).copied().collect();
    let mut data = VocabData::new(TokenizerModel::Llama, all.iter().map(|(t, _)| (*t).to_owned()).collect());
    data.scores = Some(all.iter().map(|(_, s)| *s).collect());
    data.token_types = Some((0..all.len()).map(|i| [2, 3, 3].get(i).copied().unwrap_or(1)).collect());
    data
}

/// Marks the token `text` of `data` with a GGUF type.
fn mark(mut data: VocabData, text: &str, code: i32) -> VocabData {
    let n = data.tokens.len();
    let types = data.token_types.get_or_insert_with(|| vec![1; n]);
    types[data.tokens.iter().position(|t| t == text).unwrap()] = code;
    data
}

#[test]
fn special_text_is_a_token_only_where_it_is_parsed() {
    let data = mark(byte_level(&["<|im_end|>", "<think>"], &[]), "<|im_end|>", 3);
    let t = Tokenizer::new(mark(data, "<think>", 4)).unwrap();
    let (end, think) = (t.token_id("<|im_end|>").unwrap(), t.token_id("<think>").unwrap());
    assert_eq!(t.encode("<|im_end|>", Special::Parse, false).unwrap(), [end]);
    assert_eq!(t.encode("<|im_end|>", Special::AsText, false).unwrap().len(), 10);
    // User-defined tokens are matched either way.
    assert_eq!(t.encode("a<think>", Special::AsText, false).unwrap()[1], think);
    assert!(t.is_eog(end) && t.eot() == Some(end) && !t.is_eog(think));
    assert_eq!(t.decode(&[end, think]), "<think>");
    assert_eq!(t.token_bytes(end), b"<|im_end|>");
}

#[test]
fn merges_never_grow_text_into_a_control_token() {
    let data = mark(byte_level(&["<s"], &["< s"]), "<s", 3);
    let t = Tokenizer::new(data).unwrap();
    assert_eq!(t.encode("<s", Special::AsText, false).unwrap().len(), 2);
    assert_eq!(t.encode("<s", Special::Parse, false).unwrap().len(), 1);
    // Llama's `</s>` could be merged from its pieces.
    let data =
        sentence_piece(&[("<", -9.0), ("/", -9.0), ("s", -9.0), (">", -9.0), ("</", -1.0), ("s>", -2.0)]);
    let t = Tokenizer::new(VocabData { add_space_prefix: Some(false), ..data }).unwrap();
    assert_eq!(t.encode("</s>", Special::AsText, false).unwrap().len(), 2);
    assert_eq!(t.encode("</s>", Special::Parse, false).unwrap(), [2]);
}

#[test]
fn bos_and_eos_are_added_once_and_only_on_request() {
    let mut data = sentence_piece(&[("▁", -1.0), ("a", -2.0), ("▁a", -0.5)]);
    data.add_eos = Some(true);
    let t = Tokenizer::new(data).unwrap();
    assert_eq!(t.encode("a", Special::Parse, false).unwrap(), [5]);
    assert_eq!(t.encode("a", Special::Parse, true).unwrap(), [1, 5, 2]);
    assert_eq!(t.encode("<s>a", Special::Parse, true).unwrap(), [1, 5, 2]);
    assert_eq!(t.encode("", Special::Parse, true).unwrap(), [1, 2]);
    assert_eq!(t.decode(&[1, 5, 5, 2]), "a a");
}

#[test]
fn sentence_piece_falls_back_to_bytes_then_to_unknown() {
    let text = [("▁", -1.0), ("a", -2.0)];
    let t = Tokenizer::new(sentence_piece(&text)).unwrap();
    assert_eq!(t.encode("aéa", Special::AsText, false).unwrap(), [3, 4, 0, 4]);
    let bytes: Vec<String> = (0..256).map(|b| format!("<0x{b:02X}>")).collect();
    let all: Vec<_> = bytes.iter().map(|b| (b.as_str(), 0.0)).chain(text).collect();
    let t = Tokenizer::new(sentence_piece(&all)).unwrap();
    let ids = t.encode("aéa", Special::AsText, false).unwrap();
    assert_eq!(ids, [259, 260, 3 + 0xC3, 3 + 0xA9, 260]);
    assert_eq!(t.decode(&ids), "aéa");
    // A literal space mark is a space, and the spelling of a byte token is plain text.
    assert_eq!(t.decode(&t.encode("a▁a<0x41>", Special::AsText, false).unwrap()), "a a<0x41>");
}

#[test]
fn word_piece_normalizes_and_splits_as_bert() {
    let tokens = ["[UNK]", "[CLS]", "[SEP]", "▁e", "b", "▁!", "▁中", "▁ि", "▁eb"];
    let mut data = VocabData::new(TokenizerModel::Bert, tokens.map(str::to_owned).to_vec());
    (data.special.unk, data.special.cls, data.special.sep) = (Some(0), Some(1), Some(2));
    let t = Tokenizer::new(data).unwrap();
    let texts = |s: &str| -> Vec<_> {
        t.encode(s, Special::AsText, false).unwrap().iter().map(|&id| t.token_text(id).unwrap()).collect()
    };
    assert_eq!(texts("Éb ÉBB!"), ["▁eb", "▁eb", "b", "▁!"]);
    // Chinese characters are words of their own; control characters vanish; an unknown word is one
    // token.
    assert_eq!(texts("e中e\u{85}b ezz"), ["▁e", "▁中", "▁eb", "[UNK]"]);
    // A spacing mark is not an accent.
    assert_eq!(texts("ि"), ["▁ि"]);
    assert_eq!(t.encode("e", Special::Parse, true).unwrap(), [1, 3, 2]);
}

#[test]
fn text_without_tokens_is_rejected_with_its_byte_offset() {
    let mut data = byte_level(&[], &[]);
    data.tokens.retain(|t| t != "z");
    let t = Tokenizer::new(data).unwrap();
    let err = t.encode("ab z", Special::AsText, false).unwrap_err().to_string();
    assert!(err.contains("0x7A") && err.contains("byte 3"), "{err}");
}

#[test]
fn inconsistent_vocabularies_are_typed_errors() {
    use TokenizerError as E;
    type Edit = fn(&mut VocabData);
    type Expected = fn(&E) -> bool;
    let gpt2 = || byte_level(&["th"], &["t h"]);
    let spm = || sentence_piece(&[("▁", -1.0)]);
    let cases: &[(VocabData, Edit, Expected)] = &[
        (gpt2(), |d| d.tokens.clear(), |e| matches!(e, E::VocabSize { got: 0, .. })),
        (gpt2(), |d| d.merges = None, |e| matches!(e, E::MissingKey { key: "tokenizer.ggml.merges", .. })),
        (
            gpt2(),
            |d| d.merges = Some(vec!["th".into()]),
            |e| matches!(e, E::Merge { index: 0, fault: MergeFault::NoSpace, .. }),
        ),
        (
            gpt2(),
            |d| d.merges = Some(vec!["".into()]),
            |e| matches!(e, E::Merge { fault: MergeFault::NoSpace, .. }),
        ),
        (
            gpt2(),
            |d| d.merges = Some(vec!["tt h".into()]),
            |e| matches!(e, E::Merge { fault: MergeFault::LeftUnknown, .. }),
        ),
        (
            gpt2(),
            |d| d.merges = Some(vec!["t ".into()]),
            |e| matches!(e, E::Merge { fault: MergeFault::RightUnknown, .. }),
        ),
        (
            gpt2(),
            |d| d.merges = Some(vec!["t h".into(), "h t".into()]),
            |e| matches!(e, E::Merge { index: 1, fault: MergeFault::ProductUnknown, .. }),
        ),
        (gpt2(), |d| d.pre = Some("what".into()), |e| matches!(e, E::UnknownPre { .. })),
        (gpt2(), |d| d.token_types = Some(vec![1; 3]), |e| matches!(e, E::Length { got: 3, .. })),
        (gpt2(), |d| d.token_types = Some(vec![7; 257]), |e| matches!(e, E::TokenType { id: 0, got: 7 })),
        (gpt2(), |d| d.token_types = Some(vec![6; 257]), |e| matches!(e, E::ByteToken { .. })),
        (
            gpt2(),
            |d| (d.add_bos, d.special.bos) = (Some(true), Some(257)),
            |e| matches!(e, E::MissingSpecial { .. }),
        ),
        (gpt2(), |d| d.add_bos = Some(true), |e| matches!(e, E::MissingSpecial { .. })),
        (spm(), |d| d.scores = None, |e| matches!(e, E::MissingKey { key: "tokenizer.ggml.scores", .. })),
        (spm(), |d| d.scores = Some(vec![0.0]), |e| matches!(e, E::Length { got: 1, .. })),
        (spm(), |d| d.scores = Some(vec![f32::NAN; 4]), |e| matches!(e, E::Score { id: 0, .. })),
        (
            spm(),
            |d| d.model = TokenizerModel::Bert,
            |e| matches!(e, E::MissingKey { .. } | E::MissingSpecial { .. }),
        ),
    ];
    for (i, (data, edit, expected)) in cases.iter().enumerate() {
        let mut data = data.clone();
        edit(&mut data);
        let err = Tokenizer::new(data).expect_err(&format!("case {i}"));
        assert!(expected(&err), "case {i}: {err:?}");
        assert_eq!(err.to_string().lines().count(), 1, "case {i}: {err}");
    }
    assert!(matches!(TokenizerModel::from_name("plamo2"), Err(E::UnknownModel { .. })));
}

#[test]
fn special_ids_out_of_range_count_as_absent() {
    let mut data = sentence_piece(&[("a", -1.0)]);
    (data.special.bos, data.special.pad, data.special.sep) = (Some(u32::MAX), Some(4), Some(3));
    let t = Tokenizer::new(data).unwrap();
    assert_eq!((t.bos(), t.special().pad, t.special().sep), (Some(1), None, Some(3)));
}

#[test]
fn special_ids_may_be_integers_of_any_type() {
    use kvant_gguf::GgufWriter;
    let read = |value: Value<'_>| {
        let (mut writer, mut bytes) = (GgufWriter::new(), Vec::new());
        writer.set("tokenizer.ggml.model", "gpt2").unwrap();
        writer.set("tokenizer.ggml.padding_token_id", value).unwrap();
        writer.set_array("tokenizer.ggml.tokens", ["a", "b"]).unwrap();
        writer.write_to::<kvant_gguf::GgufError>(&mut bytes, |_| Ok(())).unwrap();
        VocabData::from_meta(&Gguf::from_bytes(bytes).unwrap().meta()).map(|data| data.special.pad)
    };
    for one in [Value::U8(1), Value::I16(1), Value::U32(1), Value::I32(1), Value::U64(1), Value::I64(1)] {
        assert_eq!(read(one).unwrap(), Some(1));
    }
    assert_eq!(read(Value::I32(-1)).unwrap(), None);
    assert_eq!(read(Value::U64(u64::MAX)).unwrap(), None);
    assert!(read(Value::F32(1.0)).is_err());
}

#[test]
fn fim_tokens_that_start_another_file_end_generation() {
    for text in
        ["<PAD>", "[PAD]", "<fim-pad>", "<|fim_repo|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>"]
    {
        let t = Tokenizer::new(byte_level(&[text, "x y"], &[])).unwrap();
        assert!(t.eog_ids() == [256] && t.kind(256) == Some(TokenKind::Control), "{text}");
    }
    // Ids in the file override those inferred from texts.
    let mut data = byte_level(&["<PAD>", "pad", "repo", "file"], &[]);
    (data.special.fim_pad, data.special.fim_rep, data.special.fim_sep) = (Some(257), Some(258), Some(259));
    let t = Tokenizer::new(data).unwrap();
    assert!(t.eog_ids() == [257, 258, 259] && t.kind(256) == Some(TokenKind::Normal));
}

#[test]
fn pre_tokenizers_accept_the_names_of_reusing_models() {
    for name in ["jina-v1-en", "jina-v2-code", "roberta-bpe", "jina-v5-nano", "laguna"] {
        let mut data = byte_level(&[], &[]);
        (data.pre, data.add_bos) = (Some(name.to_owned()), Some(false));
        assert_eq!(Tokenizer::new(data).unwrap().pre(), Some(name));
    }
}

#[test]
fn gemma_4_starts_with_bos_regardless_of_its_file() {
    let mut data = VocabData::new(TokenizerModel::Gemma4, ["<bos>", "a"].map(str::to_owned).to_vec());
    (data.merges, data.add_bos, data.special.bos) = (Some(Vec::new()), Some(false), Some(0));
    let t = Tokenizer::new(data).unwrap();
    assert_eq!(t.encode("a", Special::AsText, true).unwrap(), [0, 1]);
}

#[test]
fn merges_apply_by_rank_then_from_the_left() {
    let t = Tokenizer::new(byte_level(&["aa", "aaa", "ab"], &["a b", "a a", "aa a"])).unwrap();
    let texts = |s: &str| -> Vec<String> {
        let ids = t.encode(s, Special::AsText, false).unwrap();
        ids.iter().map(|&id| t.token_text(id).unwrap().to_owned()).collect()
    };
    assert_eq!(texts("aaab"), ["aa", "ab"]);
    assert_eq!(texts("aaaaa"), ["aa", "aaa"]);
}

#[test]
fn long_words_do_not_cost_the_square_of_their_length() {
    // Quadratic merging would take hours here, so termination proves the claim.
    let t = Tokenizer::new(byte_level(&["aa", "aaaa"], &["a a", "aa aa"])).unwrap();
    let n = 1_000_000;
    let ids = t.encode(&"a".repeat(n), Special::Parse, false).unwrap();
    assert_eq!(ids.len(), n / 4);
    let t =
        Tokenizer::new(sentence_piece(&[("▁", -1.0), ("a", -2.0), ("aa", -3.0), ("aaaa", -4.0)])).unwrap();
    assert_eq!(t.encode(&"a".repeat(n), Special::AsText, false).unwrap().len(), 1 + n / 4);
}

#[test]
fn a_long_special_token_does_not_cost_the_square_of_its_length() {
    // Quadratic time would take days, so termination proves the claim.
    let long: String =
        (0..2_000_000u32).map(|i| char::from(33 + (i.wrapping_mul(i) >> 3) as u8 % 89)).collect();
    for kind in [3, 4] {
        let t = Tokenizer::new(mark(byte_level(&[&long], &[]), &long, kind)).unwrap();
        assert_eq!(t.encode(&long, Special::Parse, false).unwrap(), [256]);
        assert_eq!(t.min_tokens(&long.repeat(3)), 3);
    }
}

/// Encodes `text` by SentencePiece's definition: joins the best pair repeatedly.
fn slowly(tokens: &[(String, f32)], text: &str) -> Vec<String> {
    let mut pieces: Vec<String> = text.chars().map(String::from).collect();
    let score = |text: &str| tokens.iter().find(|(token, _)| token == text).map(|(_, score)| *score);
    loop {
        let mut best: Option<(f32, usize)> = None;
        for (at, pair) in pieces.windows(2).enumerate() {
            if let Some(score) =
                score(&pair.concat()).filter(|&score| best.is_none_or(|(best_score, _)| score > best_score))
            {
                best = Some((score, at));
            }
        }
        let Some((_, at)) = best else { return pieces };
        let right = pieces.remove(at + 1);
        pieces[at] += &right;
    }
}

#[test]
fn sentence_piece_matches_its_definition() {
    let mut random = kvant_codec::random::Random::new(11);
    for round in 0..200 {
        let mut below = |n: usize| (random.bits() % n as u64) as usize;
        let chars = ["a", "b", "é", "▁", "🚀"];
        let mut tokens: Vec<(String, f32)> = chars.iter().map(|c| ((*c).to_owned(), -9.0)).collect();
        for _ in 0..below(25) {
            let text: String = (0..2 + below(3)).map(|_| chars[below(chars.len())]).collect();
            if tokens.iter().all(|(other, _)| *other != text) {
                tokens.push((text, below(6) as f32 - 8.0));
            }
        }
        let borrowed: Vec<(&str, f32)> = tokens.iter().map(|(text, score)| (text.as_str(), *score)).collect();
        let t = Tokenizer::new(sentence_piece(&borrowed)).unwrap();
        // Short texts; texts long enough for buckets; runs of one character.
        let n = [20, 400, 300][round % 3];
        let of = if round % 3 == 2 { 1 } else { chars.len() };
        let text: String = (0..n).map(|_| chars[(below(of) + round) % chars.len()]).collect();
        let ids = t.encode(&text, Special::AsText, false).unwrap();
        let got: Vec<&str> = ids.iter().map(|&id| t.token_text(id).unwrap()).collect();
        assert_eq!(got, slowly(&tokens, &format!("▁{text}")), "round {round}: {text:?} of {tokens:?}");
    }
}

#[test]
fn special_tokens_match_only_within_trusted_ranges() {
    let data = mark(byte_level(&["<s>", "<s", "<tool>", "<tool><s>"], &[]), "<s>", 3);
    let data = mark(mark(mark(data, "<s", 3), "<tool>", 4), "<tool><s>", 3);
    let t = Tokenizer::new(data).unwrap();
    let texts = |text: &str, own: &[(usize, usize)]| -> Vec<String> {
        let own: Vec<Range<usize>> = own.iter().map(|&(start, end)| start..end).collect();
        let ids = t.encode(text, Special::Within(&own), false).unwrap();
        ids.iter().map(|&id| t.token_text(id).unwrap().to_owned()).collect()
    };
    let all = |text: &str| [(0, text.len())];
    assert_eq!(texts("<s>a<s>", &all("<s>a<s>")), ["<s>", "a", "<s>"]);
    assert_eq!(texts("<s>a<s>", &[]).len(), 7);
    assert_eq!(texts("<s>a<s>", &[(4, 7)]), ["<", "s", ">", "a", "<s>"]);
    // A shorter trusted token matches; one across two ranges does not.
    assert_eq!(texts("<s>", &[(0, 2)]), ["<s", ">"]);
    assert_eq!(texts("<s>", &[(0, 1), (1, 3)]), ["<", "s", ">"]);
    // User-defined tokens match anywhere, and the longest match has priority.
    assert_eq!(texts("<tool><s>", &[]), ["<tool>", "<", "s", ">"]);
    assert_eq!(texts("<tool><s>", &[(6, 9)]), ["<tool>", "<s>"]);
    assert_eq!(texts("<tool><s>", &all("<tool><s>")), ["<tool><s>"]);
    // Ranges that are invalid in the text are ignored.
    assert_eq!(texts("é<s>", &[(1, 4), (2, 900)]).len(), 5);
}

#[test]
fn gpt_oss_continues_after_an_end_of_message() {
    let marks = ["<|return|>", "<|call|>", "<|end|>", "<|channel|>"];
    let t = Tokenizer::new(byte_level(&marks, &[])).unwrap();
    let is_eog = |text| t.is_eog(t.token_id(text).unwrap());
    assert!(is_eog("<|return|>") && is_eog("<|call|>") && !is_eog("<|end|>"));
    let t = Tokenizer::new(byte_level(&["<|end|>", "</s>"], &[])).unwrap();
    assert!(t.is_eog(t.token_id("<|end|>").unwrap()));
    // Channel marks are shown, but message text must not produce them.
    let t = Tokenizer::new(byte_level(&["<|return|>", "<|call|>", "<|channel|>"], &[])).unwrap();
    let channel = t.token_id("<|channel|>").unwrap();
    assert_eq!(t.encode("<|channel|>", Special::AsText, false).unwrap().len(), 11);
    assert_eq!(t.encode("<|channel|>", Special::Parse, false).unwrap(), [channel]);
    assert_eq!(
        (t.decode(&[channel]), DecodeStream::default().push(&t, channel)),
        ("<|channel|>".into(), "<|channel|>".into())
    );
    let t = Tokenizer::new(byte_level(&["<|end|>", "</s>"], &[])).unwrap();
    // An HTML tag in a vocabulary that does not mark it as special.
    assert!(!t.is_eog(t.token_id("</s>").unwrap()));
}

#[test]
fn phi_3_special_tokens_take_the_white_space_behind_them() {
    let mut data = mark(byte_level(&["<|end|>", "<s>"], &[]), "<|end|>", 3);
    data = mark(data, "<s>", 3);
    data.strip_after_special = true;
    let t = Tokenizer::new(data).unwrap();
    assert_eq!(t.encode("<|end|>\n\n<|end|>", Special::Parse, false).unwrap().len(), 2);
    assert_eq!(t.encode("<s>\n", Special::Parse, false).unwrap().len(), 2);
}

/// The expected tokens come from `tokenizers` with the vocabulary of XLM-RoBERTa
/// (`tools/reference/unigram.py`).
#[test]
fn unigram_tokens_equal_those_of_tokenizers() {
    let dir = std::env::var_os("KVANT_MODELS").unwrap_or("/tmp/models".into());
    let path = PathBuf::from(dir).join("vocab/ggml-vocab-nomic-bert-moe.gguf");
    let golden = path.with_extension("json");
    if !golden.is_file() {
        eprintln!("skipped: no {} (tools/reference/unigram.py VOCAB)", golden.display());
        return;
    }
    let t = open(&path);
    let golden: serde_json::Value = serde_json::from_slice(&std::fs::read(golden).unwrap()).unwrap();
    let [texts, tokens] = ["texts", "tokens"].map(|key| golden[key].as_array().unwrap());
    assert!(texts.len() > 1000 && texts.len() == tokens.len());
    for (text, want) in texts.iter().zip(tokens) {
        let text = text.as_str().unwrap();
        let want: Vec<u32> = want.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
        assert_eq!(t.encode(text, Special::Parse, false).unwrap(), want, "{text:?}");
    }
}
