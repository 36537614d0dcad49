//! Incremental decoding of tokens to text.

use super::Tokenizer;

/// Decodes a stream of tokens to text without splitting characters.
///
/// A token may end in the middle of a UTF-8 sequence; its bytes then wait for the next one. Bytes
/// that cannot become UTF-8 read as U+FFFD, one for each maximal invalid sequence, exactly as
/// [`String::from_utf8_lossy`] decodes the whole. Control tokens write nothing.
///
/// ```
/// use kvant_text::tokenizer::{DecodeStream, Tokenizer, TokenizerModel, VocabData};
///
/// let mut data = VocabData::new(TokenizerModel::Gpt2, vec!["Ã".into(), "©".into()]);
/// data.merges = Some(vec![]);
/// let tokenizer = Tokenizer::new(data)?;
/// let mut stream = DecodeStream::default();
/// assert_eq!(stream.push(&tokenizer, 0), ""); // 0xC3: the first half of an é
/// assert_eq!(stream.push(&tokenizer, 1), "é");
/// assert_eq!(stream.flush(), "");
/// # Ok::<(), kvant_text::tokenizer::TokenizerError>(())
/// ```
///
/// A stream may start anywhere within a text, so no leading space is trimmed.
#[derive(Debug, Clone, Default)]
pub struct DecodeStream {
    /// An incomplete sequence, at most three bytes between calls.
    pending: Vec<u8>,
}

impl DecodeStream {
    /// Decodes one token and returns the characters that it completes, possibly none. An id outside
    /// of the vocabulary writes nothing.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> String {
        if tokenizer.vocab.is_visible(id) {
            self.push_bytes(tokenizer.token_bytes(id))
        } else {
            String::new()
        }
    }

    /// Ends the stream: returns U+FFFD for an incomplete character, or nothing.
    pub fn flush(&mut self) -> String {
        let cut = !std::mem::take(&mut self.pending).is_empty();
        if cut { char::REPLACEMENT_CHARACTER.to_string() } else { String::new() }
    }

    /// Incremental [`String::from_utf8_lossy`].
    fn push_bytes(&mut self, bytes: &[u8]) -> String {
        self.pending.extend_from_slice(bytes);
        let mut text = String::with_capacity(self.pending.len());
        let mut used = 0;
        for chunk in self.pending.utf8_chunks() {
            text.push_str(chunk.valid());
            used += chunk.valid().len();
            let invalid = chunk.invalid();
            // At the very end, an incomplete sequence waits for more bytes.
            let at_end = used + invalid.len() == self.pending.len();
            if at_end && std::str::from_utf8(invalid).is_err_and(|e| e.error_len().is_none()) {
                break;
            }
            if !invalid.is_empty() {
                text.push(char::REPLACEMENT_CHARACTER);
                used += invalid.len();
            }
        }
        self.pending.drain(..used);
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_split_of_any_bytes_decodes_as_the_whole() {
        let samples: [&[u8]; 7] = [
            "héllo 世界 🚀 end".as_bytes(),
            b"\xF0\x9F\x9A",
            b"a\xFFb\xC3",
            b"\xE2\x82",
            b"\xF0\x9F\xC3\xA9",
            b"\xED\xA0\x80x",
            b"",
        ];
        for bytes in samples {
            for step in 1..=bytes.len().max(1) {
                let mut s = DecodeStream::default();
                let mut got = String::new();
                for chunk in bytes.chunks(step) {
                    got.push_str(&s.push_bytes(chunk));
                }
                got.push_str(&s.flush());
                assert_eq!(got, String::from_utf8_lossy(bytes), "{bytes:?} by {step}");
            }
        }
    }
}
