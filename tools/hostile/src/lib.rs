//! Runs a built `kvant` on generated hostile inputs (files, arguments, environment, pipes, requests
//! to a server, a hub with faults) and counts forbidden outcomes: a panic, an abort, a hang,
//! excessive memory, or a wrong answer without an error.
//!
//! Kind and number determine an input: a run is reproducible. Failures are stored in
//! `target/hostile`, with their command.
#![forbid(unsafe_code)]
// Cases need a shell, pipes and file names of arbitrary bytes.
#![cfg(unix)]

mod case;
mod chance;
mod fixtures;
mod hub;
mod judge;
mod kinds;
mod run;
mod served;
mod table;

pub use kinds::{KINDS, Kind};
pub use table::{N_INPUTS, measure};
