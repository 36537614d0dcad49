//! A text for those who bring none.

/// The first five chapters of Mary Shelley's *Frankenstein* in the edition of 1831, 63 kB: long enough for 20 chunks of 512
/// tokens, in the public domain, and unknown to the bundled model.
pub const SAMPLE: &str = include_str!("../assets/frankenstein.txt");

/// A mixture of prose, code, dialogue, tables and a dozen languages, written for this project: what a plan is made from when no
/// text is given.
pub const MIXTURE: &str = include_str!("../assets/mixture.txt");

/// Questions, one a line, written for this project.
pub const QUESTIONS: &str = include_str!("../assets/questions.txt");
