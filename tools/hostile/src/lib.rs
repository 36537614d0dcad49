//! Throws generated inputs at a built `kvant` as its users would meet them (files, arguments, environment, ends of pipes, requests to a
//! server, a hub that lies) and counts what no input may do: a panic, an abort, a hang, memory without end, or a wrong answer without an error.
//!
//! Inputs follow from their kind and number alone: a run repeats. Failures are kept in `target/hostile`, with their command.
#![forbid(unsafe_code)]
// Cases need a shell, pipes and file names that are any bytes.
#![cfg(unix)]

mod case;
mod chance;
mod hub;
mod judge;
mod kinds;
mod run;
mod served;
mod shop;
mod table;

pub use kinds::{KINDS, Kind};
pub use table::{N_INPUTS, measure};
