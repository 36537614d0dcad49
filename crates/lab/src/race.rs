//! Times a candidate against base in interleaved rounds, until their ratio is known.
//!
//! A round starts both sides afresh, so that where the system happens to place a process is noise
//! of the round and not a gain of a side, and runs four requests in the order ABBA or BAAB, which a
//! coin chooses: a linear drift within a round cancels, and the signs of rounds are fair coins
//! ([`crate::interval`]). The judge's loop runs before the first request and after each one.
//! Outputs are compared before a round counts.
//!
//! # Power states
//!
//! The loop takes a fixed number of clock cycles. Two rules keep the clock rate out of the result:
//!
//! - A round in which the loop's time varied more than three times as much as in the median round
//!   (and more than [`STEADY`]) is discarded: the rate changed within it.
//! - The loop after requests of the candidate is compared with the loop after requests of base, as
//!   the sides are, by the interval of the median over all rounds. If it excludes a difference
//!   within [`POWER_MARGIN`], a side changes the machine that the other one is timed on, and there
//!   is no result.

use kvant_codec::random::Random;

use crate::interval::{FIRST_LOOK, Interval, Looks};
use crate::machine::Machine;
use crate::verdict::Fault;

/// Ratios within 1 % of each other are equal: the placement of unchanged code moves times as far.
pub const MARGIN: f64 = 0.01;
/// Variation of the loop within a round that is never a reason to discard it.
pub const STEADY: f64 = 0.05;
/// Rounds that may be discarded where too few are steady.
const MAX_DISCARDED: usize = 4 * FIRST_LOOK;
/// Largest difference of the loop after the sides.
pub const POWER_MARGIN: f64 = 0.01;

/// A side of a race.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The tree under judgement.
    Candidate,
    /// The tree that it is compared with.
    Base,
}

impl Side {
    /// Returns its name in messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Candidate => "the candidate",
            Self::Base => "base",
        }
    }
}

/// What is timed.
pub trait Track {
    /// Starts both sides afresh and runs each once.
    fn begin(&mut self) -> Result<(), Fault>;
    /// Runs the next request of a side; the clock is read around it. The two requests of a side
    /// have different inputs, those of the other side are the same.
    fn request(&mut self, side: Side) -> Result<(), Fault>;
    /// Fetches the outputs of that request; not timed.
    fn fetch(&mut self, side: Side) -> Result<(), Fault>;
    /// Compares the outputs of the round.
    fn compare(&mut self) -> Result<(), Fault>;
}

/// What a race is to find.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Goal {
    /// Which side is faster, or that neither is.
    Compare,
    /// Whether the ratio is below this number.
    Below(f64),
}

/// A race and its result.
#[derive(Debug, Clone, PartialEq)]
pub struct Race {
    /// Logarithm of base's time over the candidate's.
    pub ratio: Interval,
    /// Whether the goal was reached before the budget ended.
    pub is_resolved: bool,
    /// Rounds that count.
    pub n_rounds: usize,
    /// Rounds in which the clock rate changed.
    pub n_discarded: usize,
    /// Seconds.
    pub seconds: f64,
}

impl Race {
    /// Returns whether the candidate is faster, beyond doubt.
    pub fn is_faster(&self) -> bool {
        self.is_resolved && self.ratio.low > 0.0 && self.ratio.is_resolved()
    }

    /// Returns whether the candidate is slower, beyond doubt.
    pub fn is_slower(&self) -> bool {
        self.is_resolved && self.ratio.high < 0.0 && self.ratio.is_resolved()
    }

    /// Returns the ratio.
    pub fn factor(&self) -> f64 {
        self.ratio.middle.exp()
    }
}

/// The values of the rounds so far.
#[derive(Default)]
struct Rounds {
    /// Logarithms of base's time over the candidate's.
    ratios: Vec<f64>,
    /// Logarithms of the loop's time after the candidate over that after base.
    shifts: Vec<f64>,
    /// Variation of the loop of every round, the discarded ones included.
    spreads: Vec<f64>,
    n_discarded: usize,
}

