//! Wording of the needle test, as data: built-in forms, or a JSON file.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::EvalError;

/// Wording of needles, questions and answers. `{name}` and `{word}` stand for the subject of a
/// needle and its content.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NeedleForm {
    /// Name of the form.
    pub name: String,
    /// The sentence in the haystack, with the space before it.
    pub needle: String,
    /// The text after the haystack.
    pub question: String,
    /// Beginning of the answer: given to the model, so that only the word itself is scored.
    pub cue: String,
    /// The rest of the answer, scored token by token.
    pub answer: String,
    /// Subjects of needles.
    pub names: Vec<String>,
    /// Contents of needles.
    pub words: Vec<String>,
}

fn owned(words: &[&str]) -> Vec<String> {
    words.iter().map(|&word| word.to_owned()).collect()
}

impl NeedleForm {
    /// Names of the built-in forms.
    pub const BUILT_IN: [&str; 3] = ["secret-word", "magic-number", "sandwich"];

    /// Returns a built-in form: `secret-word` (in the bundled model's training data),
    /// `magic-number` (RULER, [arXiv 2404.06654](https://arxiv.org/abs/2404.06654)) or `sandwich`
    /// (Kamradt's original).
    pub fn built_in(name: &str) -> Option<Self> {
        let form = |needle: &str, question: &str, cue: &str, answer: &str, names: &[&str], words: &[&str]| {
            Some(Self {
                name: name.to_owned(),
                needle: needle.to_owned(),
                question: question.to_owned(),
                cue: cue.to_owned(),
                answer: answer.to_owned(),
                names: owned(names),
                words: owned(words),
            })
        };
        match name {
            "secret-word" => form(
                " The secret word for {name} is {word}.",
                "\n\nQuestion: What is the secret word for {name} mentioned in the text above?",
                "\nAnswer: The secret word for {name} is",
                " {word}",
                &[
                    "Paris",
                    "London",
                    "Boston",
                    "Oslo",
                    "the red box",
                    "the old tower",
                    "agent seven",
                    "the captain",
                ],
                &[
                    "apple", "river", "castle", "forest", "ocean", "kitchen", "music", "doctor", "money",
                    "village", "stone", "water", "gold", "bread", "king", "island",
                ],
            ),
            "magic-number" => form(
                " One of the special magic numbers for {name} is: {word}.",
                "\n\nWhat is the special magic number for {name} mentioned in the provided text?",
                " The special magic number for {name} mentioned in the provided text is",
                " {word}",
                &["long-context", "quiet-harbor", "amber-lantern", "northern-mill", "paper-garden"],
                &["8231946", "4710528", "9053271", "2867403", "6194850", "3748206", "5529173", "1486390"],
            ),
            "sandwich" => form(
                " The best thing to do in {name} is {word}.",
                "\n\nQuestion: What is the best thing to do in {name}?",
                "\nAnswer: The best thing to do in {name} is",
                " {word}",
                &["San Francisco"],
                &["eat a sandwich and sit in Dolores Park on a sunny day"],
            ),
            _ => None,
        }
    }

    /// Returns the built-in form of that name, or the form in the JSON file of that name.
    ///
    /// # Errors
    ///
    /// [`EvalError::File`] when neither exists, or the file is invalid.
    pub fn find(name: &str) -> Result<Self, EvalError> {
        if let Some(form) = Self::built_in(name) {
            return Ok(form);
        }
        let path = Path::new(name);
        if !path.exists() {
            let what = format!("no needle form; known: {}, or a JSON file", Self::BUILT_IN.join(", "));
            return Err(EvalError::file(path, what));
        }
        let text = kvant::files::read(path).map_err(EvalError::io(path))?;
        let form: Self = serde_json::from_slice(&text)
            .map_err(|error| EvalError::file(path, format!("needle form: {error}")))?;
        let has_word = form.needle.contains("{word}") && form.answer.contains("{word}");
        let is_blank = |texts: &[String]| texts.is_empty() || texts.iter().any(|text| text.trim().is_empty());
        if !has_word || is_blank(&form.names) || is_blank(&form.words) {
            let what = "needle form: needle and answer must contain {word}, names and words must not be empty, \
                        nor any of them";
            return Err(EvalError::file(path, what));
        }
        Ok(form)
    }
}

/// Fills the needle's name and word into `template`.
pub(crate) fn fill(template: &str, name: &str, word: &str) -> String {
    template.replace("{name}", name).replace("{word}", word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_built_in_form_is_found_and_questions_its_word() {
        for name in NeedleForm::BUILT_IN {
            let form = NeedleForm::find(name).unwrap();
            assert_eq!(form.name, name);
            assert!(form.needle.contains("{word}") && form.answer.contains("{word}"));
            assert!(!fill(&form.question, &form.names[0], "x").contains('{'));
        }
    }

    #[test]
    fn custom_forms_are_read_and_invalid_ones_rejected() {
        let path = std::env::temp_dir().join(format!("kvant-form-{}.json", std::process::id()));
        let mut form = NeedleForm::built_in("sandwich").unwrap();
        std::fs::write(&path, serde_json::to_string(&form).unwrap()).unwrap();
        assert_eq!(NeedleForm::find(path.to_str().unwrap()).unwrap(), form);
        let refused = |form: &NeedleForm| {
            std::fs::write(&path, serde_json::to_string(form).unwrap()).unwrap();
            let error = NeedleForm::find(path.to_str().unwrap()).unwrap_err().to_string();
            assert!(error.contains("must not be empty"), "{error}");
        };
        // An answer of no tokens would always be correct.
        form.words.push(" ".to_owned());
        refused(&form);
        form.words.clear();
        refused(&form);
        std::fs::write(&path, "{}").unwrap();
        assert!(NeedleForm::find(path.to_str().unwrap()).unwrap_err().to_string().contains("needle form"));
        std::fs::remove_file(&path).unwrap();
        assert!(NeedleForm::find("no-such-form").is_err());
    }
}
