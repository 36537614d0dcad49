//! Answers that are held to a form: a JSON schema, a regular expression, a Lark grammar.
//!
//! `llguidance` says which tokens may come next. That takes a while (microseconds mostly, milliseconds at worst), so it is worked
//! out by a thread of its own while the model reads the token before.

mod levels;

use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use kvant::{Tokenizer, tokenizer::TokenKind};
use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{ApproximateTokEnv, SimpleVob, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use serde_json::{Value, json};
use tokio::sync::oneshot;

use levels::TooLarge;

/// The stack of a thread that compiles a grammar: [`levels::MAX_LEVELS`] of 12 KiB each. What is not reached is not taken.
const COMPILER_STACK: usize = 128 << 20;
/// The stack of the thread that works masks out.
const MASK_STACK: usize = 16 << 20;

/// What an answer must be.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Form {
    /// A JSON value that this schema describes.
    Schema(Value),
    /// Text that this regular expression matches.
    Regex(String),
    /// Text of this Lark grammar.
    Lark(String),
    /// One of these texts.
    Choice(Vec<String>),
}

impl Form {
    /// Any JSON object.
    pub fn object() -> Self {
        Self::Schema(json!({ "type": "object" }))
    }

    /// Refuses what cannot be compiled safely.
    fn check(&self) -> Result<(), TooLarge> {
        match self {
            Self::Schema(schema) => levels::check_schema(schema),
            Self::Lark(lark) => levels::check_lark(lark),
            Self::Regex(regex) => levels::check_bytes(regex.len()),
            Self::Choice(texts) => levels::check_bytes(texts.iter().map(|text| text.len() + 5).sum()),
        }
    }

    fn grammar(&self) -> TopLevelGrammar {
        match self {
            Self::Schema(schema) => TopLevelGrammar::from_json_schema(with_little_space(schema)),
            Self::Regex(regex) => TopLevelGrammar::from_regex(regex),
            Self::Lark(lark) => TopLevelGrammar::from_lark(lark.clone()),
            Self::Choice(texts) => {
                let texts: Vec<String> = texts.iter().map(|text| json!(text).to_string()).collect();
                TopLevelGrammar::from_lark(format!("start: {}", texts.join(" | ")))
            }
        }
    }
}

/// A schema whose values are written with no more space than people write: a blank, or a line's end and what indents the next.
/// A small model that may write blanks without end does.
pub(crate) fn with_little_space(schema: &Value) -> Value {
    const OPTIONS: &str = "x-guidance";
    let mut schema = schema.clone();
    if let Some(fields) = schema.as_object_mut().filter(|fields| !fields.contains_key(OPTIONS)) {
        fields.insert(OPTIONS.to_owned(), json!({ "whitespace_pattern": r" |\n {0,32}" }));
    }
    schema
}

/// Grammars for one vocabulary, which is laid out for them when the first one is asked for.
#[derive(Default)]
pub(crate) struct Grammars {
    ready: OnceLock<Result<(ParserFactory, Sender<Work>), String>>,
    /// Held while a grammar is compiled: one large stack at a time.
    compiling: Mutex<()>,
}

/// Why answers cannot be held to a form.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum FormError {
    #[error(transparent)]
    TooLarge(#[from] TooLarge),
    /// What is wrong with it, or not known of it, in a line.
    #[error("{0}")]
    Wrong(String),
}

impl Grammars {
    /// A guide to answers of this form.
    ///
    /// # Errors
    /// [`FormError`].
    pub fn guide(&self, tokenizer: &Tokenizer, form: &Form) -> Result<Guide, FormError> {
        form.check()?;
        let ready = self.ready.get_or_init(|| Ok((factory(tokenizer)?, start_thread()?)));
        let (factory, work) = ready.as_ref().map_err(|why| FormError::Wrong(why.clone()))?;
        let matcher = self.on_large_stack(|| Matcher::new(factory.create_parser(form.grammar())))?;
        match matcher.get_error() {
            Some(why) => Err(FormError::Wrong(why.lines().next().unwrap_or_default().to_owned())),
            None => Ok(Guide { matcher: Some(matcher), coming: None, work: work.clone() }),
        }
    }

