//! `kvant-hostile BINARY [INPUTS [KIND]]`: throws generated inputs at a built `kvant` as its users would meet them (files,
//! arguments, environment, ends of pipes) and counts what no input may do: a panic, an abort, a hang, memory without end, or a
//! wrong answer that nobody is told of. Exits with 1 when there was any.
//!
//! Inputs follow from their kind and number alone, so that `INPUTS` are the same ones every time. What fails is kept in
//! `target/hostile`, with its command.
#![forbid(unsafe_code)]
#![cfg_attr(not(unix), allow(dead_code, unused_imports))]

#[cfg(unix)]
mod case;
#[cfg(unix)]
mod chance;
#[cfg(unix)]
mod judge;
#[cfg(unix)]
mod kinds;
#[cfg(unix)]
mod run;
#[cfg(unix)]
mod shop;
#[cfg(unix)]
mod table;

use std::process::ExitCode;

#[cfg(not(unix))]
fn main() -> ExitCode {
    eprintln!("kvant-hostile needs a shell, pipes and bytes for names: run it on a Unix");
    ExitCode::from(2)
}

#[cfg(unix)]
fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let n_inputs = args.get(1).map_or(Ok(table::N_INPUTS), |n| n.parse());
    let kinds: Vec<_> =
        kinds::KINDS.iter().filter(|kind| args.get(2).is_none_or(|name| name == kind.name)).collect();
    let (Some(binary), Ok(n_inputs), false) = (args.first(), n_inputs, kinds.is_empty()) else {
        let names = kinds::KINDS.each_ref().map(|kind| kind.name).join(", ");
        eprintln!("usage: kvant-hostile BINARY [INPUTS [KIND]]; the kinds are {names}");
        return ExitCode::from(2);
    };
    match table::measure(binary, n_inputs, &kinds) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}
