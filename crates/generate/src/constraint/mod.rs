//! Structured output: answers constrained by a JSON schema, a regular expression or a Lark grammar.

#[cfg(feature = "constraint")]
mod compiler;
#[cfg(feature = "constraint")]
mod depth;
#[cfg(feature = "constraint")]
mod masks;
#[cfg(not(feature = "constraint"))]
#[path = "no_masks.rs"]
mod masks;
#[cfg(feature = "constraint")]
mod priority;
mod reduction;
pub mod schema;

use std::sync::Arc;
use std::time::Duration;

use kvant_text::tokenizer::Tokenizer;
use serde_json::{Value, json};

use crate::output_parser::json_calls::CallScanner;
#[cfg(feature = "constraint")]
pub use compiler::{COMPILER_STACK, CompiledConstraint, ConstraintCompiler, MaskCancellation};
pub use masks::Constraint;
#[cfg(not(feature = "constraint"))]
pub use masks::ConstraintCompiler;
#[cfg(feature = "constraint")]
pub use priority::lower_priority;
pub use reduction::SchemaReduction;
use schema::SupportedSchema;

/// Maximum time for the compilation of a constraint that a client waits for.
pub const COMPILE_TIME: Duration = Duration::from_secs(30);
/// Maximum time of a token mask.
pub const MASK_TIME: Duration = Duration::from_secs(2);

/// Client on whose behalf masks are computed: those of one delay no other.
pub type Owner = Option<Arc<str>>;

/// Output format of an answer.
#[derive(Debug, Clone, PartialEq)]
pub enum OutputFormat {
    /// JSON value that matches this schema.
    Schema(Arc<Value>),
    /// Text that matches this regular expression.
    Regex(String),
    /// Text of this Lark grammar.
    Lark(String),
    /// One of these texts.
    Choice(Vec<String>),
}

impl OutputFormat {
    /// Returns the format of any JSON object.
    pub fn object() -> Self {
        Self::schema(json!({ "type": "object" }))
    }

    /// Returns the format of a JSON value that matches the schema in this text.
    ///
    /// # Errors
    /// A text that is not JSON.
    pub fn json_schema(schema: &str) -> Result<Self, ConstraintError> {
        let schema = serde_json::from_str(schema);
        Ok(Self::schema(schema.map_err(|error| ConstraintError::Invalid(format!("the schema: {error}")))?))
    }

    /// Returns the format of a JSON value that matches this schema.
    pub fn schema(schema: Value) -> Self {
        Self::Schema(Arc::new(schema))
    }

    /// Rejects a constraint that cannot be compiled safely.
    #[cfg(feature = "constraint")]
    fn check(&self) -> Result<(), ConstraintError> {
        match self {
            Self::Schema(schema) => {
                depth::check_schema(schema)?;
                let missing = SupportedSchema::of(schema).missing();
                return missing.map_or(Ok(()), |missing| Err(ConstraintError::Unenforceable(missing)));
            }
            Self::Lark(lark) => depth::check_lark(lark)?,
            Self::Regex(regex) => depth::check_bytes(regex.len())?,
            Self::Choice(texts) => depth::check_bytes(texts.iter().map(|text| text.len() + 5).sum())?,
        }
        Ok(())
    }
}

/// Options of `llguidance` within a schema.
const OPTIONS: &str = "x-guidance";

/// Returns the supported part of a schema, with whitespace limited to what people write: a space,
/// or a line break and the indentation of the next line. Small models otherwise tend to write
/// whitespace without end.
pub fn with_limited_whitespace(schema: &Value) -> Value {
    let mut schema = SupportedSchema::of(schema).schema;
    if let Some(fields) = schema.as_object_mut().filter(|fields| !fields.contains_key(OPTIONS)) {
        fields.insert(OPTIONS.to_owned(), json!({ "whitespace_pattern": LITTLE_SPACE }));
    }
    schema
}

const LITTLE_SPACE: &str = r" |\n {0,32}";

