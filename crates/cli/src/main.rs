//! The `kvant` command line.

fn main() {}
