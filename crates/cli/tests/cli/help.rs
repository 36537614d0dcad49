//! Tests that help works as pasted: every example of every `--help`, and every command of the
//! README, runs in an empty folder.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use crate::folders;
#[cfg(unix)]
use crate::serve::Server;

const KVANT: &str = env!("CARGO_BIN_EXE_kvant");

fn scratch(test: &str) -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("help").join(test);
    let _ = fs::remove_dir_all(&dir);
    fs::create_dir_all(&dir).unwrap();
    dir
}

/// Returns the commands that a help text names, each as the words after `kvant`, with those of its
/// subcommands.
fn commands(above: &[String]) -> Vec<Vec<String>> {
    let help = help(above);
    let list = help.split("\nCommands:\n").nth(1).unwrap_or_default();
    let names = list.lines().take_while(|line| !line.is_empty()).filter_map(|line| {
        let is_name = line.starts_with("  ") && !line.starts_with("   ");
        line.split_whitespace().next().filter(|name| is_name && *name != "help")
    });
    let mut found = vec![above.to_vec()];
    for name in names {
        found.extend(commands(&[above, &[name.to_owned()]].concat()));
    }
    found
}

fn help(command: &[String]) -> String {
    let output = Command::new(KVANT).args(command).arg("--help").output().unwrap();
    assert!(output.status.success(), "{command:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Runs a line as a shell does, in a folder, with empty stdin.
fn run(line: &str, folder: &Path) -> Output {
    let binaries = Path::new(KVANT).parent().unwrap().display();
    let path = format!("{binaries}:{}", env::var("PATH").unwrap());
    Command::new("sh")
        .args(["-c", line])
        .current_dir(folder)
        .env("PATH", path)
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

fn assert_runs(line: &str, folder: &Path) {
    #[cfg(unix)]
    if let Some(args) = line.strip_prefix("kvant serve ") {
        // The server does not end by itself.
        let server = Server::start(&args.split(' ').collect::<Vec<_>>());
        return assert!(server.end().success(), "{line}");
    }
    // The folder to convert is not available here.
    if let Some(args) = line.strip_prefix("kvant convert ") {
        folders::write_bundled(&folder.join(args.split(' ').next().unwrap()));
    }
    let output = run(line, folder);
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{line}: {err}");
    assert!(!err.contains("error"), "{line}: {err}");
}

#[cfg(unix)]
#[test]
fn every_example_of_every_help_runs_in_an_empty_folder() {
    let all = commands(&[]);
    assert!(all.iter().any(|command| *command == ["eval", "kld"]), "{all:?}");
    let mut n_skipped = 0;
    for command in &all {
        let help = help(command);
        let examples = help.split("\nExample").nth(1).unwrap_or_else(|| panic!("no example: {command:?}"));
        let lines: Vec<&str> =
            examples.lines().skip(1).take_while(|line| !line.is_empty()).map(str::trim).collect();
        assert!(!lines.is_empty() && lines.iter().all(|line| line.starts_with("kvant ")), "{command:?}");
        for line in lines {
            if line.contains(" -hf ") || line.starts_with("kvant lab eval ") {
                n_skipped += 1;
                continue;
            }
            assert_runs(line, &scratch(&format!("example-{}", command.join("-"))));
        }
    }
    if n_skipped > 0 {
        eprintln!("skipped: {n_skipped} examples of a --help that need the network or a checkout");
    }
}

#[cfg(unix)]
#[test]
fn every_command_of_the_readme_runs_in_an_empty_folder() {
    let readme = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../README.md")).unwrap();
    // Code blocks without a language contain shell commands.
    let blocks = readme.split("\n```").enumerate().filter(|(i, block)| i % 2 == 1 && block.starts_with('\n'));
    let lines: Vec<&str> =
        blocks.flat_map(|(_, block)| block.lines()).filter(|line| !line.is_empty()).collect();
    assert!(lines.len() >= 3, "{lines:?}");
    let mut skipped = Vec::new();
    for line in lines {
        let ours = line.replace("cargo run --release -- ", "kvant ");
        if ours.starts_with("kvant ") && !ours.contains(" -hf ") {
            assert_runs(&ours, &scratch("readme"));
        } else {
            skipped.push(line);
        }
    }
    for line in skipped {
        eprintln!("skipped: a command of the README that needs the network, a GPU or cargo: {line}");
    }
    // Commands that the text names.
    let names = readme.split("`kvant ").skip(1).filter_map(|rest| rest.split('`').next());
    for name in names {
        let command: Vec<String> =
            name.split_whitespace().take_while(|word| !word.starts_with('-')).map(str::to_owned).collect();
        help(&command);
    }
}
