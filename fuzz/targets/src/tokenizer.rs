//! Tokenizers on any text: that of the bundled model, and those of the shared vocabularies where they are.

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

/// Whether text comes back from its tokens as it was, at once and token by token; no text reaches beyond the vocabulary;
/// and no text becomes a control token unless it is trusted. The first byte chooses the tokenizer.
///
/// # Panics
/// If it does not.
pub fn tokenizer(bytes: &[u8]) -> bool {
    let Some((&which, bytes)) = bytes.split_first() else { return false };
    let text = String::from_utf8_lossy(bytes);
    let tokenizer = &TOKENIZERS[usize::from(which) % TOKENIZERS.len()];
    let ids = match tokenizer.encode(&text, Special::AsText, false) {
        Ok(ids) => ids,
        // Some shared vocabularies lack control characters; the bundled one lacks nothing.
        Err(TokenizerError::NoToken { .. }) if usize::from(which) % TOKENIZERS.len() > 0 => return false,
        Err(error) => panic!("{text:?}: {error}"),
    };
    assert!(ids.iter().all(|&id| (id as usize) < tokenizer.n_vocab()));
    assert!(ids.len() >= tokenizer.fewest_tokens(&text));
    // BERT's vocabularies mark the unknown token, which stands for text, as control.
    let unknown = tokenizer.special().unk;
    let is_control = |&&id: &&u32| tokenizer.kind(id) == Some(TokenKind::Control) && unknown != Some(id);
    assert_eq!(ids.iter().find(is_control), None, "a control token in {text:?}");
    // WordPiece lowers and strips, and an old vocabulary without bytes has tokens for what it cannot write.
    let is_faithful = tokenizer.model() != TokenizerModel::Bert
        && !ids.iter().any(|&id| tokenizer.kind(id) == Some(TokenKind::Unknown));
    if is_faithful {
        // SentencePiece has one character for a space and its mark.
        let is_bytes = tokenizer.model() == TokenizerModel::Gpt2;
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
    // Trust in nothing is text, trust in all is parsing.
    assert_eq!(tokenizer.encode(&text, Special::Within(&[]), false).expect("as above"), ids);
    let all = std::ops::Range { start: 0, end: text.len() };
    assert_eq!(tokenizer.encode(&text, Special::Within(&[all]), true).expect("as above"), parsed);
    std::str::from_utf8(bytes).is_ok()
}

/// Whether the text holds a token behind which white space is dropped, or which begins a text anew, where that makes a difference.
fn strips(tokenizer: &Tokenizer, text: &str) -> bool {
    let user_defined = |id: u32| tokenizer.kind(id) == Some(TokenKind::UserDefined);
    (tokenizer.model() == TokenizerModel::Llama || tokenizer.normalize(text) != text)
        && tokenizer.encode(text, Special::AsText, false).is_ok_and(|ids| ids.into_iter().any(user_defined))
}

/// Texts with what pre-tokenisers and special tokens look for, for each tokenizer.
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
