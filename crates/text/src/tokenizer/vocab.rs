//! A vocabulary: the validated tokens of a GGUF file, indexed by bytes.

use std::hash::BuildHasher;

use hashbrown::{DefaultHashBuilder, HashTable};

use super::bytes;
use super::error::TokenizerError;
use super::model::TokenizerModel;
use super::normalizer::Normalizer;
use super::special::AddedTokens;

/// The kind of a token (`tokenizer.ggml.token_type`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenKind {
    /// A piece of text.
    Normal,
    /// Replaces text that no other token covers.
    Unknown,
    /// Structure, not text: BOS, end of turn, ... Plain text never becomes one.
    Control,
    /// Matched whole wherever its text occurs, before anything else is tokenized.
    UserDefined,
    /// A filler.
    Unused,
    /// One raw byte.
    Byte,
}

impl TokenKind {
    /// Converts GGUF's type code; 0, "undefined", counts as unused.
    fn from_code(id: u32, code: i32) -> Result<Self, TokenizerError> {
        Ok(match code {
            1 => Self::Normal,
            2 => Self::Unknown,
            3 => Self::Control,
            4 => Self::UserDefined,
            0 | 5 => Self::Unused,
            6 => Self::Byte,
            got => return Err(TokenizerError::TokenType { id, got }),
        })
    }
}

/// The special ids. `None`: the vocabulary has no such token.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SpecialIds {
    /// Beginning of sequence.
    pub bos: Option<u32>,
    /// End of sequence.
    pub eos: Option<u32>,
    /// End of turn.
    pub eot: Option<u32>,
    /// End of a message that calls a tool.
    pub eom: Option<u32>,
    /// Unknown token.
    pub unk: Option<u32>,
    /// Separator of two texts (BERT).
    pub sep: Option<u32>,
    /// Padding of a batch.
    pub pad: Option<u32>,
    /// Beginning of a text (BERT).
    pub cls: Option<u32>,
    /// Masked word (BERT).
    pub mask: Option<u32>,
    /// Padding after a fill-in-the-middle completion.
    pub fim_pad: Option<u32>,
    /// Start of another repository in fill-in-the-middle models.
    pub fim_rep: Option<u32>,
    /// Start of another file in fill-in-the-middle models.
    pub fim_sep: Option<u32>,
}

