//! Measures the run time of programs from start to end: the median of interleaved runs, so that a
//! busy minute affects all alike.
//!
//! `cargo run -p kvant-cli --example startup -- RUNS BINARY...`

use std::process::{Command, ExitCode, Stdio};
use std::time::Instant;

/// Timed commands: the bundled model's first token, an inspection of a model, and a bare start.
const COMMANDS: [&[&str]; 3] =
    [&["run", "hi", "-n", "1", "--temp", "0", "--quiet"], &["inspect", "bundled"], &["--version"]];

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let (Some(Ok(runs)), binaries) = (args.next().map(|n| n.parse::<usize>()), args.collect::<Vec<_>>())
    else {
        eprintln!("usage: startup RUNS BINARY...");
        return ExitCode::from(2);
    };
    let pairs: Vec<_> = COMMANDS.iter().flat_map(|args| binaries.iter().map(move |b| (b, *args))).collect();
    let mut times = vec![Vec::new(); pairs.len()];
    // The first round warms the files up and is not counted.
    for round in 0..=runs {
        for ((binary, args), times) in pairs.iter().zip(&mut times) {
            match milliseconds(binary, args) {
                Ok(time) if round > 0 => times.push(time),
                Ok(_) => {}
                Err(error) => {
                    eprintln!("error: {binary} {}: {error}", args.join(" "));
                    return ExitCode::FAILURE;
                }
            }
        }
    }
    for ((binary, args), mut times) in pairs.into_iter().zip(times) {
        times.sort_by(f64::total_cmp);
        let [Some(min), Some(median), Some(max)] =
            [0, times.len() / 2, times.len().saturating_sub(1)].map(|i| times.get(i))
        else {
            continue;
        };
        println!("{median:7.1} ms (from {min:.1} to {max:.1}, {runs} runs)  {binary} {}", args.join(" "));
    }
    ExitCode::SUCCESS
}

fn milliseconds(binary: &str, args: &[&str]) -> Result<f64, String> {
    let mut command = Command::new(binary);
    command.args(args).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let started = Instant::now();
    let status = command.status().map_err(|error| error.to_string())?;
    let time = 1e3 * started.elapsed().as_secs_f64();
    if status.success() { Ok(time) } else { Err(status.to_string()) }
}
