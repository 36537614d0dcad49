//! Runs every suite on every device, and the judge on itself, and holds what coded caches lose to theory. A device that this machine lacks is ignored, with the reason.

mod devices;
mod distortion;
mod judge;

use std::process::ExitCode;

use libtest_mimic::{Arguments, run};

fn main() -> ExitCode {
    let trials = judge::trials().into_iter().chain(distortion::trials()).chain(devices::trials()).collect();
    run(&Arguments::from_args(), trials).exit_code()
}
