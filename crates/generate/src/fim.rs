//! Fill-in-the-middle (FIM): prefix, suffix and the model's special tokens for them.

use kvant_gguf::Gguf;
use kvant_text::tokenizer::{Special, Tokenizer, TokenizerError};

/// FIM tokens of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FimTokens {
    /// Precedes the prefix.
    pub prefix: u32,
    /// Precedes the suffix.
    pub suffix: u32,
    /// Precedes the middle to generate.
    pub middle: u32,
    /// Separates files.
    pub file: Option<u32>,
}

impl FimTokens {
    /// Returns the FIM tokens of a model file: by the keys of newer files, of older files, or by
    /// the names of the best known models.
    pub fn of(gguf: &Gguf, tokenizer: &Tokenizer) -> Option<Self> {
        let meta = gguf.meta();
        let named = |keys: [&str; 2], texts: &[&str]| {
            let by_key =
                |key: &&str| meta.find::<u32>(&format!("tokenizer.ggml.{key}_token_id")).ok().flatten();
            let id = keys.iter().find_map(by_key);
            let id = id.or_else(|| texts.iter().find_map(|text| tokenizer.token_id(text)));
            id.filter(|&id| (id as usize) < tokenizer.n_vocab())
        };
        Some(Self {
            prefix: named(
                ["fim_pre", "prefix"],
                &["<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<PRE>"],
            )?,
            suffix: named(
                ["fim_suf", "suffix"],
                &["<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<SUF>"],
            )?,
            middle: named(
                ["fim_mid", "middle"],
                &["<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<MID>"],
            )?,
            file: named(["fim_sep", "file_separator"], &["<|file_sep|>", "<|file_separator|>"]),
        })
    }
}

/// Text around a gap.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FimText {
    /// Text before the gap.
    pub prefix: String,
    /// Text behind the gap.
    pub suffix: String,
    /// Further files, the most recently edited last.
    pub files: Vec<FimFile>,
}

/// File beside the one with the gap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FimFile {
    /// Name.
    pub name: String,
    /// Text.
    pub text: String,
}

impl FimText {
    /// Returns the size of the longest text in bytes.
    pub fn n_bytes(&self) -> usize {
        let files = self.files.iter().map(|file| file.name.len() + file.text.len());
        files.chain([self.prefix.len(), self.suffix.len()]).max().unwrap_or(0)
    }

    /// Returns the prompt for a context of `n_ctx` tokens. Files that do not fit are omitted, the
    /// first ones first; prefix and suffix are never truncated.
    ///
    /// # Errors
    /// A text that cannot be encoded.
    pub fn prompt(
        &self,
        tokens: &FimTokens,
        tokenizer: &Tokenizer,
        n_ctx: usize,
    ) -> Result<Vec<u32>, TokenizerError> {
        let bos = tokenizer.bos().filter(|_| tokenizer.adds_bos());
        self.layout(tokens, bos, n_ctx, |text| tokenizer.encode(text, Special::AsText, false))
    }

    fn layout(
        &self,
        tokens: &FimTokens,
        bos: Option<u32>,
        n_ctx: usize,
        encode: impl Fn(&str) -> Result<Vec<u32>, TokenizerError>,
    ) -> Result<Vec<u32>, TokenizerError> {
        let mut around: Vec<u32> = vec![tokens.prefix];
        around.extend(encode(&self.prefix)?);
        around.push(tokens.suffix);
        around.extend(encode(&self.suffix)?);
        around.push(tokens.middle);
        let mut files: Vec<Vec<u32>> = Vec::new();
        let mut room = (n_ctx / 2).saturating_sub(around.len());
        for FimFile { name, text } in self.files.iter().rev() {
            let mut file: Vec<u32> = tokens.file.into_iter().collect();
            file.extend(encode(&format!("{name}\n{text}\n"))?);
            if file.len() > room {
                break;
            }
            room -= file.len();
            files.push(file);
        }
        let files = files.into_iter().rev().flatten();
        Ok(bos.into_iter().chain(files).chain(around).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKENS: FimTokens = FimTokens { prefix: 1001, suffix: 1002, middle: 1003, file: Some(1004) };

    /// Encodes each byte as a token.
    fn bytes(text: &str) -> Result<Vec<u32>, TokenizerError> {
        Ok(text.bytes().map(u32::from).collect())
    }

    #[test]
    fn prefix_and_suffix_are_never_truncated_and_last_files_stay() {
        let file = |name: &str, text: &str| FimFile { name: name.to_owned(), text: text.to_owned() };
        let files = vec![file("tmp", "0123456789"), file("b", "xy")];
        let gap = FimText { prefix: "f(a".to_owned(), suffix: ")".to_owned(), files };
        let around = [1001, 102, 40, 97, 1002, 41, 1003];
        let all = gap.layout(&TOKENS, Some(1), 100, bytes).unwrap();
        assert_eq!((all[0], &all[all.len() - 7..]), (1, &around[..]));
        assert_eq!(all.iter().filter(|&&token| token == 1004).count(), 2);
        // Room for seven and six tokens: the second file only.
        let some = gap.layout(&TOKENS, None, 26, bytes).unwrap();
        assert_eq!(some, [&[1004, 98, 10, 120, 121, 10][..], &around].concat());
        assert_eq!(gap.layout(&TOKENS, None, 2, bytes).unwrap(), around);
    }
}
