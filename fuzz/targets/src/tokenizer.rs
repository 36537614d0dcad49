//! Target: tokenizers on arbitrary text: that of the bundled model, and the shared vocabularies if
//! present.

use std::path::Path;
use std::sync::LazyLock;

use kvant::tokenizer::{TokenKind, TokenizerError, TokenizerModel};
use kvant::{DecodeStream, Gguf, Special, Tokenizer};

static TOKENIZERS: LazyLock<Vec<Tokenizer>> = LazyLock::new(|| {
    let file: &'static [u8] = include_bytes!("../../../crates/engine/assets/pocket-q8_0.gguf");
    let bundled = Gguf::from_bytes(file).expect("the bundled model is sound");
    let shared = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/assets/vocab");
    let mut files: Vec<_> =
        std::fs::read_dir(shared).into_iter().flatten().flatten().map(|f| f.path()).collect();
    files.retain(|file| file.extension().is_some_and(|extension| extension == "gguf"));
    files.sort();
    let shared = files.into_iter().map(|file| Gguf::open(file).expect("the shared vocabularies are sound"));
    let open = |gguf| Tokenizer::from_gguf(&gguf).expect("the tokenizer is known");
    std::iter::once(bundled).chain(shared).map(open).collect()
});

/// Tests the tokenizer that the first byte selects: text must survive encoding and decoding, at
/// once and token by token; all tokens must be in the vocabulary; and text must give control tokens
/// only where it is trusted.
///
/// # Panics
///
/// If the property is violated.
pub fn tokenizer(bytes: &[u8]) -> bool {
    let Some((&which, bytes)) = bytes.split_first() else { return false };
    let text = String::from_utf8_lossy(bytes);
    let tokenizer = &TOKENIZERS[usize::from(which) % TOKENIZERS.len()];
    let ids = match tokenizer.encode(&text, Special::AsText, false) {
        Ok(ids) => ids,
        // Some shared vocabularies lack control characters; the bundled one is complete.
        Err(TokenizerError::NoToken { .. }) if usize::from(which) % TOKENIZERS.len() > 0 => return false,
        Err(error) => panic!("{text:?}: {error}"),
    };
    assert!(ids.iter().all(|&id| (id as usize) < tokenizer.n_vocab()));
    assert!(ids.len() >= tokenizer.min_tokens(&text));
    // BERT's vocabularies mark the unknown token, which stands for text, as control.
    let unknown = tokenizer.special().unk;
    let is_control = |&&id: &&u32| tokenizer.kind(id) == Some(TokenKind::Control) && unknown != Some(id);
    assert_eq!(ids.iter().find(is_control), None, "a control token in {text:?}");
    // WordPiece lowercases and strips, and an old vocabulary without bytes has tokens for
    // characters that it cannot represent.
    let is_faithful = tokenizer.model() != TokenizerModel::Bert
        && !ids.iter().any(|&id| tokenizer.kind(id) == Some(TokenKind::Unknown));
    if is_faithful {
        // SentencePiece has one character for a space and its mark.
        let is_bytes = matches!(tokenizer.model(), TokenizerModel::Gpt2 | TokenizerModel::Rwkv);
        let strips = strips(tokenizer, &text);
        let text = tokenizer.normalize(&text);
        let text = if is_bytes { text } else { text.replace('\u{2581}', " ").into() };
        assert!(ids.len() <= text.len() + 1);
        if !strips {
            assert_eq!(tokenizer.decode(&ids), text);
            let mut stream = DecodeStream::default();
            let mut streamed: String = ids.iter().map(|&id| stream.push(tokenizer, id)).collect();
            streamed.push_str(&stream.flush());
            assert!(
                streamed == text || streamed.strip_prefix(' ') == Some(&text),
                "{streamed:?} of {text:?}"
            );
        }
    }
    let parsed = tokenizer.encode(&text, Special::Parse, true).expect("every byte has a token");
    assert!(parsed.iter().all(|&id| (id as usize) < tokenizer.n_vocab()));
    // An empty trusted set equals plain text, a full one equals parsing.
    assert_eq!(tokenizer.encode(&text, Special::Within(&[]), false).expect("as above"), ids);
    let all = std::ops::Range { start: 0, end: text.len() };
    assert_eq!(tokenizer.encode(&text, Special::Within(&[all]), true).expect("as above"), parsed);
    std::str::from_utf8(bytes).is_ok()
}

/// Returns whether the text contains a token that strips following white space, or that restarts
/// the text, where that changes the result.
fn strips(tokenizer: &Tokenizer, text: &str) -> bool {
    let user_defined = |id: u32| tokenizer.kind(id) == Some(TokenKind::UserDefined);
    (tokenizer.model() == TokenizerModel::Llama || tokenizer.normalize(text) != text)
        && tokenizer.encode(text, Special::AsText, false).is_ok_and(|ids| ids.into_iter().any(user_defined))
}

/// Returns texts with patterns of pre-tokenizers and special tokens, for each tokenizer.
pub(crate) fn seeds() -> Vec<Vec<u8>> {
    let texts = [
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
        "It's 3.14159, isn't it?\r\n\r\n\tx = {\"a\": [1, 22, 333]};  // done   ",
        "Grüße, 你好, Здравствуй, नमस्ते, 🚀👩‍🚀 e\u{301} \u{a0}\u{2003}<|endoftext|>",
        "</s><s>[INST] x\n\n\n[/INST]<end_of_turn><|eot_id|><pad>\u{2581}<0x41><|end|>",
        "",
    ];
    let long = ["    ".repeat(500), "a".repeat(700), "e\u{301}🚀".repeat(99)];
    let texts = texts.map(str::to_owned).into_iter().chain(long);
    let all = 0..TOKENIZERS.len() as u8;
    texts.flat_map(|text| all.clone().map(move |which| [&[which], text.as_bytes()].concat())).collect()
}
