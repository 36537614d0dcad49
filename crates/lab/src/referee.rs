//! The referee: right first, then fast, then nowhere slower.
//!
//! A candidate is judged in this order, cheapest first, and the first fault ends it:
//!
//! 1. **Edges**: answers at edge sizes, on every kernel set of this machine, against the slow
//!    reference, value by value; the same bits when repeated and on any number of threads; beyond
//!    2^16 tokens. Base's answers too, as the candidate's are compared with them later.
//! 2. **Suites**: the conformance suites of the target, in the candidate's tree.
//! 3. **Gate**: what the bundled model says, for targets of whole models ([`crate::gate`]).
//! 4. **Race**: candidate against base at the size of the target ([`crate::race`]).
//! 5. **Guards**: the same at other sizes and depths; none may be below [`MIN_GUARD`].

use kvant_codec::random::Random;

use crate::case::Case;
use crate::device::{arithmetic, kernel_sets};
use crate::exam::{Answers, exam};
use crate::gate;
use crate::lane::{Contenders, Lane, failure_of};
use crate::machine::Machine;
use crate::race::{Goal, Race, Side, race};
use crate::subject::{Settings, answers_of};
use crate::target::Target;
use crate::verdict::{Fault, Verdict};

/// Least ratio of a guard.
pub const MIN_GUARD: f64 = 0.98;
/// Share of the budget that a guard has.
const GUARD_SHARE: f64 = 0.25;
/// Steps of a request at an edge, and how often it is repeated.
const EDGE_STEPS: usize = 3;
const EDGE_REPEATS: usize = 3;
/// Numbers of threads that must give the same bits.
const THREADS: [usize; 3] = [1, 2, 3];

/// How to judge.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Options {
    /// Most seconds of the race; each guard has a quarter of it.
    pub budget: f64,
    /// Threads of a CPU.
    pub threads: usize,
    /// Seed of everything that the candidate is asked; fresh in each judgement.
    pub seed: u64,
}

/// A judgement.
#[derive(Debug, Clone, PartialEq)]
pub struct Judgement {
    /// The verdict.
    pub verdict: Verdict,
    /// Why, in one line.
    pub reason: String,
    /// Answers that were compared with the reference at edge sizes, in requests.
    pub n_edges: usize,
    /// The race.
    pub race: Option<Race>,
    /// The guards, in order.
    pub guards: Vec<Guard>,
}

impl Judgement {
    /// Returns the judgement that ends with a fault before anything is run.
    pub fn of_fault(fault: &Fault) -> Self {
        Self { verdict: fault.verdict(), reason: fault.to_string(), ..Self::default() }
    }
}

impl Default for Judgement {
    /// Nothing has been judged.
    fn default() -> Self {
        let (n_edges, race, guards) = (0, None, Vec::new());
        Self { verdict: Verdict::Broken, reason: String::new(), n_edges, race, guards }
    }
}

/// A guard and its race.
#[derive(Debug, Clone, PartialEq)]
pub struct Guard {
    /// What was raced.
    pub case: Case,
    /// The result.
    pub race: Race,
}

/// The referee of one target.
pub struct Referee<'a> {
    /// The target.
    pub target: &'a Target,
    /// How to judge.
    pub options: Options,
    /// Runs the conformance suites of the target.
    pub suites: &'a mut dyn FnMut() -> Result<(), Fault>,
    /// Hears what is being done.
    pub note: &'a mut dyn FnMut(&str),
}