    /// Compiles where deep grammars do not overflow the stack.
    fn on_large_stack(&self, compile: impl FnOnce() -> Matcher + Send) -> Result<Matcher, FormError> {
        let _alone = self.compiling.lock().unwrap_or_else(PoisonError::into_inner);
        let compiled = std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("compiler".to_owned()).stack_size(COMPILER_STACK);
            let thread = thread.spawn_scoped(scope, compile).map_err(|error| error.to_string())?;
            thread.join().map_err(|_| "an internal error while the form was compiled".to_owned())
        });
        compiled.map_err(FormError::Wrong)
    }
}

fn factory(tokenizer: &Tokenizer) -> Result<ParserFactory, String> {
    let n_vocab = tokenizer.n_vocab() as u32;
    let word = |id: u32| match tokenizer.kind(id) {
        Some(TokenKind::Normal | TokenKind::Byte | TokenKind::UserDefined) => {
            tokenizer.token_bytes(id).to_vec()
        }
        // Others are no text; a grammar may name them.
        _ => {
            let name = tokenizer.token_text(id).unwrap_or_default().as_bytes();
            [&[TokTrie::SPECIAL_TOKEN_MARKER], name].concat()
        }
    };
    let words: Vec<Vec<u8>> = (0..n_vocab).map(word).collect();
    let ends = tokenizer.eog_ids();
    let end = *ends.first().ok_or("the model has no token that ends an answer, so a form cannot be held")?;
    let trie = TokTrie::from(&TokRxInfo::new(n_vocab, end), &words).with_eos_tokens(ends);
    let env = Arc::new(ApproximateTokEnv::new(trie));
    let mut factory = ParserFactory::new_simple(&(env as _)).map_err(|error| error.to_string())?;
    factory.quiet();
    factory.limits_mut().verbose_errors = false;
    Ok(factory)
}

/// A mask to be worked out, and where it goes.
struct Work {
    matcher: Matcher,
    to: oneshot::Sender<(Matcher, Result<SimpleVob, String>)>,
}

fn start_thread() -> Result<Sender<Work>, String> {
    let (work, received) = channel::<Work>();
    let run = move || {
        for Work { mut matcher, to } in received {
            let mask = matcher.compute_mask_or_eos().map_err(|error| error.to_string());
            // Whoever asked may have gone.
            _ = to.send((matcher, mask));
        }
    };
    let thread = std::thread::Builder::new().name("grammar".to_owned()).stack_size(MASK_STACK).spawn(run);
    thread.map(|_| work).map_err(|error| error.to_string())
}

/// Where an answer stands in its form.
pub(crate) struct Guide {
    /// Away while the next mask is worked out.
    matcher: Option<Matcher>,
    coming: Option<oneshot::Receiver<(Matcher, Result<SimpleVob, String>)>>,
    work: Sender<Work>,
}

/// When a guide begins to hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cue {
    /// The thought is over that the answer begins with.
    Thought,
    /// This text has been said, outside of a thought.
    Said(&'static str),
}

impl Cue {
    /// Whether it is, with more text behind what was said of late.
    fn is_given(self, recent: &mut String, text: &str) -> bool {
        let Self::Said(wanted) = self else { return true };
        *recent += text;
        let surplus = recent.len().saturating_sub(2 * wanted.len());
        let cut = (surplus..recent.len()).find(|&at| recent.is_char_boundary(at)).unwrap_or(0);
        recent.drain(..cut);
        recent.ends_with(wanted)
    }
}

/// What an answer is held to.
#[derive(Default)]
pub(crate) struct Guides {
    now: Option<Guide>,
    later: Option<(Cue, Guide)>,
    /// The last of what was said, while a guide waits for a text.
    recent: String,
}

impl Guides {
    /// Of an answer that is held to a form from its beginning.
    pub fn now(guide: Guide) -> Self {
        Self { now: Some(guide), ..Self::default() }
    }

    /// Of one that is from there on.
    pub fn later(cue: Cue, guide: Guide) -> Self {
        Self { later: Some((cue, guide)), ..Self::default() }
    }