impl SpecialIds {
    /// Returns the ids with their metadata keys.
    pub(super) fn keyed(&mut self) -> [(&'static str, &mut Option<u32>); 12] {
        [
            ("tokenizer.ggml.bos_token_id", &mut self.bos),
            ("tokenizer.ggml.eos_token_id", &mut self.eos),
            ("tokenizer.ggml.eot_token_id", &mut self.eot),
            ("tokenizer.ggml.eom_token_id", &mut self.eom),
            ("tokenizer.ggml.unknown_token_id", &mut self.unk),
            // The format itself spells it so.
            ("tokenizer.ggml.seperator_token_id", &mut self.sep),
            ("tokenizer.ggml.padding_token_id", &mut self.pad),
            ("tokenizer.ggml.cls_token_id", &mut self.cls),
            ("tokenizer.ggml.mask_token_id", &mut self.mask),
            ("tokenizer.ggml.fim_pad_token_id", &mut self.fim_pad),
            ("tokenizer.ggml.fim_rep_token_id", &mut self.fim_rep),
            ("tokenizer.ggml.fim_sep_token_id", &mut self.fim_sep),
        ]
    }
}

/// The unvalidated data of a vocabulary, as in a GGUF file.
#[derive(Debug, Clone, PartialEq)]
pub struct VocabData {
    /// `tokenizer.ggml.model`.
    pub model: TokenizerModel,
    /// `tokenizer.ggml.pre`; only byte-level BPE reads it.
    pub pre: Option<String>,
    /// `tokenizer.ggml.tokens` `[n_vocab]`.
    pub tokens: Vec<String>,
    /// `tokenizer.ggml.scores` `[n_vocab]`.
    pub scores: Option<Vec<f32>>,
    /// `tokenizer.ggml.token_type` `[n_vocab]`; absent: all normal.
    pub token_types: Option<Vec<i32>>,
    /// `tokenizer.ggml.merges`, best first, each "left right".
    pub merges: Option<Vec<String>>,
    /// The special ids that the file defines.
    pub special: SpecialIds,
    /// `tokenizer.ggml.add_bos_token`.
    pub add_bos: Option<bool>,
    /// `tokenizer.ggml.add_eos_token`.
    pub add_eos: Option<bool>,
    /// `tokenizer.ggml.add_sep_token`; WordPiece ignores it, unigram models add one if absent.
    pub add_sep: Option<bool>,
    /// `tokenizer.ggml.add_space_prefix`.
    pub add_space_prefix: Option<bool>,
    /// Whether special tokens absorb the whitespace after them (Phi-3). Applies only without
    /// `added`.
    pub strip_after_special: bool,
    /// The normalizer of plain text; `None`: as the pre-tokenizer implies.
    pub normalizer: Option<Normalizer>,
    /// Matching properties of special tokens; `None`: matched wherever their text occurs.
    pub added: Option<AddedTokens>,
    /// `tokenizer.ggml.normalizer.lowercase`; only WordPiece reads it, which lowercases if absent.
    pub lowercase: Option<bool>,
    /// `tokenizer.ggml.normalizer.strip_accents`; absent: as `lowercase`.
    pub strip_accents: Option<bool>,
}

impl VocabData {
    /// Creates a vocabulary of `tokens` with all other keys absent.
    pub fn new(model: TokenizerModel, tokens: Vec<String>) -> Self {
        VocabData {
            model,
            pre: None,
            tokens,
            scores: None,
            token_types: None,
            merges: None,
            special: SpecialIds::default(),
            add_bos: None,
            add_eos: None,
            add_sep: None,
            add_space_prefix: None,
            strip_after_special: false,
            normalizer: None,
            added: None,
            lowercase: None,
            strip_accents: None,
        }
    }
}

/// Tokens, their kinds, and the bytes that each one writes.
#[derive(Debug, Clone)]
pub(super) struct Vocab {
    texts: Vec<String>,
    kinds: Vec<TokenKind>,
    /// The concatenated bytes of all tokens.
    arena: Vec<u8>,
    /// Token `i` writes `arena[bounds[i]..bounds[i + 1]]`  [n_vocab + 1].
    bounds: Vec<u32>,
    /// Bytes of the longest token.
    pub(super) longest: usize,
    /// Ids by the bytes that they write.
    by_bytes: HashTable<u32>,
    hasher: DefaultHashBuilder,
    /// The token of each single byte, if any.
    pub(super) byte_ids: [Option<u32>; 256],
    /// Control tokens whose text is part of the output.
    visible: Vec<u32>,
}

impl Vocab {
    /// Validates `tokens` and `token_types` and indexes them by the bytes that each token writes.
    pub(super) fn new(
        model: TokenizerModel,
        tokens: Vec<String>,
        token_types: Option<&[i32]>,
    ) -> Result<Self, TokenizerError> {
        let bytes: usize = tokens.iter().map(String::len).sum();
        // Ids and arena offsets are 32 bits wide; u32::MAX is reserved as "no token".
        let max = u32::MAX as usize - 1;
        if tokens.is_empty() || tokens.len() > max || bytes > max {
            return Err(TokenizerError::VocabSize { got: tokens.len(), max });
        }
        if let Some(types) = token_types
            && types.len() != tokens.len()
        {
            let (expected, got) = (tokens.len(), types.len());
            return Err(TokenizerError::Length { key: "tokenizer.ggml.token_type", expected, got });
        }
        let mut vocab = Vocab {
            kinds: Vec::with_capacity(tokens.len()),
            arena: Vec::with_capacity(bytes),
            bounds: Vec::with_capacity(tokens.len() + 1),
            longest: 0,
            by_bytes: HashTable::with_capacity(tokens.len()),
            hasher: DefaultHashBuilder::default(),
            byte_ids: [None; 256],
            texts: Vec::new(),
            visible: Vec::new(),
        };
        vocab.bounds.push(0);
        for (id, text) in tokens.iter().enumerate() {
            let id = id as u32;
            let code = token_types.map_or(1, |t| t[id as usize]);
            vocab.push(model, id, text, TokenKind::from_code(id, code)?)?;
        }
        vocab.texts = tokens;
        vocab.index();
        Ok(vocab)
    }

    /// Appends token `id`: its kind and the bytes that it writes.
    fn push(
        &mut self,
        model: TokenizerModel,
        id: u32,
        text: &str,
        mut kind: TokenKind,
    ) -> Result<(), TokenizerError> {
        let mut key = Vec::new();
        let fallback = matches!(model, TokenizerModel::Llama | TokenizerModel::Gemma4)
            .then(|| bytes::fallback_byte(text))
            .flatten();
        // Old converters left the byte tokens of a SentencePiece vocabulary marked as normal.
        if fallback.is_some() && kind == TokenKind::Normal {
            kind = TokenKind::Byte;
        }
        match (kind, fallback) {
            (TokenKind::Byte, Some(b)) => {
                self.arena.push(b);
                self.byte_ids[usize::from(b)].get_or_insert(id);
            }
            (TokenKind::Byte, None) => {
                return Err(TokenizerError::ByteToken { id, text: text.to_owned() });
            }
            (TokenKind::Normal | TokenKind::Unused, _) => {
                bytes::decode_spelling(model, text, &mut key);
                self.arena.extend_from_slice(&key);
            }
            _ => self.arena.extend_from_slice(text.as_bytes()),
        }
        self.kinds.push(kind);
        let begin = self.bounds.last().map_or(0, |&begin| begin as usize);
        self.longest = self.longest.max(self.arena.len() - begin);
        self.bounds.push(self.arena.len() as u32);
        Ok(())
    }