impl Referee<'_> {
    /// Judges a candidate.
    pub fn judge(&mut self, contenders: &mut Contenders<'_>, machine: &mut dyn Machine) -> Judgement {
        let mut judgement = Judgement::default();
        let mut random = Random::new(self.options.seed);
        let judged = self.judge_into(&mut judgement, contenders, machine, &mut random);
        (judgement.verdict, judgement.reason) = match judged {
            Err(fault) => (fault.verdict(), fault.to_string()),
            Ok(()) => verdict_of(&judgement),
        };
        judgement
    }

    fn judge_into(
        &mut self,
        judgement: &mut Judgement,
        contenders: &mut Contenders<'_>,
        machine: &mut dyn Machine,
        random: &mut Random,
    ) -> Result<(), Fault> {
        self.check_edges(judgement, contenders, random)?;
        (self.note)("conformance suites");
        (self.suites)()?;
        if let Case::Model(case) = &self.target.case {
            (self.note)("gate: divergence, ten questions");
            gate::check(contenders, case, &self.settings(None))?;
        }
        (self.note)(&format!("race: {}", self.target.case));
        let budget = self.options.budget;
        let result = self.race(&self.target.case, Goal::Compare, budget, contenders, machine, random)?;
        let is_slower = result.is_slower();
        judgement.race = Some(result);
        if is_slower {
            return Ok(());
        }
        for case in &self.target.guards {
            (self.note)(&format!("guard: {case}"));
            let (goal, budget) = (Goal::Below(MIN_GUARD), GUARD_SHARE * budget);
            let race = self.race(case, goal, budget, contenders, machine, random)?;
            judgement.guards.push(Guard { case: case.clone(), race });
        }
        Ok(())
    }

    fn settings(&self, isa: Option<&'static str>) -> Settings {
        Settings { device: self.target.device.to_owned(), isa, threads: self.options.threads }
    }

    fn race(
        &self,
        case: &Case,
        goal: Goal,
        budget: f64,
        contenders: &mut Contenders<'_>,
        machine: &mut dyn Machine,
        random: &mut Random,
    ) -> Result<Race, Fault> {
        let settings = self.settings(None);
        let mut lane = Lane::new(contenders, case, &settings, machine, random.bits())?;
        race(&mut lane, machine, goal, budget, random)
    }

    /// Compares the candidate's answers with the reference, and those of base as it is timed.
    fn check_edges(
        &mut self,
        judgement: &mut Judgement,
        contenders: &mut Contenders<'_>,
        random: &mut Random,
    ) -> Result<(), Fault> {
        let sets = match self.target.device {
            "cpu" if !matches!(self.target.case, Case::Model(_)) => {
                kernel_sets().into_iter().map(Some).collect()
            }
            _ => vec![None],
        };
        let fastest = *sets.last().expect("a device has a kernel set");
        let all = || self.target.edges.iter().map(|case| (case, &sets[..]));
        let far = self.target.far.iter().map(|case| (case, std::slice::from_ref(&fastest)));
        let cases: Vec<_> = all().chain(far).collect();
        for (case, sets) in cases {
            (self.note)(&format!("edge: {case}"));
            let edge = Edge { case, seed: random.bits() };
            for &set in sets {
                let settings = self.settings(set);
                judgement.n_edges += edge.check(Side::Candidate, contenders, &settings, random)?;
            }
            // Timed outputs are compared with base's.
            edge.check(Side::Base, contenders, &self.settings(None), random)?;
        }
        Ok(())
    }
}

/// A case of edge size.
struct Edge<'a> {
    case: &'a Case,
    seed: u64,
}

impl Edge<'_> {
    /// Checks the answers of a side, and returns the number of requests.
    fn check(
        &self,
        side: Side,
        contenders: &mut Contenders<'_>,
        settings: &Settings,
        random: &mut Random,
    ) -> Result<usize, Fault> {
        let failed = failure_of(side, self.case);
        let exam = exam(self.case, self.seed).map_err(Fault::Broken)?;
        let arithmetic = arithmetic(settings).map_err(Fault::Broken)?;
        let on = settings.isa.map(|isa| format!("on {isa}: ")).unwrap_or_default();
        let inputs = exam.inputs(EDGE_STEPS.min(exam.max_steps()), random);
        let mut n_requests = 0;
        let mut first: Option<Vec<u8>> = None;
        // Threads are those of a CPU.
        let threads = if settings.device == "cpu" { &THREADS[..] } else { &THREADS[..1] };
        for &threads in threads {
            let settings = Settings { threads, ..settings.clone() };
            let mut subject = contenders.start(side, self.case, exam.state(), &settings)?;
            for _ in 0..EDGE_REPEATS {
                let got = answers_of(&mut *subject, &inputs).map_err(&failed)?;
                n_requests += 1;
                match &first {
                    Some(first) if *first != got => {
                        let what = "the same inputs give other bits";
                        return Err(failed(format!("{on}{what}, on {threads} threads")));
                    }
                    Some(_) => {}
                    None => {
                        let answers = Answers { got: &got, base: None };
                        let checked = exam.check(&arithmetic, &inputs, answers, random);
                        checked.map_err(|line| failed(format!("{on}{line}")))?;
                        first = Some(got);
                    }
                }
            }
        }
        Ok(n_requests)
    }
}

/// Returns the verdict on right answers, and its reason.
fn verdict_of(judgement: &Judgement) -> (Verdict, String) {
    let race = judgement.race.as_ref().expect("a judgement without a fault has a race");
    let is_faster = race.is_faster();
    // A gain must be known to cost nothing elsewhere: where the guard's budget ended first, its
    // best estimate decides. Without a gain only what is beyond doubt counts.
    let fails = |Guard { race, .. }: &&Guard| {
        let bound = MIN_GUARD.ln();
        match race.is_resolved {
            true => race.ratio.high < bound,
            false => is_faster && race.ratio.middle < bound,
        }
    };
    let failed = judgement.guards.iter().find(fails);
    match failed {
        Some(Guard { case, race }) => {
            (Verdict::Worse, format!("{:.3} x at a guard: {case}, at least {MIN_GUARD}", race.factor()))
        }
        None if is_faster => (Verdict::Better, format!("{:.3} x", race.factor())),
        None if race.is_slower() => (Verdict::Worse, format!("{:.3} x", race.factor())),
        None if race.is_resolved => (Verdict::Equal, format!("{:.3} x, within 1 %", race.factor())),
        None => (Verdict::Equal, format!("{:.3} x, no difference found within the budget", race.factor())),
    }
}
