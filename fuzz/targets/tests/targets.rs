//! Runs every target for a few seconds; `kvant-fuzz` runs longer.

use std::process::ExitCode;
use std::time::Duration;

use kvant_fuzz_targets::{TARGETS, run};
use libtest_mimic::{Arguments, Trial};

/// Enough for thousands of inputs of most targets.
const TIME: Duration = Duration::from_secs(4);

fn main() -> ExitCode {
    let trials = TARGETS.iter().map(|target| {
        Trial::test(target.name, || {
            let tried = run(target, TIME)?;
            println!("{}: {} inputs, {} of them accepted", target.name, tried.n_inputs, tried.n_accepted);
            Ok(())
        })
    });
    libtest_mimic::run(&Arguments::from_args(), trials.collect()).exit_code()
}
