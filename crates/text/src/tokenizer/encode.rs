//! Encodes text to tokens.

use std::ops::Range;

use super::bytes;
use super::error::TokenizerError;
use super::merge::Merger;
use super::model::TokenizerModel;
use super::special::Segment;
use super::{Method, Special, Tokenizer};

impl Tokenizer {
    /// Encodes `text`.
    ///
    /// `add_bos_eos` adds BOS and EOS as the vocabulary specifies. BOS is not added to a text that
    /// already parses to one, since templates often write their own.
    ///
    /// Time is linear in the text, except for a logarithm in the length of words that are not
    /// repetitive.
    ///
    /// # Errors
    /// [`TokenizerError::NoToken`] if the vocabulary cannot write some byte of the text and has no
    /// unknown token; [`TokenizerError::TextSize`] from 4 GiB on.
    pub fn encode(
        &self,
        text: &str,
        special: Special<'_>,
        add_bos_eos: bool,
    ) -> Result<Vec<u32>, TokenizerError> {
        let mut ids =
            if add_bos_eos { self.encode_prompt(text, special)? } else { self.plain(text, special)?.out };
        if add_bos_eos && self.add_eos {
            ids.extend(self.special.eos);
        }
        Ok(ids)
    }

    /// Encodes a prompt: adds BOS as the vocabulary specifies, but never EOS, since the text is to
    /// be continued.
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    pub fn encode_prompt(&self, text: &str, special: Special<'_>) -> Result<Vec<u32>, TokenizerError> {
        let Encoding { mut out, begins_with, .. } = self.plain(text, special)?;
        if let Some(bos) = self.special.bos.filter(|&bos| self.add_bos && begins_with != Some(bos)) {
            out.insert(0, bos);
        }
        Ok(out)
    }

    /// Encodes exactly `text`, as if within another text: without normalization, space prefix or
    /// special tokens.
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    pub fn encode_exact(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        check_size(text)?;
        let mut encoding = Encoding::new(self, text);
        encoding.after_special = false;
        encoding.stretch(text)?;
        Ok(encoding.out)
    }

    /// Encodes a text without BOS and EOS.
    fn plain(&self, text: &str, special: Special<'_>) -> Result<Encoding<'_>, TokenizerError> {
        check_size(text)?;
        let all = 0..text.len();
        let own = match special {
            Special::Parse => std::slice::from_ref(&all),
            Special::AsText => &[],
            Special::Within(ranges) => ranges,
        };
        let mut encoding = Encoding::new(self, text);
        let mut own_left = own;
        for part in self.partitions.given.parts(text, own) {
            match part {
                Segment::Token(id) => encoding.token(id),
                Segment::Text(range) => {
                    let own = within(text, &range, &mut own_left);
                    encoding.piece(&text[range], &own)?;
                }
            }
        }
        Ok(encoding)
    }
}

fn check_size(text: &str) -> Result<(), TokenizerError> {
    if text.len() >= u32::MAX as usize {
        return Err(TokenizerError::TextSize { got: text.len() });
    }
    Ok(())
}

/// Returns the parts of the ranges `own` of `text` within `piece`, relative to its start. Drops the
/// ranges from the ascending `own` that end before `piece`.
fn within(text: &str, piece: &Range<usize>, own: &mut &[Range<usize>]) -> Vec<Range<usize>> {
    let n_before = own.iter().take_while(|range| range.end <= piece.start).count();
    *own = &own[n_before..];
    let mut at = piece.start;
    let mut found = Vec::new();
    for range in own.iter().take_while(|range| range.start < piece.end) {
        let (start, end) = (range.start.max(at), range.end.min(piece.end));
        if text.get(range.clone()).is_some() && start < end {
            found.push(start - piece.start..end - piece.start);
            at = end;
        }
    }
    found
}

/// State of encoding one text.
struct Encoding<'t> {
    tokenizer: &'t Tokenizer,
    out: Vec<u32>,
    /// The special token at the start of the text.
    begins_with: Option<u32>,
    /// Whether the last token was special; the start of a text counts as special.
    after_special: bool,
    merger: Merger,
    spaced: String,
}

impl<'t> Encoding<'t> {
    fn new(tokenizer: &'t Tokenizer, text: &str) -> Self {
        Encoding {
            tokenizer,
            out: Vec::with_capacity(text.len() / 3 + 4),
            begins_with: None,
            after_special: true,
            merger: Merger::default(),
            spaced: String::new(),
        }
    }

    fn token(&mut self, id: u32) {
        if self.out.is_empty() {
            self.begins_with = Some(id);
        }
        self.out.push(id);
        self.after_special = true;
    }

    /// Encodes text between the special tokens that are matched before normalization. Tokens
    /// matched after normalization may occur within the ranges `own`.
    fn piece(&mut self, text: &str, own: &[Range<usize>]) -> Result<(), TokenizerError> {
        let Tokenizer { normalizer, partitions, .. } = self.tokenizer;
        let Some(partition) = &partitions.normalized else {
            return self.stretch(&normalizer.apply(text, &[]).text);
        };
        let normalized = normalizer.apply(text, own);
        for part in partition.parts(&normalized.text, &normalized.ranges) {
            match part {
                Segment::Token(id) => self.token(id),
                Segment::Text(range) => self.stretch(&normalized.text[range])?,
            }
        }
        Ok(())
    }

    /// Encodes text without special tokens.
    fn stretch(&mut self, text: &str) -> Result<(), TokenizerError> {
        let Tokenizer { vocab, method, model, add_space_prefix, .. } = self.tokenizer;
        let has_space = *model == TokenizerModel::T5 && text.starts_with([' ', bytes::SPACE_MARK]);
        let prefix = *add_space_prefix && self.after_special && !text.is_empty() && !has_space;
        self.after_special &= text.is_empty();
        // SentencePiece's alphabet does not distinguish a space from its mark.
        let is_marked = matches!(model, TokenizerModel::Llama | TokenizerModel::Gemma4 | TokenizerModel::T5);
        let marked = is_marked && text.contains(bytes::SPACE_MARK);
        let mut text = text;
        if prefix || marked {
            self.spaced.clear();
            if prefix {
                self.spaced.push(' ');
            }
            self.spaced.extend(text.chars().map(|c| if c == bytes::SPACE_MARK { ' ' } else { c }));
            text = &self.spaced;
        }
        match method {
            Method::Bpe(m) => m.encode(vocab, text, &mut self.merger, &mut self.out),
            Method::Spm(m) => m.encode(vocab, text, &mut self.merger, &mut self.out),
            Method::Unigram(m) => {
                m.encode(vocab, text, &mut self.out);
                Ok(())
            }
            Method::WordPiece(m) => {
                m.encode(vocab, text, &mut self.out);
                Ok(())
            }
            Method::Rwkv(m) => m.encode(vocab, text, &mut self.out),
        }
    }
}
