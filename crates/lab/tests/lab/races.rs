//! Races on a virtual machine: what they find, and what they do not invent.

use kvant_codec::random::Random;
use kvant_lab::race::{Goal, Race, Side, Track, race};
use kvant_lab::{Fault, Machine};

use crate::fake::VirtualMachine;

/// Two sides whose requests take fixed times.
struct Times<'a> {
    machine: VirtualMachine,
    candidate: f64,
    base: f64,
    /// Changes the machine before each request, by its number.
    weather: &'a mut dyn FnMut(&VirtualMachine, usize),
    n_requests: usize,
}

impl Track for Times<'_> {
    fn begin(&mut self) -> Result<(), Fault> {
        Ok(())
    }

    fn request(&mut self, side: Side) -> Result<(), Fault> {
        (self.weather)(&self.machine, self.n_requests);
        self.n_requests += 1;
        self.machine.work(if side == Side::Candidate { self.candidate } else { self.base });
        Ok(())
    }

    fn fetch(&mut self, _: Side) -> Result<(), Fault> {
        Ok(())
    }

    fn compare(&mut self) -> Result<(), Fault> {
        Ok(())
    }
}

/// Seconds of a race at most.
const BUDGET: f64 = 60.0;

/// Races 20 ms of base against a candidate that takes `share` of it, with this noise.
fn race_of(
    share: f64,
    noise: f64,
    seed: u64,
    weather: &mut dyn FnMut(&VirtualMachine, usize),
) -> Result<Race, Fault> {
    let mut machine = VirtualMachine::new(noise, seed);
    let mut track =
        Times { machine: machine.clone(), candidate: 0.02 * share, base: 0.02, weather, n_requests: 0 };
    race(&mut track, &mut machine, Goal::Compare, BUDGET, &mut Random::new(!seed))
}

fn calm(_: &VirtualMachine, _: usize) {}

/// Returns how many of 20 races have no winner.
fn n_equal(noise: f64, weather: &mut dyn FnMut(&VirtualMachine, usize)) -> usize {
    let races = (0..20).map(|seed| race_of(1.0, noise, seed, weather).unwrap());
    races.filter(|race| !race.is_faster() && !race.is_slower()).count()
}

#[test]
fn a_tree_equals_itself_in_20_of_20_at_2_percent_noise() {
    assert_eq!(n_equal(0.02, &mut calm), 20);
    // They are known to be equal, not merely unresolved.
    assert!((0..20).all(|seed| race_of(1.0, 0.02, seed, &mut calm).unwrap().is_resolved));
}

#[test]
fn a_tree_equals_itself_in_20_of_20_at_20_percent_noise() {
    assert_eq!(n_equal(0.2, &mut calm), 20);
}

#[test]
fn winners_of_equal_races_are_as_rare_as_stated() {
    // One in a thousand, so fewer than six of a thousand but once in thousands of tests.
    let won = |seed: u64| {
        let race = race_of(1.0, 0.2, 100 + seed, &mut calm).unwrap();
        race.is_faster() || race.is_slower()
    };
    let n_won = (0..1000).filter(|&seed| won(seed)).count();
    assert!(n_won < 6, "{n_won}");
}

#[test]
fn a_gain_of_3_percent_is_found_at_2_percent_noise() {
    for seed in 0..20 {
        let race = race_of(1.0 / 1.03, 0.02, seed, &mut calm).unwrap();
        assert!(race.is_faster() && (race.factor() - 1.03).abs() < 0.015, "{race:?}");
        let race = race_of(1.03, 0.02, seed, &mut calm).unwrap();
        assert!(race.is_slower() && (race.factor() - 1.0 / 1.03).abs() < 0.015, "{race:?}");
    }
}

#[test]
fn power_states_that_change_by_themselves_make_no_winner() {
    let mut random = Random::new(7);
    let mut weather = |machine: &VirtualMachine, _| {
        if random.uniform() < 0.05 {
            let rate = if machine.rate() == 1.0 { 0.7 } else { 1.0 };
            machine.set_rate(rate);
        }
    };
    assert_eq!(n_equal(0.02, &mut weather), 20);
    let race = race_of(1.0, 0.02, 3, &mut weather).unwrap();
    // Each round has four chances of 5 % to change.
    assert!(race.n_discarded > race.n_rounds / 20, "{race:?}");
}

#[test]
fn a_machine_that_slows_down_makes_no_winner() {
    let mut weather = |machine: &VirtualMachine, n: usize| machine.set_rate(1.0 / (1.0 + 0.001 * n as f64));
    assert_eq!(n_equal(0.02, &mut weather), 20);
}

#[test]
fn bursts_of_neighbours_make_no_winner() {
    let mut random = Random::new(9);
    let mut is_burst = false;
    let mut weather = |machine: &VirtualMachine, _| {
        is_burst ^= random.uniform() < 0.1;
        if is_burst {
            machine.work(0.03 * random.uniform());
        }
    };
    assert_eq!(n_equal(0.02, &mut weather), 20);
}

#[test]
fn a_clock_rate_that_follows_a_side_ends_the_race() {
    let mut machine = VirtualMachine::new(0.2, 1);
    struct Heats(VirtualMachine);
    impl Track for Heats {
        fn begin(&mut self) -> Result<(), Fault> {
            Ok(())
        }
        fn request(&mut self, side: Side) -> Result<(), Fault> {
            self.0.work(0.02);
            self.0.set_rate(if side == Side::Candidate { 0.8 } else { 1.0 });
            Ok(())
        }
        fn fetch(&mut self, _: Side) -> Result<(), Fault> {
            Ok(())
        }
        fn compare(&mut self) -> Result<(), Fault> {
            Ok(())
        }
    }
    let result = race(&mut Heats(machine.clone()), &mut machine, Goal::Compare, BUDGET, &mut Random::new(2));
    let fault = result.unwrap_err().to_string();
    assert!(fault.contains("the clock rate follows the side"), "{fault}");
    assert!(machine.now() < BUDGET);
}

#[test]
fn a_guard_is_resolved_on_both_sides_of_its_bound() {
    for (share, is_below) in [(1.0, false), (1.0 / 0.9, true)] {
        let mut machine = VirtualMachine::new(0.01, 4);
        let mut track = Times {
            machine: machine.clone(),
            candidate: 0.02 * share,
            base: 0.02,
            weather: &mut calm,
            n_requests: 0,
        };
        let race = race(&mut track, &mut machine, Goal::Below(0.98), BUDGET, &mut Random::new(5)).unwrap();
        assert!(race.is_resolved, "{race:?}");
        assert_eq!(race.ratio.high < 0.98f64.ln(), is_below, "{race:?}");
    }
}