    /// The same for another answer.
    pub fn fork(&self) -> Self {
        let later = self.later.as_ref().and_then(|(cue, guide)| Some((*cue, guide.fork()?)));
        Self { now: self.now.as_ref().and_then(Guide::fork), later, recent: self.recent.clone() }
    }

    /// The guide that holds now.
    pub fn holding(&mut self) -> Option<&mut Guide> {
        self.now.as_mut()
    }

    /// Takes note of a token, of the text that has become certain with it, and whether that ends within a thought. Whether the answer
    /// is complete.
    pub fn said(&mut self, token: u32, text: &str, is_thinking: bool) -> Result<bool, String> {
        if let Some(guide) = &mut self.now {
            return guide.said(token);
        }
        let recent = &mut self.recent;
        let given = |(cue, _): &mut (Cue, Guide)| !is_thinking && cue.is_given(recent, text);
        self.now = self.later.take_if(given).map(|(_, guide)| guide);
        Ok(false)
    }
}

const AWAY: &str = "the thread of the grammars has ended";

impl Guide {
    /// A guide at the same place.
    pub fn fork(&self) -> Option<Self> {
        let matcher = self.matcher.as_ref()?.deep_clone();
        Some(Self { matcher: Some(matcher), coming: None, work: self.work.clone() })
    }

    /// Begins to work out which tokens may come next.
    fn look_ahead(&mut self) {
        if let Some(matcher) = self.matcher.take() {
            let (to, coming) = oneshot::channel();
            self.coming = Some(coming);
            // Where the thread has ended nothing comes, which is noticed.
            _ = self.work.send(Work { matcher, to });
        }
    }

    /// Rules out what may not come next.
    pub fn mask(&mut self, logits: &mut [f32]) -> Result<(), String> {
        self.look_ahead();
        let (matcher, mask) =
            self.coming.take().and_then(|coming| coming.blocking_recv().ok()).ok_or(AWAY)?;
        self.matcher = Some(matcher);
        let mask = mask?;
        for (id, logit) in logits.iter_mut().enumerate() {
            if id >= mask.len() || !mask.is_allowed(id as u32) {
                *logit = f32::NEG_INFINITY;
            }
        }
        Ok(())
    }

    /// Takes note of a token. Whether the answer is complete with it, and nothing can follow.
    pub fn said(&mut self, token: u32) -> Result<bool, String> {
        let matcher = self.matcher.as_mut().ok_or(AWAY)?;
        matcher.consume_token(token).map_err(|error| error.to_string())?;
        let is_complete = matcher.is_stopped();
        if !is_complete {
            self.look_ahead();
        }
        Ok(is_complete)
    }

    /// Whether these tokens are a whole answer.
    #[cfg(test)]
    pub fn takes(mut self, tokens: &[u32]) -> bool {
        let matcher = self.matcher.as_mut().expect("nothing has been asked for");
        tokens.iter().all(|&token| {
            matcher.compute_mask().is_ok_and(|mask| mask.is_allowed(token))
                && matcher.consume_token(token).is_ok()
        }) && matcher.is_accepting().is_ok_and(|accepts| accepts)
    }
}

#[cfg(test)]
mod deepest;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_form_holds_from_its_cue_on_and_a_thought_gives_none() {
        let model = kvant::Model::bundled(kvant::OpenOptions::default()).unwrap();
        let form = Form::object();
        let guide = || Grammars::default().guide(model.tokenizer().unwrap(), &form).unwrap();
        let mut call = Guides::later(Cue::Said("<tool_call>"), guide());
        let mut holds_after = |text: &str, is_thinking| {
            assert_eq!(call.said(0, text, is_thinking), Ok(false));
            call.holding().is_some()
        };
        for text in ["I may write ", "<tool_", "call>", "<tool_call>"] {
            assert!(!holds_after(text, true), "{text}");
        }
        for text in ["</think>", "Then: <tool", "-call> <tool", "_call"] {
            assert!(!holds_after(text, false), "{text}");
        }
        assert!(holds_after(">", false));
        let mut spoken = Guides::later(Cue::Thought, guide());
        for (is_thinking, holds) in [(true, false), (false, true)] {
            assert_eq!(spoken.said(0, "a", is_thinking), Ok(false));
            assert_eq!(spoken.fork().holding().is_some(), holds);
        }
    }
}
