//! Generation: an iterator that samples a token, yields its text and feeds it back.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kvant_generate::Sequence;
use kvant_generate::constraint::{Constraints, OutputFormat};
use kvant_generate::conversation::{AnswerConstraints, AnswerFormat, AnswerRules};
use kvant_generate::decoding::{DecodingOptions, Finish, SampleResult, SequenceDecoder};
use kvant_generate::reasoning_budget::ReasoningBudget;
use kvant_generate::sampler::SamplerParams;
use kvant_model::ModelError;

use crate::clock::Stopwatch;
use crate::error::Error;
use crate::session::Session;

/// Options of a generation.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct GenerateOptions {
    /// Maximum of generated tokens; until end of generation or a full context when `None`.
    pub max_tokens: Option<usize>,
    /// Sampling parameters.
    pub sampler: SamplerParams,
    /// Continues after an end-of-generation token.
    pub ignore_eos: bool,
    /// Texts that end the generation; excluded from its text.
    pub stop: Vec<String>,
    /// Biases added to the logits of these tokens.
    pub bias: Vec<(u32, f32)>,
    /// Constrains the text to a JSON schema, a regular expression or a grammar.
    pub format: Option<OutputFormat>,
    /// Maximum of draft tokens that are verified together with the next token: 0 disables
    /// speculative decoding, `None` is [`Model::max_draft_tokens`](crate::Model::max_draft_tokens).
    /// They change the time of an answer, not its tokens.
    pub draft_max: Option<usize>,
}

/// Stops a generation from another thread; clones share the flag.
#[derive(Debug, Clone, Default)]
pub struct CancelFlag(Arc<AtomicBool>);

impl CancelFlag {
    /// Requests the generation to stop before its next token.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Withdraws the request, so that the flag can serve the next generation.
    pub fn reset(&self) {
        self.0.store(false, Ordering::Relaxed);
    }

    /// Returns whether a stop was requested.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// One generated token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Token {
    /// Its id in the vocabulary.
    pub id: u32,
    /// The text completed by this token: whole characters only, possibly empty.
    pub text: String,
}

/// Why a generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// The model sampled an end-of-generation token, a stop text was generated, or the text is a
    /// complete one of its format.
    Stop,
    /// `max_tokens` were generated.
    Length,
    /// The context is full.
    ContextFull,
    /// It was cancelled.
    Cancelled,
}

impl FinishReason {
    /// Returns `stop`, `length`, `context` or `cancelled`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::ContextFull => "context",
            Self::Cancelled => "cancelled",
        }
    }
}

/// Counts and times of a generation so far. WebAssembly has no clock of its own: times and speeds
/// are zero there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GenerationStats {
    /// Prompt tokens processed, without cached tokens.
    pub n_prompt: usize,
    /// Prefill time.
    pub prefill_time: Duration,
    /// Tokens generated.
    pub n_gen: usize,
    /// Decode time: forward passes and sampling.
    pub decode_time: Duration,
    /// Tokens obtained from forward passes in that time.
    pub n_decode_steps: usize,
    /// Draft tokens verified.
    pub n_drafted: usize,
    /// Draft tokens accepted.
    pub n_accepted: usize,
    /// Why it ended, once it has.
    pub finish: Option<FinishReason>,
}

impl GenerationStats {
    /// Returns the prefill speed in tok/s; 0 when no prompt token was processed.
    pub fn prefill_tps(&self) -> f64 {
        rate(self.n_prompt, self.prefill_time)
    }

    /// Returns the decode speed in tok/s; 0 when no token was decoded.
    pub fn decode_tps(&self) -> f64 {
        rate(self.n_decode_steps, self.decode_time)
    }
}

fn rate(n: usize, time: Duration) -> f64 {
    if time.is_zero() { 0.0 } else { n as f64 / time.as_secs_f64() }
}

/// An iterator over the tokens that follow a prompt. Dropping it stops the generation; the session
/// keeps what was generated except for the last token, which has not been fed yet: feed it to
/// continue by hand.
pub struct Generation<'s> {
    session: &'s mut Session,
    course: GenerationState,
}

impl<'s> Generation<'s> {
    pub(crate) fn start(
        session: &'s mut Session,
        prompt: &[u32],
        options: GenerateOptions,
        cancel: &CancelFlag,
        progress: &mut dyn FnMut(usize),
    ) -> Result<Self, Error> {
        let course = GenerationState::start(session, prompt, options, cancel, progress)?;
        Ok(Self { session, course })
    }

    /// Returns the counts and times so far.
    pub fn stats(&self) -> GenerationStats {
        self.course.stats()
    }

