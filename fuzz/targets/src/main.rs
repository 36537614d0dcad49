//! Runs the targets on mutated seeds for a fixed time: `kvant-fuzz SECONDS [TARGET]`, `SECONDS` for
//! each.
#![forbid(unsafe_code)]

use std::process::ExitCode;
use std::time::Duration;

use kvant_fuzz_targets::{TARGETS, Target, run};

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let is_selected = |target: &&Target| args.get(1).is_none_or(|name| name == target.name);
    let targets: Vec<_> = TARGETS.iter().filter(is_selected).collect();
    let (Some(Ok(seconds)), false) = (args.first().map(|arg| arg.parse()), targets.is_empty()) else {
        let names = TARGETS.each_ref().map(|target| target.name).join(", ");
        eprintln!("usage: kvant-fuzz SECONDS [TARGET]; the targets are {names}");
        return ExitCode::from(2);
    };
    for target in targets {
        match run(target, Duration::from_secs(seconds)) {
            Ok(tried) => {
                println!("{}: {} inputs, {} of them accepted", target.name, tried.n_inputs, tried.n_accepted);
            }
            Err(failure) => {
                eprintln!("{failure}");
                return ExitCode::FAILURE;
            }
        }
    }
    ExitCode::SUCCESS
}