    /// Fills the lookup tables. Two tokens may write the same bytes (`ĠĠ` and a user-defined run of
    /// two spaces), and some files have two equal texts (Gemma 4's). The normal token has priority,
    /// then the first.
    fn index(&mut self) {
        let Vocab { kinds, arena, bounds, by_bytes, hasher, byte_ids, .. } = self;
        let piece = |id: u32| &arena[bounds[id as usize] as usize..bounds[id as usize + 1] as usize];
        for id in 0..kinds.len() as u32 {
            let (kind, key) = (kinds[id as usize], piece(id));
            if kind == TokenKind::Byte || key.is_empty() {
                continue;
            }
            let hash = hasher.hash_one(key);
            match by_bytes.find_mut(hash, |&other| piece(other) == key) {
                Some(other) => {
                    if kinds[*other as usize] != TokenKind::Normal && kind == TokenKind::Normal {
                        *other = id;
                    }
                }
                None => {
                    by_bytes.insert_unique(hash, id, |&other| hasher.hash_one(piece(other)));
                }
            }
        }
        for b in 0..=255u8 {
            let found = by_bytes.find(hasher.hash_one([b].as_slice()), |&id| piece(id) == [b]);
            if let (None, Some(&id)) = (byte_ids[usize::from(b)], found)
                && kinds[id as usize] == TokenKind::Normal
            {
                byte_ids[usize::from(b)] = Some(id);
            }
        }
    }

    /// Returns the number of tokens.
    pub(super) fn len(&self) -> usize {
        self.kinds.len()
    }

    /// Returns the token's text as in the file; `None` for an id out of range.
    pub(super) fn text(&self, id: u32) -> Option<&str> {
        self.texts.get(id as usize).map(String::as_str)
    }

    /// Returns the token's kind; `None` for an id out of range.
    pub(super) fn kind(&self, id: u32) -> Option<TokenKind> {
        self.kinds.get(id as usize).copied()
    }

    /// Overrides the kind of a token in range.
    pub(super) fn set_kind(&mut self, id: u32, kind: TokenKind) {
        self.kinds[id as usize] = kind;
    }

    /// Includes the text of a control token in the output.
    pub(super) fn show(&mut self, id: u32) {
        self.visible.push(id);
    }

    /// Whether the output includes the text of this token.
    pub(super) fn is_visible(&self, id: u32) -> bool {
        self.is_text(id) || self.visible.contains(&id)
    }

    /// Returns the bytes that the token writes; `None` for an id out of range.
    pub(super) fn bytes(&self, id: u32) -> Option<&[u8]> {
        let i = id as usize;
        (i < self.len()).then(|| &self.arena[self.bounds[i] as usize..self.bounds[i + 1] as usize])
    }

    /// Returns the token, of any kind but a byte, that writes `key`.
    pub(super) fn find(&self, key: &[u8]) -> Option<u32> {
        self.by_bytes.find(self.hasher.hash_one(key), |&id| self.bytes(id) == Some(key)).copied()
    }

    /// Returns the token that plain text `key` may become: never control, never unknown.
    pub(super) fn find_text(&self, key: &[u8]) -> Option<u32> {
        self.find(key).filter(|&id| self.is_text(id))
    }

    /// Whether plain text may become this token.
    pub(super) fn is_text(&self, id: u32) -> bool {
        !matches!(self.kind(id), None | Some(TokenKind::Control | TokenKind::Unknown))
    }

    /// Returns the token of exactly this text, as in the file.
    pub(super) fn find_exact(&self, model: TokenizerModel, text: &str) -> Option<u32> {
        let mut key = Vec::with_capacity(text.len());
        bytes::decode_spelling(model, text, &mut key);
        // A special token's text is not encoded in the alphabet of the others.
        [key.as_slice(), text.as_bytes()]
            .into_iter()
            .filter_map(|key| self.find(key))
            .find(|&id| self.text(id) == Some(text))
    }
}
