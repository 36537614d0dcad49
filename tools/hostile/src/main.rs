//! `kvant-hostile BINARY [INPUTS [KIND]]`: runs a built `kvant` on generated inputs; exits with 1
//! after a forbidden outcome.
#![forbid(unsafe_code)]

use std::process::ExitCode;

#[cfg(not(unix))]
fn main() -> ExitCode {
    eprintln!("kvant-hostile needs a shell, pipes and bytes for names: run it on a Unix");
    ExitCode::from(2)
}

#[cfg(unix)]
fn main() -> ExitCode {
    use kvant_hostile::{KINDS, N_INPUTS, measure};

    let args: Vec<String> = std::env::args().skip(1).collect();
    let n_inputs = args.get(1).map_or(Ok(N_INPUTS), |n| n.parse());
    let kinds: Vec<_> =
        KINDS.iter().filter(|kind| args.get(2).is_none_or(|name| name == kind.name)).collect();
    let (Some(binary), Ok(n_inputs), false) = (args.first(), n_inputs, kinds.is_empty()) else {
        let names = KINDS.each_ref().map(|kind| kind.name).join(", ");
        eprintln!("usage: kvant-hostile BINARY [INPUTS [KIND]]; the kinds are {names}");
        return ExitCode::from(2);
    };
    match measure(binary.as_ref(), n_inputs, &kinds) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}
