//! Answers to turns of a conversation: iterators over text, reasoning and tool calls.

use std::collections::VecDeque;

use kvant_generate::output_parser::{OutputParser, ParsedAnswer, Part};

use crate::error::Error;
use crate::generation::{
    CancelFlag, DecoderSpec, GenerateOptions, GenerationState, GenerationStats, Token, check,
};
use crate::session::Session;
use crate::turn::Turn;

/// An iterator over the parts of an answer. Dropping it stops the generation.
pub struct Answer<'s> {
    session: &'s mut Session,
    state: AnswerState,
}

impl Answer<'_> {
    /// Returns the counts and times so far.
    pub fn stats(&self) -> GenerationStats {
        self.state.stats()
    }

    /// Returns warnings about schemas of tools that are enforced in part, each one line.
    pub fn warnings(&self) -> &[String] {
        self.state.warnings()
    }

    /// Returns the rest of the answer: all of it before the first part was taken.
    ///
    /// # Errors
    /// As [`Session::feed`].
    pub fn parsed(self) -> Result<ParsedAnswer, Error> {
        self.collect()
    }
}

impl Iterator for Answer<'_> {
    type Item = Result<Part, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        self.state.next(self.session)
    }
}

/// An answer that does not borrow its session. See [`Session::begin_answer`].
pub struct AnswerState {
    generation: GenerationState,
    parser: OutputParser,
    /// Parts that have not been returned yet.
    parts: VecDeque<Part>,
    has_ended: bool,
    warnings: Vec<String>,
}

impl AnswerState {
    /// Creates the state of an answer without any token yet.
    pub(crate) fn new(generation: GenerationState, parser: OutputParser, warnings: Vec<String>) -> Self {
        Self { generation, parser, parts: VecDeque::new(), has_ended: false, warnings }
    }

    /// Returns the counts and times so far.
    pub fn stats(&self) -> GenerationStats {
        self.generation.stats()
    }

    /// Works as [`Answer::warnings`].
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Returns the next part; `None` when the answer has ended. `session` must be the one that this
    /// began with, unchanged since the last call.
    pub fn next(&mut self, session: &mut Session) -> Option<Result<Part, Error>> {
        loop {
            if let Some(part) = self.parts.pop_front() {
                return Some(Ok(part));
            }
            if self.has_ended {
                return None;
            }
            let token = self.generation.next(session);
            if let Err(error) = self.push(token) {
                return Some(Err(error));
            }
        }
    }

    /// Parses the text of a token or, for `None`, the withheld text; the answer has ended then.
    pub(crate) fn push(&mut self, token: Option<Result<Token, Error>>) -> Result<(), Error> {
        self.has_ended = !matches!(token, Some(Ok(_)));
        let text = match token.transpose()? {
            Some(token) => token.text,
            None => self.generation.finish_text(),
        };
        self.parts.extend(self.parser.push_text(&text, self.has_ended));
        Ok(())
    }

    /// Returns the generation, unless the answer has ended.
    pub(crate) fn generation(&mut self) -> Option<&mut GenerationState> {
        (!self.has_ended).then_some(&mut self.generation)
    }

    /// Ends the answer; parts that were parsed can still be taken.
    pub(crate) fn cancel(&mut self) {
        self.has_ended = true;
    }

    /// Takes the parts that have not been returned yet.
    pub(crate) fn take_parts(&mut self) -> VecDeque<Part> {
        std::mem::take(&mut self.parts)
    }
}

impl Session {
    /// Feeds the prompt of a turn and returns an iterator over the parts of its answer. The common
    /// prefix of the context and the prompt is reused and the rest is dropped.
    ///
    /// # Errors
    /// As [`Session::generate`]; a format, or the schema of a required tool, that cannot be
    /// enforced.
    pub fn answer(&mut self, turn: &Turn, options: GenerateOptions) -> Result<Answer<'_>, Error> {
        let state = self.begin_answer(turn, options, &CancelFlag::default(), &mut |_| ())?;
        Ok(Answer { session: self, state })
    }

    /// Works as [`Session::answer`] for an answer that borrows the session per part, with a flag
    /// that cancels it and a callback for the prefill progress.
    ///
    /// # Errors
    /// As [`Session::answer`].
    pub fn begin_answer(
        &mut self,
        turn: &Turn,
        options: GenerateOptions,
        cancel: &CancelFlag,
        progress: &mut dyn FnMut(usize),
    ) -> Result<AnswerState, Error> {
        check(self, &turn.tokens, &options)?;
        let draft_max = options.draft_max;
        let spec = DecoderSpec::new(self, options, &turn.answer)?;
        let sequence = spec.sequence(&turn.tokens, 0);
        let generation = GenerationState::prefill(self, sequence, draft_max, cancel, progress)?;
        Ok(AnswerState::new(generation, turn.answer.parser.clone(), spec.warnings))
    }
}