/// Races two sides for `budget` seconds at most, or for the rounds of a look if these take longer.
///
/// # Errors
///
/// That of a request or a comparison, and [`Fault::Broken`] if the clock rate follows a side or is
/// never steady.
pub fn race(
    track: &mut dyn Track,
    machine: &mut dyn Machine,
    goal: Goal,
    budget: f64,
    random: &mut Random,
) -> Result<Race, Fault> {
    let start = machine.now();
    let (mut rounds, mut looks) = (Rounds::default(), Looks::default());
    let mut ratio = None;
    loop {
        rounds.run(track, machine, random)?;
        let (seconds, n_rounds) = (machine.now() - start, rounds.ratios.len());
        // Fewer rounds than those of a look tell nothing, however long they take.
        let has_enough = n_rounds >= FIRST_LOOK || rounds.n_discarded > MAX_DISCARDED;
        let is_last = seconds >= budget && has_enough;
        let look = match is_last {
            true => Some(looks.take_last()),
            false => looks.take(n_rounds),
        };
        let Some(error) = look else { continue };
        if let Some(shift) = Interval::of_median(&rounds.shifts, error)
            && (shift.low > POWER_MARGIN || shift.high < -POWER_MARGIN)
        {
            let percent = 100.0 * shift.middle.exp_m1();
            return Err(Fault::Broken(format!(
                "the clock rate follows the side: the judge's loop takes {percent:+.1} % after the candidate"
            )));
        }
        ratio = Interval::of_median(&rounds.ratios, error).or(ratio);
        let is_resolved = ratio.is_some_and(|ratio| goal.is_reached(&ratio));
        if is_resolved || is_last {
            let ratio = ratio.ok_or_else(|| {
                Fault::Broken(format!("the clock rate changed in {} rounds", rounds.n_discarded))
            })?;
            return Ok(Race { ratio, is_resolved, n_rounds, n_discarded: rounds.n_discarded, seconds });
        }
    }
}

impl Goal {
    fn is_reached(self, ratio: &Interval) -> bool {
        match self {
            Self::Compare => ratio.is_resolved() || ratio.is_within(MARGIN.ln_1p()),
            Self::Below(bound) => ratio.high < bound.ln() || ratio.low >= bound.ln(),
        }
    }
}

impl Rounds {
    /// Runs one round, and adds it if the clock rate was steady.
    fn run(
        &mut self,
        track: &mut dyn Track,
        machine: &mut dyn Machine,
        random: &mut Random,
    ) -> Result<(), Fault> {
        use Side::{Base, Candidate};
        track.begin()?;
        let first_is_candidate = random.bits() >> 63 == 0;
        let order = match first_is_candidate {
            true => [Candidate, Base, Base, Candidate],
            false => [Base, Candidate, Candidate, Base],
        };
        let (mut ratio, mut shift) = (0.0, 0.0);
        let mut loops = vec![machine.calibrate()];
        for side in order {
            let start = machine.now();
            track.request(side)?;
            let seconds = machine.now() - start;
            track.fetch(side)?;
            let after = machine.calibrate();
            loops.push(after);
            let sign = if side == Candidate { 1.0 } else { -1.0 };
            ratio -= sign * seconds.ln() / 2.0;
            shift += sign * after.ln() / 2.0;
        }
        track.compare()?;
        let [fastest, slowest] = [f64::min, f64::max].map(|of| loops.iter().copied().reduce(of).unwrap());
        let spread = (slowest / fastest).ln();
        self.shifts.push(shift);
        // Written so that a time of 0 or NaN is never steady.
        match spread <= self.allowed_spread() && ratio.is_finite() {
            true => self.ratios.push(ratio),
            false => self.n_discarded += 1,
        }
        self.spreads.push(spread);
        Ok(())
    }

    /// Returns the variation of the loop from which on a round is discarded.
    fn allowed_spread(&self) -> f64 {
        let mut sorted = self.spreads.clone();
        sorted.sort_by(f64::total_cmp);
        let median = sorted.get(sorted.len() / 2).copied().unwrap_or(0.0);
        f64::max(STEADY, 3.0 * median)
    }
}
