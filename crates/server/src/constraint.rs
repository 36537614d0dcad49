//! Structured output: answers constrained by a JSON schema, a regular expression or a Lark grammar.
//!
//! `llguidance` compiles a constraint and computes token masks. A constraint may come from an
//! untrusted client: its size is checked before it is compiled ([`levels`]), it is compiled on a
//! low-priority thread, and its first mask is computed before the request is accepted.

mod cache;
mod depth;
mod masks;
pub(crate) mod schema;

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use kvant::{Model, Tokenizer, tokenizer::TokenKind};
use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{ApproximateTokEnv, TokRxInfo, TokTrie};
use llguidance::{CancellationHandle, Matcher, ParserFactory};
use serde_json::{Value, json};
use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::output_parser::json_calls::CallScanner;
use crate::owner_limits::{Lane, Lanes, Owner};
use crate::priority::lower_priority;
use cache::{Cache, Key};
use depth::TooLarge;
pub(crate) use masks::Constraint;
use masks::{ComputedMask, MASK_TIME, MaskThreads};
use schema::SupportedSchema;

/// Stack of a compiler thread: [`levels::MAX_LEVELS`] of 12 KiB each. Untouched pages use no
/// memory.
const STACK: usize = 128 << 20;
/// Maximum concurrent compilations, and those of one owner.
const COMPILERS: (usize, usize) = (3, 2);
/// Maximum time that a request waits for the compilation of its constraint.
const COMPILE_TIME: Duration = Duration::from_secs(30);

/// Maximum parts of a schema that are dropped one by one.
const MAX_FAULTS: usize = 8;

/// Output format of an answer.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum OutputFormat {
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

    /// Returns the format of a JSON value that matches this schema.
    pub fn schema(schema: Value) -> Self {
        Self::Schema(Arc::new(schema))
    }

    /// Rejects a constraint that cannot be compiled safely.
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

    fn grammar(&self) -> TopLevelGrammar {
        match self {
            Self::Schema(schema) => TopLevelGrammar::from_json_schema(with_limited_whitespace(schema)),
            Self::Regex(regex) => TopLevelGrammar::from_regex(regex),
            Self::Lark(lark) => TopLevelGrammar::from_lark(lark.clone()),
            Self::Choice(texts) => {
                let texts: Vec<String> = texts.iter().map(|text| json!(text).to_string()).collect();
                TopLevelGrammar::from_lark(format!("start: {}", texts.join(" | ")))
            }
        }
    }
}

/// Options of `llguidance` within a schema.
const OPTIONS: &str = "x-guidance";

/// Returns the supported part of a schema, with whitespace limited to what people write: a space,
/// or a line break and the indentation of the next line. Small models otherwise tend to write
/// whitespace without end.
pub(crate) fn with_limited_whitespace(schema: &Value) -> Value {
    let mut schema = SupportedSchema::of(schema).schema;
    if let Some(fields) = schema.as_object_mut().filter(|fields| !fields.contains_key(OPTIONS)) {
        fields.insert(OPTIONS.to_owned(), json!({ "whitespace_pattern": LITTLE_SPACE }));
    }
    schema
}

const LITTLE_SPACE: &str = r" |\n {0,32}";

/// Returns a schema whose `oneOf` accepts one or more matching alternatives.
fn with_lenient_one_of(mut schema: Value) -> Value {
    if let Some(fields) = schema.as_object_mut() {
        fields.insert(OPTIONS.to_owned(), json!({ "whitespace_pattern": LITTLE_SPACE, "lenient": true }));
    }
    schema
}

/// Reason why answers cannot be constrained.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ConstraintError {
    #[error(transparent)]
    TooLarge(#[from] TooLarge),
    #[error("the constraint takes too long to compile: expected at most {} s, got more", COMPILE_TIME.as_secs())]
    SlowToCompile,
    #[error("the constraint is too ambiguous: expected at most {} s per token mask, got more", MASK_TIME.as_secs())]
    SlowMask,
    /// Unsupported parts of a schema, with their locations.
    #[error("the schema cannot be enforced: {0}")]
    Unenforceable(String),
    /// Invalid or unsupported part of a schema, with its JSON pointer.
    #[error("{why}{}", schema::at(place))]
    InvalidAt { why: String, place: String },
    /// Invalid or unsupported constraint.
    #[error("{0}")]
    Invalid(String),
}

/// Converts an error of `llguidance` to one line, and rewords its internal errors.
fn in_a_line(error: &str) -> String {
    let line = error.lines().next().unwrap_or_default();
    let reason = error.lines().find_map(|line| line.strip_prefix("error: "));
    if let Some(reason) = reason {
        return format!("the pattern cannot be enforced: {reason}");
    }
    let reworded = match line {
        "NoExtensionBias" => "no text matches the constraint",
        _ if line.contains("Current row has") => {
            "the constraint is too ambiguous: expected at most 2000 parser items, got more"
        }
        _ if line.starts_with("panic: ") => "the constraint is too large for its compiler",
        _ if line.starts_with("oneOf constraints") => "the alternatives of oneOf cannot be distinguished",
        _ if line.starts_with("lookarounds not supported") => {
            "the pattern cannot be enforced: it asserts a word boundary"
        }
        _ if line.starts_with("Only absolute $ref") => {
            return line.replace(
                "Only absolute $ref's (#/...) are supported without 'referencing' feature; ref",
                "$ref: expected a place in the same schema (#/..), got",
            );
        }
        _ => line.strip_prefix("Unsatisfiable schema: ").unwrap_or(line),
    };
    reworded.to_owned()
}

