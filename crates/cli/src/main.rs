//! The `kvant` command line.
#![forbid(unsafe_code)]

fn main() {}
