//! Constraint compiler of one vocabulary (llguidance).
//!
//! A constraint may come from an untrusted client: its size is checked before it is compiled
//! ([`depth`](super::depth)), on a thread with a large stack.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, OnceLock};
use std::thread;

use kvant_text::tokenizer::{TokenKind, Tokenizer};
use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{ApproximateTokEnv, TokRxInfo, TokTrie};
use llguidance::{CancellationHandle, Matcher, ParserFactory};
use serde_json::json;

use super::masks::{ComputedMask, MaskThreads};
use super::schema;
use super::{Constraint, ConstraintError, MASK_TIME, OutputFormat, Owner, with_limited_whitespace};

/// Stack of a thread that compiles, in bytes: the maximum levels of 12 KiB each. Untouched pages
/// use no memory.
pub const COMPILER_STACK: usize = 128 << 20;

/// Compiles constraints for one vocabulary, which is prepared on first use, and computes their
/// masks.
pub struct ConstraintCompiler {
    factory: OnceLock<Result<ParserFactory, String>>,
    masks: Arc<MaskThreads>,
}

/// Compiled constraint without its first mask.
pub struct CompiledConstraint {
    matcher: Matcher,
    owner: Owner,
    masks: Arc<MaskThreads>,
}

/// Cancels the computation of a first mask when it is dropped.
pub struct MaskCancellation(Option<CancellationHandle>);

impl MaskCancellation {
    /// Lets the computation complete.
    pub fn disarm(mut self) {
        self.0 = None;
    }
}

impl Drop for MaskCancellation {
    fn drop(&mut self) {
        self.0.iter().for_each(CancellationHandle::cancel);
    }
}

impl CompiledConstraint {
    /// Returns what cancels [`CompiledConstraint::start`] on another thread.
    pub fn cancellation(&self) -> MaskCancellation {
        MaskCancellation(self.matcher.cancellation_handle())
    }

    /// Computes the first mask.
    ///
    /// # Errors
    /// A constraint that no text matches; a mask that is too large or cancelled.
    pub fn start(self) -> Result<Constraint, ConstraintError> {
        Constraint::new(ComputedMask::of(Box::new(self.matcher)), self.owner, self.masks)
    }
}

impl ConstraintCompiler {
    /// Creates the compiler of a model, with the threads that compute masks.
    ///
    /// # Errors
    /// The threads cannot be started.
    pub fn new() -> std::io::Result<Self> {
        Ok(Self { factory: OnceLock::new(), masks: Arc::new(MaskThreads::start()?) })
    }

    /// Compiles a constraint and computes its first mask, on a thread of its own.
    ///
    /// # Errors
    /// A format that is invalid, unsupported, too large or too ambiguous.
    pub fn constraint(
        &self,
        tokenizer: &Tokenizer,
        format: &OutputFormat,
    ) -> Result<Constraint, ConstraintError> {
        let ((to_cancel, cancel), (to, first)) = (channel(), channel());
        let compile = move || {
            let compiled = self.compile(tokenizer, format, None).map(|compiled| {
                _ = to_cancel.send(compiled.cancellation());
                compiled.start()
            });
            _ = to.send(compiled.flatten());
        };
        thread::scope(|scope| {
            let thread = thread::Builder::new().stack_size(COMPILER_STACK).spawn_scoped(scope, compile);
            let thread = thread.map_err(|error| ConstraintError::Invalid(error.to_string()))?;
            let cancellation = cancel.recv();
            let first = match first.recv_timeout(MASK_TIME) {
                Ok(first) => first,
                Err(RecvTimeoutError::Timeout) => Err(ConstraintError::SlowMask),
                Err(RecvTimeoutError::Disconnected) => Err(ConstraintError::crashed()),
            };
            match cancellation {
                Ok(cancellation) if first.is_ok() => cancellation.disarm(),
                cancellation => drop(cancellation),
            }
            _ = thread.join();
            first
        })
    }

    /// Prepares the vocabulary, which takes a moment; an error is reported by
    /// [`ConstraintCompiler::compile`].
    pub fn prepare(&self, tokenizer: &Tokenizer) {
        _ = self.factory(tokenizer);
    }

    /// Compiles a constraint on the calling thread, which must have a stack of [`COMPILER_STACK`]
    /// bytes. The masks of one `owner` delay no other.
    ///
    /// # Errors
    /// A format that is invalid, unsupported or too large.
    pub fn compile(
        &self,
        tokenizer: &Tokenizer,
        format: &OutputFormat,
        owner: Owner,
    ) -> Result<CompiledConstraint, ConstraintError> {
        format.check()?;
        let factory = self.factory(tokenizer)?;
        let matcher = Matcher::new(factory.create_parser(grammar(format))).into_cancellable();
        let Some(why) = matcher.get_error() else {
            return Ok(CompiledConstraint { matcher, owner, masks: Arc::clone(&self.masks) });
        };
        let why = in_a_line(&why);
        let OutputFormat::Schema(schema) = format else { return Err(ConstraintError::Invalid(why)) };
        let place = schema::faulty_place(schema, |part| {
            let part = grammar(&OutputFormat::schema(part.clone()));
            Matcher::new(factory.create_parser(part))
                .get_error()
                .is_some_and(|other| in_a_line(&other) == why)
        });
        Err(ConstraintError::InvalidAt { why, place })
    }

    fn factory(&self, tokenizer: &Tokenizer) -> Result<&ParserFactory, ConstraintError> {
        let factory = self.factory.get_or_init(|| factory(tokenizer));
        factory.as_ref().map_err(|why| ConstraintError::Invalid(why.clone()))
    }
}

fn grammar(format: &OutputFormat) -> TopLevelGrammar {
    match format {
        OutputFormat::Schema(schema) => TopLevelGrammar::from_json_schema(with_limited_whitespace(schema)),
        OutputFormat::Regex(regex) => TopLevelGrammar::from_regex(regex),
        OutputFormat::Lark(lark) => TopLevelGrammar::from_lark(lark.clone()),
        OutputFormat::Choice(texts) => {
            let texts: Vec<String> = texts.iter().map(|text| json!(text).to_string()).collect();
            TopLevelGrammar::from_lark(format!("start: {}", texts.join(" | ")))
        }
    }
}

/// Converts an error of `llguidance` to one line, and rewords its internal errors.
pub(super) fn in_a_line(error: &str) -> String {
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
