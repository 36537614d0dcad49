//! `kvant doctor --evidence`: whether the kernels are right on this machine.

use std::io::{self, Write};
use std::path::Path;

use kvant::devices;
use kvant::files::write_atomic;
use kvant::gguf::printable_path;
use kvant_lab::evidence::{self, Outcome, Trial};
use serde_json::json;

use crate::bench::COMMIT;
use crate::failure::Failure;
use crate::files::check_output_path;
use crate::{console, progress};

/// Runs all suites and writes the report.
pub fn write(path: &Path, quiet: bool) -> Result<(), Failure> {
    check_output_path(Some(path))?;
    let bar = progress::bar("suites", evidence::n_trials() as u64, quiet);
    let trials = evidence::evidence(&mut |trial| {
        bar.inc(1);
        bar.set_message(trial.device.clone());
    });
    bar.finish_and_clear();
    let mut report = evidence::to_json(&trials);
    let cpu = devices::cpu_report(None)?;
    report["kvant"] = json!({ "version": env!("CARGO_PKG_VERSION"), "commit": COMMIT });
    report["machine"] = json!({
        "cpu": cpu.product,
        "instruction_sets": cpu.details.instruction_sets,
        "os": std::env::consts::OS,
        "arch": std::env::consts::ARCH,
    });
    let text = serde_json::to_string_pretty(&report).expect("a report is plain JSON");
    let fail = |error: io::Error| Failure::work(printable_path(path), error);
    write_atomic(path, fail, |out| out.write_all(text.as_bytes()).map_err(fail))?;
    let [pass, fail, blocked] =
        ["pass", "fail", "blocked"].map(|status| report[status].as_u64().unwrap_or(0));
    if !quiet {
        let file = printable_path(path);
        console::eprint_line(format_args!(
            "{pass} suites pass, {fail} fail, {blocked} cannot run here: {file}"
        ));
    }
    match trials.iter().find(|trial| matches!(trial.outcome, Outcome::Fail(_))) {
        Some(Trial { device, suite, outcome: Outcome::Fail(reason), .. }) => {
            Err(Failure::Work(format!("{fail} suites fail, first {suite} on {device}: {reason}")))
        }
        _ => Ok(()),
    }
}