/// Measure of a constraint that is too large.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the constraint has too many {what}: expected at most {expected}, got {got}")]
pub struct TooLarge {
    /// What is counted, in plural.
    pub what: &'static str,
    /// Maximum.
    pub expected: usize,
    /// Count.
    pub got: usize,
}

/// Reason why answers cannot be constrained.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConstraintError {
    /// A measure exceeds its limit.
    #[error(transparent)]
    TooLarge(#[from] TooLarge),
    /// It takes longer than [`COMPILE_TIME`] to compile.
    #[error("the constraint takes too long to compile: expected at most {} s, got more", COMPILE_TIME.as_secs())]
    SlowToCompile,
    /// A mask takes longer than [`MASK_TIME`].
    #[error("the constraint is too ambiguous: expected at most {} s per token mask, got more", MASK_TIME.as_secs())]
    SlowMask,
    /// Unsupported parts of a schema, with their locations.
    #[error("the schema cannot be enforced: {0}")]
    Unenforceable(String),
    /// Invalid or unsupported part of a schema, with its JSON pointer.
    #[error("{why}{}", schema::at(place))]
    InvalidAt {
        /// Reason.
        why: String,
        /// JSON pointer.
        place: String,
    },
    /// Invalid or unsupported constraint.
    #[error("{0}")]
    Invalid(String),
}

impl ConstraintError {
    /// Returns the error of a compilation whose thread ended without a result.
    pub fn crashed() -> Self {
        Self::Invalid("an internal error while the constraint was compiled".to_owned())
    }
}

/// Trigger of a guide.
#[derive(Debug, Clone)]
pub enum Trigger {
    /// The reasoning at the start of the answer has ended.
    ReasoningEnd,
    /// This text has been generated, outside of reasoning.
    Text(Recent),
    /// A tool call in plain JSON has started. The guide applies from its brace on.
    JsonCall(CallScanner),
}

/// Text to wait for, and the latest generated text.
#[derive(Debug, Clone)]
pub struct Recent {
    mark: &'static str,
    generated: String,
}

impl Trigger {
    /// Creates a trigger for this text.
    pub fn text(mark: &'static str) -> Self {
        Self::Text(Recent { mark, generated: String::new() })
    }

    /// Reads more text. If it completes the trigger, returns the text that the guide must catch up
    /// with.
    fn matches(&mut self, text: &str) -> Option<String> {
        match self {
            Self::ReasoningEnd => Some(String::new()),
            Self::Text(Recent { mark, generated }) => {
                *generated += text;
                let surplus = generated.len().saturating_sub(2 * mark.len());
                let cut = (surplus..generated.len()).find(|&at| generated.is_char_boundary(at)).unwrap_or(0);
                generated.drain(..cut);
                generated.ends_with(*mark).then(String::new)
            }
            Self::JsonCall(scanner) => scanner.push(text).call.map(|call| call.object),
        }
    }
}

/// Constraints of an answer.
#[derive(Default)]
pub struct Constraints {
    now: Option<Constraint>,
    /// The first whose trigger occurs applies.
    later: Vec<(Trigger, Constraint)>,
}

impl Constraints {
    /// Constrains an answer from its beginning.
    pub fn now(guide: Constraint) -> Self {
        Self { now: Some(guide), ..Self::default() }
    }

    /// Constrains an answer from the first of these triggers on.
    pub fn later(later: Vec<(Trigger, Constraint)>) -> Self {
        Self { now: None, later }
    }

    /// Constrains an answer by the first of these that applies: one without a trigger applies from
    /// the beginning of the answer.
    pub fn with_triggers(all: Vec<(Option<Trigger>, Constraint)>) -> Self {
        let mut constraints = Self::default();
        for (trigger, constraint) in all {
            match trigger {
                Some(trigger) => constraints.later.push((trigger, constraint)),
                None => constraints.now = Some(constraint),
            }
        }
        constraints
    }

