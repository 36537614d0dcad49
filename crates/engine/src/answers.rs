//! Several answers to one prompt, which is fed once: each answer has a fork of the session, and one
//! pass over the weights serves all of them.

use std::collections::VecDeque;

use kvant_generate::output_parser::Part;

use crate::answer::AnswerState;
use crate::clock::Stopwatch;
use crate::error::Error;
use crate::generation::{CancelFlag, DecoderSpec, GenerateOptions, GenerationState, GenerationStats, check};
use crate::session::{SequenceStep, Session};
use crate::turn::Turn;

/// An iterator over the parts of several answers, each with the index of its answer.
pub struct Answers {
    answers: Vec<ForkedAnswer>,
    /// Parts that have not been returned yet.
    parts: VecDeque<(usize, Part)>,
}

impl Answers {
    /// Maximum number of answers to a prompt.
    pub const MAX: usize = 128;
}

/// An answer and its session.
struct ForkedAnswer {
    session: Session,
    state: AnswerState,
}

impl Session {
    /// Feeds the prompt of a turn and returns an iterator over the parts of `n` answers, whose
    /// seeds count up from that of `options`. This session then holds the prompt.
    ///
    /// # Errors
    /// As [`Session::answer`]; a number that is not from 1 to [`Answers::MAX`].
    pub fn answers(
        &mut self,
        turn: &Turn,
        n: usize,
        options: GenerateOptions,
        cancel: &CancelFlag,
        progress: &mut dyn FnMut(usize),
    ) -> Result<Answers, Error> {
        if !(1..=Answers::MAX).contains(&n) {
            let expected = format!("a number from 1 to {}", Answers::MAX);
            return Err(Error::Setting { name: "n", expected, got: n.to_string() });
        }
        check(self, &turn.tokens, &options)?;
        let draft_max = options.draft_max;
        let spec = DecoderSpec::new(self, options, &turn.answer)?;
        let first =
            GenerationState::prefill(self, spec.sequence(&turn.tokens, 0), draft_max, cancel, progress)?;
        let mut answers = Answers { answers: Vec::new(), parts: VecDeque::new() };
        for index in 0..n {
            let generation = first.another(spec.sequence(&turn.tokens, index));
            let mut state = AnswerState::new(generation, turn.answer.parser.clone(), spec.warnings.clone());
            // The logits of the prompt are this session's; its forks have none.
            let token = state.generation().and_then(|generation| generation.next(self));
            state.push(token)?;
            answers.answers.push(ForkedAnswer { session: self.fork(), state });
            answers.take_parts(index);
        }
        self.release_scratch();
        Ok(answers)
    }
}

impl Answers {
    /// Returns the counts and times of the answer at this index so far; those of the prompt are the
    /// same for each.
    pub fn stats(&self, index: usize) -> Option<GenerationStats> {
        Some(self.answers.get(index)?.state.stats())
    }

    /// Works as [`Answer::warnings`](crate::Answer::warnings).
    pub fn warnings(&self) -> &[String] {
        self.answers.first().map_or(&[], |answer| answer.state.warnings())
    }

    fn take_parts(&mut self, index: usize) {
        let parts = self.answers[index].state.take_parts();
        self.parts.extend(parts.into_iter().map(|part| (index, part)));
    }

    /// Feeds the last token of each answer in one batch and samples the next one. Returns whether
    /// any answer goes on.
    fn step(&mut self) -> Result<bool, Error> {
        let (started, mut draft_max) = (Stopwatch::start(), 0);
        let (mut going, mut steps) = (Vec::new(), Vec::new());
        for (index, ForkedAnswer { session, state }) in self.answers.iter_mut().enumerate() {
            let Some(generation) = state.generation() else { continue };
            going.push(index);
            // One that ends has no token to feed.
            if generation.ending(session).is_none() {
                draft_max = generation.draft_max();
                steps.push(SequenceStep::new(session, generation.sequence_mut(), 1));
            }
        }
        let fed = Session::step_sequences(&mut steps, draft_max);
        if let Err(error) = fed {
            // The next call returns `None`: no answer goes on without the others.
            going.iter().for_each(|&index| self.answers[index].state.cancel());
            return Err(error);
        }
        for &index in &going {
            let ForkedAnswer { session, state } = &mut self.answers[index];
            let token = state.generation().and_then(|generation| generation.next_fed(session, started));
            state.push(token)?;
            self.take_parts(index);
        }
        Ok(!going.is_empty())
    }
}

impl Iterator for Answers {
    type Item = Result<(usize, Part), Error>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(part) = self.parts.pop_front() {
                return Some(Ok(part));
            }
            match self.step() {
                Ok(true) => {}
                Ok(false) => return None,
                Err(error) => return Some(Err(error)),
            }
        }
    }
}