    /// Returns text withheld because its last character is incomplete; to be printed after the
    /// generation has ended.
    pub fn finish_text(&mut self) -> String {
        self.course.finish_text()
    }
}

impl Iterator for Generation<'_> {
    type Item = Result<Token, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        self.course.next(self.session)
    }
}

/// A generation that does not borrow its session, for callers that cannot lend it that long:
/// bindings of other languages, many sessions at once. See [`Session::begin`].
pub struct GenerationState {
    sequence: Sequence,
    /// Maximum of draft tokens.
    draft_max: usize,
    cancel: CancelFlag,
    /// Reason to end behind the token returned last.
    ending: Option<FinishReason>,
    stats: GenerationStats,
}

/// Options and constraints from which the decoders of all answers to a prompt begin.
pub(crate) struct DecoderSpec {
    options: Arc<DecodingOptions>,
    constraints: Constraints,
    /// Warnings about schemas that are enforced in part.
    pub warnings: Vec<String>,
}

impl DecoderSpec {
    /// Returns those of a generation, in the format of an answer.
    pub fn new(session: &Session, options: GenerateOptions, answer: &AnswerFormat) -> Result<Self, Error> {
        let (model, sampler) = (session.model(), options.sampler);
        let mut tools = answer.tools.clone();
        tools.iter_mut().for_each(|tools| tools.set_format(options.format.as_ref()));
        let AnswerConstraints { constraints, warnings } = model.constraints(AnswerRules {
            tools: tools.as_ref(),
            format: options.format.as_ref(),
            is_reasoning: answer.reasoning_budget.as_ref().is_some_and(ReasoningBudget::is_open),
        })?;
        let options = DecodingOptions {
            breakers: if sampler.dry.is_on() { model.default_breakers()? } else { Default::default() },
            sampler,
            max_tokens: options.max_tokens.unwrap_or(usize::MAX),
            stop: options.stop,
            bias: options.bias,
            ignore_eos: options.ignore_eos,
            reasoning_budget: answer.reasoning_budget.clone(),
            call_marks: answer.call_marks.clone(),
            ..DecodingOptions::default()
        };
        Ok(Self { options: Arc::new(options), constraints, warnings })
    }

    /// Returns the sequence of the `index`-th answer to a prompt, with its own seed.
    pub fn sequence(&self, prompt: &[u32], index: usize) -> Sequence {
        let decoder = SequenceDecoder::new(Arc::clone(&self.options), self.constraints.fork(), index);
        Sequence::new(prompt.to_vec(), decoder)
    }
}

/// Rejects an invalid prompt before the session drops any cached token.
pub(crate) fn check(session: &Session, prompt: &[u32], options: &GenerateOptions) -> Result<(), Error> {
    let (model, n_ctx) = (session.model(), session.n_ctx());
    if prompt.is_empty() {
        return Err(Error::EmptyPrompt);
    }
    if prompt.len() > n_ctx {
        return Err(Error::PromptTooLong { tokens: prompt.len(), n_ctx });
    }
    let n_vocab = model.n_vocab();
    model
        .loaded()
        .properties()
        .soft_tokens
        .of(prompt)
        .map_err(|token| ModelError::Token { token, n_vocab })?;
    options.sampler.validate()?;
    model.tokenizer().map(|_| ())
}

impl GenerationState {
    pub(crate) fn start(
        session: &mut Session,
        prompt: &[u32],
        options: GenerateOptions,
        cancel: &CancelFlag,
        progress: &mut dyn FnMut(usize),
    ) -> Result<Self, Error> {
        check(session, prompt, &options)?;
        let draft_max = options.draft_max;
        let spec = DecoderSpec::new(session, options, &AnswerFormat::default())?;
        Self::prefill(session, spec.sequence(prompt, 0), draft_max, cancel, progress)
    }

    /// Feeds the prompt of a sequence.
    pub(crate) fn prefill(
        session: &mut Session,
        sequence: Sequence,
        draft_max: Option<usize>,
        cancel: &CancelFlag,
        progress: &mut dyn FnMut(usize),
    ) -> Result<Self, Error> {
        let draft_max = draft_max.unwrap_or_else(|| session.model().max_draft_tokens());
        let (started, prompt) = (Stopwatch::start(), sequence.tokens());
        let kept = session.reuse_prefix(prompt);
        session.feed(&prompt[kept..], &mut |done| {
            progress(done);
            !cancel.is_cancelled()
        })?;
        // Another answer to the same prompt branches here.
        session.set_checkpoint();
        let (n_prompt, prefill_time) = (prompt.len() - kept, started.elapsed());
        let stats = GenerationStats { n_prompt, prefill_time, ..GenerationStats::default() };
        Ok(Self { sequence, draft_max, cancel: cancel.clone(), ending: None, stats })
    }

