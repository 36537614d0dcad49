//! Races a program against itself, and prints how often it is equal: what the noise of a machine
//! does to the referee. `cargo run --release -p kvant-lab --example noise -- PROGRAM TARGET [races]
//! [seconds of each] [threads]`.

use std::error::Error;
use std::path::PathBuf;

use kvant_lab::lane::{Contenders, Lane};
use kvant_lab::process::Program;
use kvant_lab::race::{Goal, race};
use kvant_lab::report::fresh_seed;
use kvant_lab::subject::Settings;
use kvant_lab::{Random, ThisMachine, target};

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [program, name, rest @ ..] = &args[..] else { return Err("expected PROGRAM TARGET".into()) };
    let n_races = rest.first().map_or(Ok(20), |n| n.parse())?;
    let budget = rest.get(1).map_or(Ok(20.0), |seconds| seconds.parse())?;
    let threads = rest.get(2).map_or(Ok(2), |n| n.parse())?;
    let target = target(name)?;
    let settings = Settings { device: target.device.to_owned(), isa: None, threads };
    let mut random = Random::new(fresh_seed());
    let (mut n_equal, mut n_resolved) = (0, 0);
    println!(
        "{}\n{:>8} {:>17} {:>7} {:>10} {:>8}",
        target.case, "ratio", "interval", "rounds", "discarded", "s"
    );
    for _ in 0..n_races {
        let [mut candidate, mut base] = [(); 2].map(|()| Program { path: PathBuf::from(program) });
        let mut contenders = Contenders { candidate: &mut candidate, base: &mut base };
        let mut machine = ThisMachine::default();
        let mut lane = Lane::new(&mut contenders, &target.case, &settings, &mut machine, random.bits())?;
        let race = race(&mut lane, &mut machine, Goal::Compare, budget, &mut random)?;
        let is_equal = !race.is_faster() && !race.is_slower();
        n_equal += usize::from(is_equal);
        n_resolved += usize::from(is_equal && race.is_resolved);
        println!(
            "{:>8.4} {:>8.4} {:>8.4} {:>7} {:>10} {:>8.1}",
            race.factor(),
            race.ratio.low.exp(),
            race.ratio.high.exp(),
            race.n_rounds,
            race.n_discarded,
            race.seconds
        );
    }
    println!("equal in {n_equal} of {n_races}, {n_resolved} of them before the budget ended");
    Ok(())
}