/// Compiles constraints for one vocabulary, which is prepared on first use.
pub(crate) struct ConstraintCompiler {
    factory: OnceLock<Result<ParserFactory, String>>,
    compilers: Arc<Lanes>,
    masks: Arc<MaskThreads>,
    known: Cache,
}

/// Result of a compilation: the handle that cancels the following mask computation.
type Compiled = Result<CancellationHandle, ConstraintError>;

/// Cancels the computation of a mask when the client disconnects.
struct EndsWithClient(Option<CancellationHandle>);

impl Drop for EndsWithClient {
    fn drop(&mut self) {
        self.0.iter().for_each(CancellationHandle::cancel);
    }
}

impl ConstraintCompiler {
    /// Creates the compiler of a model, with the threads that compute masks.
    pub fn new() -> std::io::Result<Self> {
        let compilers = Lanes::new(COMPILERS.0, COMPILERS.1);
        let masks = Arc::new(MaskThreads::start()?);
        Ok(Self { factory: OnceLock::new(), compilers, masks, known: Cache::default() })
    }

    /// Returns a guide for answers of this format, for a request of `owner`.
    ///
    /// # Errors
    /// [`ConstraintError`].
    pub async fn constraint(
        self: &Arc<Self>,
        model: &Model,
        form: OutputFormat,
        owner: Owner,
    ) -> Result<Constraint, ConstraintError> {
        let key = Key::of(&form, &owner);
        if let Some(guide) = key.and_then(|key| self.known.find(key)) {
            return Ok(guide);
        }
        let lane = self.compilers.enter(&owner).await;
        let (compiled, first) = self.start(model, form, lane)?;
        let ended =
            |_| ConstraintError::Invalid("an internal error while the constraint was compiled".to_owned());
        let handle = timeout(COMPILE_TIME, compiled).await.map_err(|_| ConstraintError::SlowToCompile)?;
        let mut ends = EndsWithClient(Some(handle.map_err(ended)??));
        let first = timeout(MASK_TIME, first).await.map_err(|_| ConstraintError::SlowMask)?;
        let first = first.map_err(ended)?;
        ends.0 = None;
        let guide = Constraint::new(first, owner, Arc::clone(&self.masks))?;
        if let Some(key) = key {
            self.known.keep(key, &guide);
        }
        Ok(guide)
    }

    /// Returns the supported part of an object schema: an unsupported part accepts any value.
    pub async fn supported_subset(self: &Arc<Self>, model: &Model, schema: &Value, owner: Owner) -> Value {
        let mut schema = with_lenient_one_of(SupportedSchema::of(schema).schema);
        for _ in 0..MAX_FAULTS {
            let place =
                match self.constraint(model, OutputFormat::schema(schema.clone()), owner.clone()).await {
                    Ok(_) => return schema,
                    Err(ConstraintError::InvalidAt { place, .. }) => place,
                    Err(_) => break,
                };
            match schema.pointer_mut(&place).filter(|_| !place.is_empty()) {
                Some(part) => *part = json!({}),
                None => break,
            }
        }
        json!({ "type": "object" })
    }

    fn factory(&self, model: &Model) -> Result<&ParserFactory, ConstraintError> {
        let make = || factory(model.tokenizer().map_err(|error| error.to_string())?);
        self.factory.get_or_init(make).as_ref().map_err(|why| ConstraintError::Invalid(why.clone()))
    }

    /// Starts a thread that compiles a constraint, which stops if the receiver is dropped.
    fn start(
        self: &Arc<Self>,
        model: &Model,
        form: OutputFormat,
        lane: Lane,
    ) -> Result<(oneshot::Receiver<Compiled>, oneshot::Receiver<ComputedMask>), ConstraintError> {
        let ((to, compiled), (to_first, first)) = (oneshot::channel(), oneshot::channel());
        let (grammars, model) = (Arc::clone(self), model.clone());
        let compile = move || {
            let _lane = lane;
            // Prepares the vocabulary first; an error is reported below.
            _ = grammars.factory(&model);
            lower_priority();
            let matcher = match grammars.compile(&model, &form) {
                Ok(matcher) => matcher,
                Err(error) => return drop(to.send(Err(error))),
            };
            let handle = matcher.cancellation_handle().unwrap_or_default();
            if to.send(Ok(handle)).is_ok() {
                _ = to_first.send(ComputedMask::of(Box::new(matcher)));
            }
        };
        let thread = std::thread::Builder::new().name("compiler".to_owned()).stack_size(STACK).spawn(compile);
        thread.map_err(|error| ConstraintError::Invalid(error.to_string()))?;
        Ok((compiled, first))
    }

