//! Tests that hold prose and names to the field's language: `docs/GLOSSARY.md` has its words.

use super::{WrittenFile, written};

/// Words that the glossary replaces, in prose and as parts of identifiers, each with the field's
/// word.
const RETIRED: &[(&str, &str)] = &[
    ("anybody", "the caller, the client, the user"),
    ("foresaw", "drafted"),
    ("foreseen", "drafted"),
    ("foresees", "is_drafted"),
    ("guess", "draft token, or infer"),
    ("guessed", "drafted, or inferred"),
    ("guesser", "drafter"),
    ("guesses", "draft tokens"),
    ("guessing", "drafting"),
    ("likelihood", "logprob, probability"),
    ("likelihoods", "logprobs, probabilities"),
    ("nobody", "no caller, no client"),
    ("picture", "image"),
    ("pictures", "images"),
    ("shelf", "idle sessions, pool"),
    ("soften", "softmax"),
    ("somebody", "a caller, a client"),
    ("stumble", "fail"),
    ("stumbles", "fails"),
    ("tower", "vision encoder"),
    ("towers", "vision encoders"),
    ("whoever", "the caller, the client"),
];

/// Expressions of several words, and constants.
const RETIRED_PHRASES: &[(&str, &str)] = &[
    ("came true", "accepted"),
    ("goes by", "follows, uses"),
    ("in company", "in a batch"),
    ("is told", "is reported"),
    ("wants to know", "requests"),
    ("LEAST_", "MIN_"),
    ("LONGEST_", "MAX_"),
    ("MOST_", "MAX_"),
];

/// Files that must name retired words, and texts that models read in tests.
const EXCUSED: &[&str] = &[
    "crates/engine/tests/engine/adapter.rs",
    "crates/engine/tests/engine/prefill_precision.rs",
    "crates/eval/src/needle_form.rs",
    "crates/eval/tests/bundled.rs",
    "docs/GLOSSARY.md",
    "tools/tidy/src/language.rs",
];

/// Names of other projects that contain a retired word: crates, functions and tensors.
const FOREIGN: &[&str] =
    &["tower_http", "TowerToHyperService", "with_guessed_format", "vision_tower", "audio_tower"];

/// Widest comment, in columns, its indentation included.
const MAX_COLUMNS: usize = 100;

/// Longest name of a test, in letters.
const MAX_TEST_NAME: usize = 60;

/// Returns the files with these endings to which the rules apply.
fn checked(endings: &[&str]) -> impl Iterator<Item = &'static WrittenFile> {
    written(endings).filter(|file| !EXCUSED.contains(&file.name.as_str()))
}

/// The words of a line: runs of letters, cut where a capital follows a small letter.
fn words(line: &str) -> impl Iterator<Item = String> {
    let mut words = vec![String::new()];
    let mut is_after_small = false;
    for c in line.chars() {
        if !c.is_alphabetic() || (is_after_small && c.is_uppercase()) {
            words.push(String::new());
        }
        if c.is_alphabetic() {
            words.last_mut().unwrap().extend(c.to_lowercase());
        }
        is_after_small = c.is_lowercase();
    }
    words.into_iter().filter(|word| !word.is_empty())
}

/// The first retired word or phrase of a line, with what takes its place.
fn retired(line: &str) -> Option<(&'static str, &'static str)> {
    let phrase = RETIRED_PHRASES.iter().find(|(phrase, _)| line.contains(phrase));
    let word = || words(line).find_map(|word| RETIRED.iter().find(|(retired, _)| *retired == word));
    phrase.or_else(word).copied()
}

#[test]
fn retired_words_are_found_in_prose_and_names() {
    for line in
        ["/// Whoever reads.", "let n_guesses = 1;", "struct VisionTower;", "MOST_ROWS", "it came true"]
    {
        assert!(retired(line).is_some(), "{line}");
    }
    for line in ["// A towering guesswork of MAX_ROWS", "shelfmark", "ALMOST"] {
        assert_eq!(retired(line), None, "{line}");
    }
}

#[test]
fn prose_and_names_use_the_fields_words() {
    let mut found = Vec::new();
    for WrittenFile { name, text } in checked(&["rs", "md", "c", "h", "cu", "cuh", "wgsl", "pyi"]) {
        for (at, line) in text.lines().enumerate() {
            let line = FOREIGN.iter().fold(line.to_owned(), |line, name| line.replace(name, ""));
            if let Some((word, instead)) = retired(&line) {
                found.push(format!("{name}:{}: '{word}': {instead}", at + 1));
            }
        }
    }
    assert!(found.is_empty(), "{} retired words\n{}", found.len(), found.join("\n"));
}

#[test]
fn comments_fit_a_hundred_columns() {
    let mut wide = Vec::new();
    for WrittenFile { name, text } in checked(&["rs", "cu", "cuh", "wgsl"]) {
        for (at, line) in text.lines().enumerate() {
            let is_comment = line.trim_start().starts_with("//");
            // A link or a path cannot be broken.
            let can_break = line.trim_start().trim_start_matches(['/', '!']).trim().contains(' ');
            if is_comment && can_break && line.chars().count() > MAX_COLUMNS {
                wide.push(format!("{name}:{}", at + 1));
            }
        }
    }
    assert!(wide.is_empty(), "comments wider than {MAX_COLUMNS} columns:\n{}", wide.join("\n"));
}

#[test]
fn test_names_are_short_claims() {
    let mut wrong = Vec::new();
    for WrittenFile { name, text } in checked(&["rs"]) {
        let mut is_test = false;
        for line in text.lines().map(str::trim) {
            if let Some(test) = line.strip_prefix("fn ").filter(|_| is_test) {
                let test = test.split('(').next().unwrap();
                if test.starts_with("what_") || test.len() > MAX_TEST_NAME {
                    wrong.push(format!("{name}: {test}"));
                }
            }
            is_test = line == "#[test]" || (is_test && line.starts_with("#["));
        }
    }
    assert!(wrong.is_empty(), "expected claims of at most {MAX_TEST_NAME} letters:\n{}", wrong.join("\n"));
}
