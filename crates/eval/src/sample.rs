//! Built-in texts.

/// The first five chapters of Mary Shelley's *Frankenstein* in the edition of 1831, 63 kB: long
/// enough for 20 chunks of 512 tokens, in the public domain, and not in the bundled model's
/// training data.
pub const SAMPLE: &str = include_str!("../assets/frankenstein.txt");

/// A mixture of prose, code, dialogue, tables and a dozen languages, written for this project: the
/// default text of plans.
pub const MIXTURE: &str = include_str!("../assets/mixture.txt");

/// Questions, one per line, written for this project.
pub const QUESTIONS: &str = include_str!("../assets/questions.txt");