    fn compile(&self, model: &Model, form: &OutputFormat) -> Result<Matcher, ConstraintError> {
        form.check()?;
        let factory = self.factory(model)?;
        let matcher = Matcher::new(factory.create_parser(form.grammar())).into_cancellable();
        let Some(why) = matcher.get_error() else { return Ok(matcher) };
        let why = in_a_line(&why);
        let OutputFormat::Schema(schema) = form else { return Err(ConstraintError::Invalid(why)) };
        let place = schema::faulty_place(schema, |part| {
            let part = OutputFormat::schema(part.clone()).grammar();
            Matcher::new(factory.create_parser(part))
                .get_error()
                .is_some_and(|other| in_a_line(&other) == why)
        });
        Err(ConstraintError::InvalidAt { why, place })
    }

    /// Blocking variant of [`Self::guide`].
    #[cfg(test)]
    pub fn constraint_blocking(
        self: &Arc<Self>,
        model: &Model,
        form: &OutputFormat,
    ) -> Result<Constraint, ConstraintError> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(self.constraint(model, form.clone(), None))
    }
}

fn factory(tokenizer: &Tokenizer) -> Result<ParserFactory, String> {
    let n_vocab = tokenizer.n_vocab() as u32;
    let word = |id: u32| match tokenizer.kind(id) {
        Some(TokenKind::Normal | TokenKind::Byte | TokenKind::UserDefined) => {
            tokenizer.token_bytes(id).to_vec()
        }
        // Other tokens are not text; a grammar may name them.
        _ => {
            let name = tokenizer.token_text(id).unwrap_or_default().as_bytes();
            [&[TokTrie::SPECIAL_TOKEN_MARKER], name].concat()
        }
    };
    let words: Vec<Vec<u8>> = (0..n_vocab).map(word).collect();
    let ends = tokenizer.eog_ids();
    let end = *ends
        .first()
        .ok_or("the model has no token that ends an answer, so a constraint cannot be enforced")?;
    let trie = TokTrie::from(&TokRxInfo::new(n_vocab, end), &words).with_eos_tokens(ends);
    let env = Arc::new(ApproximateTokEnv::new(trie));
    let mut factory = ParserFactory::new_simple(&(env as _)).map_err(|error| error.to_string())?;
    factory.quiet();
    factory.limits_mut().verbose_errors = false;
    Ok(factory)
}

/// Trigger of a guide.
#[derive(Debug, Clone)]
pub(crate) enum Trigger {
    /// The reasoning at the start of the answer has ended.
    ReasoningEnd,
    /// This text has been generated, outside of reasoning.
    Text(Recent),
    /// A tool call in plain JSON has started. The guide applies from its brace on.
    JsonCall(CallScanner),
}

/// Text to wait for, and the latest generated text.
#[derive(Debug, Clone)]
pub(crate) struct Recent {
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
pub(crate) struct Constraints {
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

#[cfg(test)]
mod deep_constraints;

#[cfg(test)]
mod tests {
    use kvant::Special;

    use super::*;
    use crate::output_parser::json_calls;
    use crate::output_parser::tool_calls::Tool;

    #[test]
    fn a_cached_constraint_starts_anew_for_each_answer() {
        let model = kvant::Model::bundled(kvant::OpenOptions::default()).unwrap();
        let grammars = Arc::new(ConstraintCompiler::new().unwrap());
        let form = |n: usize| OutputFormat::Regex(format!("a{{{n}}}"));
        let a = model.tokenizer().unwrap().encode("a", Special::AsText, false).unwrap();
        let key = Key::of(&form(1), &None).unwrap();
        assert!(grammars.known.find(key).is_none());
        for _ in 0..2 {
            assert!(grammars.constraint_blocking(&model, &form(1)).unwrap().accepts(&a));
            assert!(grammars.known.find(key).is_some_and(|guide| guide.accepts(&a)));
        }
        // The cache separates owners, omits large constraints, and evicts the oldest.
        assert_ne!(Key::of(&form(1), &Some("key".into())), Some(key));
        assert_eq!(Key::of(&OutputFormat::Regex("a".repeat(100_000)), &None), None);
        (2..18).for_each(|n| drop(grammars.constraint_blocking(&model, &form(n)).unwrap()));
        assert!(grammars.known.find(key).is_none());
    }

    #[test]
    fn a_constraint_applies_from_its_trigger_outside_reasoning() {
        let model = kvant::Model::bundled(kvant::OpenOptions::default()).unwrap();
        let tokenizer = model.tokenizer().unwrap();
        let form = OutputFormat::object();
        let guide =
            || Arc::new(ConstraintCompiler::new().unwrap()).constraint_blocking(&model, &form).unwrap();
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
        let plain = Arc::new(ConstraintCompiler::new().unwrap()).constraint_blocking(&model, &form).unwrap();
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
