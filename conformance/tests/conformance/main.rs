//! Runs every suite on every device, the tests of the judge, and the comparison of quantized caches
//! with theory. Devices that this machine lacks are ignored, with the reason.

mod devices;
mod distortion;
mod judge;

use std::process::ExitCode;

use libtest_mimic::{Arguments, run};

fn main() -> ExitCode {
    let trials = judge::trials().into_iter().chain(distortion::trials()).chain(devices::trials()).collect();
    run(&Arguments::from_args(), trials).exit_code()
}
