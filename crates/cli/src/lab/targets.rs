//! `kvant lab targets`.

use clap::Args;
use kvant_lab::Target;
use kvant_lab::device::unavailable;
use serde_json::Value;

use crate::failure::Failure;
use crate::log;
use crate::output::{self, Format, Row};

/// Arguments of `kvant lab targets`.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  kvant lab targets -o json")]
pub struct TargetsArgs {
    /// Output format of the table
    #[arg(short, long, value_name = "FORMAT", default_value = "md")]
    output: Format,
}

/// Runs the command.
pub fn targets(args: TargetsArgs) -> Result<(), Failure> {
    let mut rows = Vec::new();
    // Targets of a device stand together.
    for of_device in kvant_lab::targets().chunk_by(|a, b| a.device == b.device) {
        match unavailable(of_device[0].device) {
            Some(reason) => {
                let (n, device) = (of_device.len(), of_device[0].device);
                log::note(format_args!("{n} targets of {device} are not listed: {reason}"));
            }
            None => rows.extend(of_device.iter().map(row)),
        }
    }
    Ok(output::print_rows(&rows, args.output)?)
}

fn row(target: &Target) -> Row {
    let cells = [
        ("target", target.name.clone()),
        ("device", target.device.to_owned()),
        ("timed", target.case.to_string()),
        ("files", target.files.to_owned()),
    ];
    cells.into_iter().map(|(name, value)| (name.to_owned(), Value::from(value))).collect()
}
