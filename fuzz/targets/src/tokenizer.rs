//! The tokenizer of the bundled model on any text.

use std::sync::LazyLock;

use kvant::{DecodeStream, Gguf, Special, Tokenizer};

static BUNDLED: LazyLock<Tokenizer> = LazyLock::new(|| {
    let file: &'static [u8] = include_bytes!("../../../assets/model/pocket-q8_0.gguf");
    let gguf = Gguf::from_bytes(file).expect("the bundled model is sound");
    Tokenizer::from_gguf(&gguf).expect("the bundled model has a tokenizer")
});

/// Whether text comes back from its tokens as it was, at once and token by token, and no text reaches beyond the vocabulary.
///
/// # Panics
/// If it does not.
pub fn tokenizer(bytes: &[u8]) -> bool {
    let text = String::from_utf8_lossy(bytes);
    let tokenizer = &*BUNDLED;
    let ids =
        tokenizer.encode(&text, Special::AsText, false).expect("a byte-level vocabulary has every byte");
    assert_eq!(tokenizer.decode(&ids), text);
    assert!(ids.len() <= text.len() && ids.iter().all(|&id| (id as usize) < tokenizer.n_vocab()));
    let mut stream = DecodeStream::default();
    let mut streamed: String = ids.iter().map(|&id| stream.push(tokenizer, id)).collect();
    streamed.push_str(&stream.flush());
    assert_eq!(streamed, text);

    let parsed =
        tokenizer.encode(&text, Special::Parse, true).expect("a byte-level vocabulary has every byte");
    assert!(parsed.iter().all(|&id| (id as usize) < tokenizer.n_vocab()));
    std::str::from_utf8(bytes).is_ok()
}

/// Texts with what pre-tokenisers and special tokens look for.
pub(crate) fn seeds() -> Vec<Vec<u8>> {
    let texts = [
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
        "It's 3.14159, isn't it?\r\n\r\n\tx = {\"a\": [1, 22, 333]};  // done   ",
        "Grüße, 你好, Здравствуй, नमस्ते, 🚀👩‍🚀 e\u{301} \u{a0}\u{2003}<|endoftext|>",
        "",
    ];
    texts.map(|text| text.as_bytes().to_vec()).to_vec()
}
