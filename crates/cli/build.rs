//! Embeds the commit that the program is built from, in a checkout.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // A package may be unpacked within a checkout of something else.
    if git(&["ls-files", "--error-unmatch", "build.rs"]).is_none() {
        return;
    }
    // The shortest unique prefix grows with the clone.
    if let Some(commit) = git(&["rev-parse", "--short=12", "HEAD"]) {
        println!("cargo::rustc-env=KVANT_COMMIT={commit}");
    }
    // Written whenever HEAD moves. A path that does not exist would rerun this script at every
    // build.
    if let Some(log) = git(&["rev-parse", "--git-path", "logs/HEAD"]).filter(|log| Path::new(log).exists()) {
        println!("cargo::rerun-if-changed={log}");
    }
}

/// Returns the output of git, in a checkout with git available.
fn git(args: &[&str]) -> Option<String> {
    let output = Command::new("git").args(args).output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
}
