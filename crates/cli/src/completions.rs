//! `kvant completions` and `kvant man`: shell completions and manual pages.

use std::io::Write;

use clap::{Args, Command};
use clap_complete::Shell;

use crate::console;
use crate::failure::Failure;

/// Arguments of `kvant completions`.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  kvant completions bash > kvant.bash")]
pub struct CompletionsArgs {
    /// The shell
    shell: Shell,
}

/// Arguments of `kvant man`.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  kvant man eval ppl > kvant-eval-ppl.1")]
pub struct ManArgs {
    /// The command; the whole program when not given
    #[arg(value_name = "COMMAND")]
    path: Vec<String>,
}

/// Prints the completion script for commands and options.
pub fn completions(args: &CompletionsArgs, mut root: Command) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut root, "kvant", &mut script);
    Ok(console::results().write_all(&script)?)
}

/// Prints a manual page.
pub fn man(args: &ManArgs, mut root: Command) -> Result<(), Failure> {
    root.build();
    let mut command = &root;
    for name in &args.path {
        let found = command.find_subcommand(name);
        command = found.ok_or_else(|| Failure::Usage(format!("no command '{name}' (see kvant --help)")))?;
    }
    let mut page = Vec::new();
    clap_mangen::Man::new(command.clone()).render(&mut page)?;
    Ok(console::results().write_all(&page)?)
}
