//! A case of both trees, as a race times it.

use kvant_codec::random::Random;

use crate::case::Case;
use crate::device::{DeviceArithmetic, arithmetic};
use crate::exam::{Answers, Exam, exam};
use crate::machine::Machine;
use crate::race::{Side, Track};
use crate::subject::{Contender, Settings, Subject, answers_of, fetch};
use crate::verdict::Fault;
use crate::wire::Digest;

/// Least seconds of a request: a thousand times what a pipe takes.
const MIN_SECONDS: f64 = 0.02;

/// The two trees.
pub struct Contenders<'a> {
    /// The tree under judgement.
    pub candidate: &'a mut dyn Contender,
    /// The tree that it is compared with.
    pub base: &'a mut dyn Contender,
}

impl Contenders<'_> {
    /// Starts a case on one of them.
    ///
    /// # Errors
    ///
    /// [`Fault::Wrong`] from the candidate, [`Fault::Broken`] from base.
    pub fn start(
        &mut self,
        side: Side,
        case: &Case,
        state: &[u8],
        settings: &Settings,
    ) -> Result<Box<dyn Subject>, Fault> {
        let contender = match side {
            Side::Candidate => &mut *self.candidate,
            Side::Base => &mut *self.base,
        };
        contender.start(case, state, settings).map_err(failure_of(side, case))
    }
}

/// Returns the fault of a side that fails with a line.
pub fn failure_of(side: Side, case: &Case) -> impl Fn(String) -> Fault {
    move |line| {
        let line = format!("{case}: {} fails: {line}", side.name());
        match side {
            Side::Candidate => Fault::Wrong(line),
            Side::Base => Fault::Broken(line),
        }
    }
}

/// A case of both trees.
pub struct Lane<'a, 'c> {
    contenders: &'a mut Contenders<'c>,
    case: &'a Case,
    settings: &'a Settings,
    exam: Box<dyn Exam>,
    arithmetic: DeviceArithmetic,
    random: Random,
    /// Steps of a request.
    n_steps: usize,
    /// Inputs of the request that every start begins with, and the digests of its answers.
    first_inputs: Vec<f32>,
    first_digests: [Option<Digest>; 2],
    round: Option<Round>,
}

/// What a round has run. Lists are `[candidate, base]`.
struct Round {
    subjects: [Box<dyn Subject>; 2],
    /// Inputs of the two requests of each side.
    inputs: [Vec<f32>; 2],
    digests: [Option<Digest>; 2],
    answers: [Vec<Vec<u8>>; 2],
}

/// Sides in the order of lists.
const SIDES: [Side; 2] = [Side::Candidate, Side::Base];

impl<'a, 'c> Lane<'a, 'c> {
    /// Prepares a case, and finds how many steps a request must have.
    ///
    /// # Errors
    ///
    /// Base fails.
    pub fn new(
        contenders: &'a mut Contenders<'c>,
        case: &'a Case,
        settings: &'a Settings,
        machine: &mut dyn Machine,
        seed: u64,
    ) -> Result<Self, Fault> {
        let mut random = Random::new(seed);
        let exam = exam(case, random.bits()).map_err(Fault::Broken)?;
        let arithmetic = arithmetic(settings).map_err(Fault::Broken)?;
        let (n_steps, first_inputs, round) = (1, Vec::new(), None);
        let mut lane = Self {
            contenders,
            case,
            settings,
            exam,
            arithmetic,
            random,
            n_steps,
            first_inputs,
            first_digests: [None; 2],
            round,
        };
        lane.n_steps = lane.steps_of_a_request(machine)?;
        lane.first_inputs = lane.exam.inputs(lane.n_steps, &mut lane.random);
        Ok(lane)
    }

    fn steps_of_a_request(&mut self, machine: &mut dyn Machine) -> Result<usize, Fault> {
        let failed = failure_of(Side::Base, self.case);
        let mut base = self.contenders.start(Side::Base, self.case, self.exam.state(), self.settings)?;
        let (max, mut n) = (self.exam.max_steps(), 1);
        loop {
            let inputs = self.exam.inputs(n, &mut self.random);
            let start = machine.now();
            let digest = base.run(&inputs).map_err(&failed)?;
            let seconds = machine.now() - start;
            fetch(&mut *base, digest).map_err(&failed)?;
            if seconds >= MIN_SECONDS || n >= max {
                return Ok(n);
            }
            // The first requests wake caches and clocks, so that one step predicts too many.
            let wanted = (n as f64 * MIN_SECONDS / seconds.max(1e-9)).ceil() as usize;
            n = wanted.clamp(n + 1, 4 * n).min(max);
        }
    }

    /// Runs the first request of a start: its answers have the same bits at every start.
    fn run_first(&mut self, side: Side, subject: &mut dyn Subject) -> Result<(), Fault> {
        let answers = answers_of(subject, &self.first_inputs).map_err(failure_of(side, self.case))?;
        let digest = Digest::of(&answers);
        let first = &mut self.first_digests[side as usize];
        match *first {
            Some(known) if known != digest => Err(failure_of(side, self.case)(
                "the same inputs give other bits after another start".to_owned(),
            )),
            _ => {
                *first = Some(digest);
                Ok(())
            }
        }
    }
}

impl Track for Lane<'_, '_> {
    fn begin(&mut self) -> Result<(), Fault> {
        let inputs = [(); 2].map(|()| self.exam.inputs(self.n_steps, &mut self.random));
        // Which process is started first may decide where its memory lies.
        let order = if self.random.bits() >> 63 == 0 { SIDES } else { [Side::Base, Side::Candidate] };
        let mut subjects = [None, None];
        for side in order {
            let mut subject = self.contenders.start(side, self.case, self.exam.state(), self.settings)?;
            self.run_first(side, &mut *subject)?;
            subjects[side as usize] = Some(subject);
        }
        let subjects = subjects.map(|subject| subject.expect("both sides are started"));
        self.round = Some(Round { subjects, inputs, digests: [None; 2], answers: Default::default() });
        Ok(())
    }

    fn request(&mut self, side: Side) -> Result<(), Fault> {
        let round = self.round.as_mut().expect("a round has begun");
        let n_done = round.answers[side as usize].len();
        let digest = round.subjects[side as usize].run(&round.inputs[n_done]);
        round.digests[side as usize] = Some(digest.map_err(failure_of(side, self.case))?);
        Ok(())
    }

    fn fetch(&mut self, side: Side) -> Result<(), Fault> {
        let round = self.round.as_mut().expect("a round has begun");
        let digest = round.digests[side as usize].take().expect("a request has run");
        let answers = fetch(&mut *round.subjects[side as usize], digest);
        round.answers[side as usize].push(answers.map_err(failure_of(side, self.case))?);
        Ok(())
    }

    fn compare(&mut self) -> Result<(), Fault> {
        let round = self.round.take().expect("a round has begun");
        let [candidate, base] = &round.answers;
        for (inputs, (got, base)) in round.inputs.iter().zip(candidate.iter().zip(base)) {
            let answers = Answers { got, base: Some(base) };
            let checked = self.exam.check(&self.arithmetic, inputs, answers, &mut self.random);
            checked.map_err(|line| Fault::Wrong(format!("{}: timed: {line}", self.case)))?;
        }
        Ok(())
    }
}