    /// Returns the same guides for another answer.
    pub fn fork(&self) -> Self {
        let fork = |(cue, guide): &(Trigger, Constraint)| Some((cue.clone(), guide.fork()?));
        let later = self.later.iter().filter_map(fork).collect();
        Self { now: self.now.as_ref().and_then(Constraint::fork), later }
    }

    /// Returns the active guide.
    pub fn active(&mut self) -> Option<&mut Constraint> {
        self.now.as_mut()
    }

    /// Records a token and the text that became final with it; `is_thinking` is whether that
    /// text ends within reasoning. Returns whether the answer is complete.
    pub fn record(
        &mut self,
        tokenizer: &Tokenizer,
        token: u32,
        text: &str,
        is_thinking: bool,
    ) -> Result<bool, ConstraintError> {
        if let Some(guide) = &mut self.now {
            return guide.consume(token);
        }
        if is_thinking {
            return Ok(false);
        }
        let given = |(at, (cue, _)): (usize, &mut (Trigger, Constraint))| Some((at, cue.matches(text)?));
        let Some((at, behind)) = self.later.iter_mut().enumerate().find_map(given) else { return Ok(false) };
        let mut guide = self.later.swap_remove(at).1;
        self.later.clear();
        let tokens = tokenizer.encode_exact(&behind);
        // A call in a notation unknown to the guide continues without it.
        self.now = tokens.is_ok_and(|tokens| guide.catch_up(&tokens).is_ok()).then_some(guide);
        Ok(false)
    }
}

#[cfg(all(test, feature = "constraint"))]
mod deep_constraints;

#[cfg(all(test, feature = "constraint"))]
mod tests {
    use kvant_text::tokenizer::Special;

    use super::*;
    use crate::output_parser::json_calls;
    use crate::output_parser::tool_calls::Tool;

    #[test]
    fn a_constraint_applies_from_its_trigger_outside_reasoning() {
        let tokenizer = &crate::test_tokenizer::bundled_tokenizer();
        let form = OutputFormat::object();
        let guide = || ConstraintCompiler::new().unwrap().constraint(tokenizer, &form).unwrap();
        let mut call = Constraints::later(vec![(Trigger::text("<tool_call>"), guide())]);
        let mut holds_after = |text: &str, is_thinking| {
            assert_eq!(call.record(tokenizer, 0, text, is_thinking), Ok(false));
            call.active().is_some()
        };
        for text in ["I may write ", "<tool_", "call>", "<tool_call>"] {
            assert!(!holds_after(text, true), "{text}");
        }
        for text in ["</think>", "Then: <tool", "-call> <tool", "_call"] {
            assert!(!holds_after(text, false), "{text}");
        }
        assert!(holds_after(">", false));
        // A plain call is constrained from its brace on, at any token boundary.
        let tools = [Tool { name: "f".to_owned(), parameters: json!({ "type": "object" }) }];
        let form = OutputFormat::Lark(json_calls::grammar(&tools, false));
        let plain = ConstraintCompiler::new().unwrap().constraint(tokenizer, &form).unwrap();
        let cue = Trigger::JsonCall(CallScanner::new(["f".to_owned()]));
        let mut call = Constraints::later(vec![(cue, plain)]);
        for text in ["Now:\n```json", "\n{\n", "  \"name\": \""] {
            assert_eq!(call.record(tokenizer, 0, text, false), Ok(false));
            assert!(call.active().is_none(), "{text}");
        }
        assert_eq!(call.record(tokenizer, 0, "f\", \"arg", false), Ok(false));
        let rest = tokenizer.encode("uments\": {}}", Special::AsText, false).unwrap();
        assert!(call.now.take().is_some_and(|guide| guide.accepts(&rest)));
        let mut after_reasoning = Constraints::later(vec![(Trigger::ReasoningEnd, guide())]);
        for (is_thinking, holds) in [(true, false), (false, true)] {
            assert_eq!(after_reasoning.record(tokenizer, 0, "a", is_thinking), Ok(false));
            assert_eq!(after_reasoning.fork().active().is_some(), holds);
        }
    }
}
