//! Recipes as text: the type of each matrix by the name of its tensor and its layer.

use std::str::FromStr;

use kvant_codec::DType;

use crate::recipe::{Recipe, layer};

/// A recipe that comes with this crate.
pub(crate) struct BuiltIn {
    pub name: &'static str,
    text: &'static str,
}

/// Recipes that come with this crate, besides llama.cpp's mixes.
pub(crate) static BUILT_IN: [BuiltIn; 1] =
    [BuiltIn { name: "config_i", text: include_str!("recipes/config_i.recipe") }];

impl BuiltIn {
    pub(crate) fn parsed(&self) -> RecipeFile {
        self.text.parse().expect("tests parse every text")
    }
}

/// Why a text is no recipe.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: expected {expected}, got {got:?}")]
pub struct RecipeFileError {
    /// The line, counted from 1.
    pub line: usize,
    /// What it may be.
    pub expected: &'static str,
    /// What it is.
    pub got: String,
}

/// The lines of a recipe; the first has all matrices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RecipeFile {
    lines: Vec<Line>,
}

/// A type, and the matrices that have it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Line {
    dtype: DType,
    matrices: Vec<Selector>,
}

/// Selects matrices.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Selector {
    All,
    /// Those of the first layers.
    First(usize),
    /// Those of the last layers.
    Last(usize),
    /// Those with a name of which a part, between dots, begins so.
    Named(String),
}

impl RecipeFile {
    /// Returns the type that the first line has for all.
    pub(crate) fn main_type(&self) -> DType {
        self.lines[0].dtype
    }

    /// Returns the type of a matrix of a model of `n_layers`.
    pub(crate) fn type_of(&self, tensor: &str, n_layers: usize) -> DType {
        let has = |line: &&Line| line.matrices.iter().any(|of| of.selects(tensor, n_layers));
        self.lines.iter().rev().find(has).map_or(self.main_type(), |line| line.dtype)
    }
}

impl Selector {
    fn selects(&self, tensor: &str, n_layers: usize) -> bool {
        match self {
            Self::All => true,
            Self::First(n) => layer(tensor).is_some_and(|index| index < *n),
            Self::Last(n) => layer(tensor).is_some_and(|index| index >= n_layers.saturating_sub(*n)),
            // attn_output is no output.
            Self::Named(name) => {
                tensor.match_indices(name.as_str()).any(|(at, _)| at == 0 || tensor[..at].ends_with('.'))
            }
        }
    }

    /// Parses a word; the error is what was expected.
    fn parse(word: &str) -> Result<Self, &'static str> {
        match word.split_once(':') {
            None if word == "*" => Ok(Self::All),
            None => Ok(Self::Named(word.to_owned())),
            Some((end, n)) => match (end, n.parse()) {
                ("first", Ok(n)) => Ok(Self::First(n)),
                ("last", Ok(n)) => Ok(Self::Last(n)),
                _ => Err("first:N or last:N"),
            },
        }
    }
}

impl FromStr for RecipeFile {
    type Err = RecipeFileError;

    fn from_str(text: &str) -> Result<Self, RecipeFileError> {
        let fail = |line: usize, expected: &'static str, got: &str| RecipeFileError {
            line: line + 1,
            expected,
            got: got.to_owned(),
        };
        let mut lines = Vec::new();
        for (at, line) in text.lines().enumerate() {
            let mut words = line.split('#').next().unwrap_or_default().split_whitespace();
            let Some(name) = words.next() else { continue };
            let dtype = file_type(name).ok_or_else(|| fail(at, "a weight type that files hold", name))?;
            let matrices =
                words.map(|word| Selector::parse(word).map_err(|expected| fail(at, expected, word)));
            let matrices = matrices.collect::<Result<Vec<_>, _>>()?;
            if matrices.is_empty() {
                return Err(fail(at, "matrices after the type", line));
            }
            if lines.is_empty() && !matrices.contains(&Selector::All) {
                return Err(fail(at, "a type for all matrices (*) first", line));
            }
            lines.push(Line { dtype, matrices });
        }
        match lines.is_empty() {
            true => Err(fail(0, "a type for all matrices (*) first", "")),
            false => Ok(Self { lines }),
        }
    }
}

/// Returns the type of this name, if files can hold it.
fn file_type(name: &str) -> Option<DType> {
    let is_it = |dtype: &DType| crate::quantize::stored_name(*dtype).eq_ignore_ascii_case(name);
    DType::weights().find(is_it).filter(|dtype| Recipe::from(*dtype).file_type().is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_line_with_a_matrix_counts() {
        let text =
            "# A test.\n\nq4_K *\nq6_K ffn_down attn_v # sensitive\nIQ3_S first:1\nq8_0 last:2 output\n";
        let file: RecipeFile = text.parse().unwrap();
        assert_eq!(file.main_type(), DType::Q4K);
        for (tensor, want) in [
            ("blk.0.ffn_down.weight", DType::IQ3),
            ("blk.1.ffn_down.weight", DType::Q6K),
            ("blk.1.ffn_down_exps.weight", DType::Q6K),
            ("blk.1.attn_q.weight", DType::Q4K),
            ("blk.1.attn_output.weight", DType::Q4K),
            ("blk.2.attn_v.weight", DType::Q8_0),
            ("output.weight", DType::Q8_0),
            ("token_embd.weight", DType::Q4K),
        ] {
            assert_eq!(file.type_of(tensor, 4), want, "{tensor}");
        }
    }

    #[test]
    fn config_i_is_that_of_turboquant() {
        let recipe: Recipe = "Config_I".parse().unwrap();
        assert_eq!((recipe.dtype(), recipe.to_string()), (DType::TQ4_1S, "config_i".to_owned()));
        let file = BUILT_IN[0].parsed();
        for (tensor, want) in [
            ("blk.5.attn_q.weight", DType::TQ4_1S),
            ("blk.5.attn_output.weight", DType::TQ4_1S),
            ("output.weight", DType::Q8_0),
            ("blk.5.ffn_gate.weight", DType::TQ4_1S),
            ("blk.5.ffn_down.weight", DType::Q4K),
            ("blk.1.ffn_down.weight", DType::Q8_0),
            ("blk.22.attn_v.weight", DType::Q8_0),
            ("token_embd.weight", DType::Q8_0),
        ] {
            assert_eq!(file.type_of(tensor, 24), want, "{tensor}");
        }
    }

    #[test]
    fn lines_that_are_no_recipe_are_named() {
        let refused = |text: &str| text.parse::<RecipeFile>().unwrap_err().to_string();
        for (text, line) in [
            ("", "line 1: expected a type for all matrices (*) first, got \"\""),
            ("q4_K ffn_up", "line 1: expected a type for all matrices (*) first, got \"q4_K ffn_up\""),
            ("q4_K *\nturbo3 attn", "line 2: expected a weight type that files hold, got \"turbo3\""),
            ("q4_K *\nq8_0", "line 2: expected matrices after the type, got \"q8_0\""),
            ("q4_K *\nq8_0 first:x", "line 2: expected first:N or last:N, got \"first:x\""),
        ] {
            assert_eq!(refused(text), line);
        }
    }
}