    /// Returns the generation of another answer to the prompt that this has fed.
    pub(crate) fn another(&self, sequence: Sequence) -> Self {
        let (draft_max, cancel) = (self.draft_max, self.cancel.clone());
        Self { sequence, draft_max, cancel, ending: None, stats: self.stats }
    }

    /// Returns the counts and times so far.
    pub fn stats(&self) -> GenerationStats {
        let (drafts, n_gen) = (self.sequence.drafts(), self.sequence.decoder().n_generated());
        GenerationStats { n_gen, n_drafted: drafts.n_verified, n_accepted: drafts.n_accepted, ..self.stats }
    }

    /// Returns text withheld because its last character is incomplete or because it may begin a
    /// stop text; to be printed after the generation has ended.
    pub fn finish_text(&mut self) -> String {
        self.sequence.decoder_mut().finish().text
    }

    /// Returns the next token of `session`; `None` when the generation has ended. `session` must be
    /// the one that this began with, unchanged since the last call.
    pub fn next(&mut self, session: &mut Session) -> Option<Result<Token, Error>> {
        if self.stats.finish.is_some() {
            return None;
        }
        let result = self.advance(session);
        self.record(session, result)
    }

    /// Records the end of the generation, if `result` is one.
    fn record(
        &mut self,
        session: &mut Session,
        result: Result<Result<Token, FinishReason>, Error>,
    ) -> Option<Result<Token, Error>> {
        match result {
            Ok(Ok(token)) => Some(Ok(token)),
            Ok(Err(finish)) => {
                self.stats.finish = Some(finish);
                // An idle session holds its cache alone.
                session.release_scratch();
                None
            }
            Err(error) => {
                self.stats.finish = Some(FinishReason::Cancelled);
                Some(Err(error))
            }
        }
    }

    /// Works as [`GenerationState::next`] where the last token has been fed by a step that began at
    /// `started`.
    pub(crate) fn next_fed(
        &mut self,
        session: &mut Session,
        started: Stopwatch,
    ) -> Option<Result<Token, Error>> {
        let result = match self.ending(session) {
            Some(finish) => Ok(Err(finish)),
            None => {
                self.count_step(started.elapsed());
                self.sample(session)
            }
        };
        self.record(session, result)
    }

    /// Returns the sequence, for a step.
    pub(crate) fn sequence_mut(&mut self) -> &mut Sequence {
        &mut self.sequence
    }

    /// Returns the maximum of draft tokens.
    pub(crate) fn draft_max(&self) -> usize {
        self.draft_max
    }

    /// Returns why no further token follows.
    pub(crate) fn ending(&self, session: &Session) -> Option<FinishReason> {
        if self.cancel.is_cancelled() {
            return Some(FinishReason::Cancelled);
        }
        if self.ending.is_some() {
            return self.ending;
        }
        if self.sequence.decoder().n_left() == 0 {
            return Some(FinishReason::Length);
        }
        let is_full = self.is_decode(session) && session.tokens().len() == session.n_ctx();
        is_full.then_some(FinishReason::ContextFull)
    }

    /// Reports whether the last token of the sequence has not been fed yet.
    fn is_decode(&self, session: &Session) -> bool {
        session.tokens().len() < self.sequence.tokens().len()
    }

    /// Returns the next token, or why the generation ended.
    fn advance(&mut self, session: &mut Session) -> Result<Result<Token, FinishReason>, Error> {
        if let Some(finish) = self.ending(session) {
            return Ok(Err(finish));
        }
        if !self.is_decode(session) {
            return self.sample(session);
        }
        let started = Stopwatch::start();
        let n_rows = session.queue_sequence(&mut self.sequence, self.draft_max)?;
        let sampled = self.sample(session)?;
        let time = started.elapsed();
        self.sequence.drafting().1.observe_step_time(n_rows, time);
        self.count_step(time);
        Ok(sampled)
    }

    fn count_step(&mut self, time: Duration) {
        self.stats.decode_time += time;
        self.stats.n_decode_steps += 1;
    }

    /// Samples a token from the logits of `session`.
    fn sample(&mut self, session: &mut Session) -> Result<Result<Token, FinishReason>, Error> {
        Ok(match session.sample_sequence(&mut self.sequence)? {
            SampleResult::Token(output, finish) => {
                self.ending = finish.map(FinishReason::from);
                Ok(Token { id: output.token, text: output.text })
            }
            SampleResult::End => Err(FinishReason::Stop),
        })
    }
}

impl From<Finish> for FinishReason {
    fn from(finish: Finish) -> Self {
        match finish {
            Finish::Stop | Finish::Word(_) => Self::Stop,
            Finish::Length => Self::Length,
        }
    }
}
