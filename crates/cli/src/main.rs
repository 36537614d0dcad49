//! The `kvant` program.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    kvant_cli::main()
}
