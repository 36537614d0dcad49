//! Tests that need a specific kernel set: `KVANT_ISA` applies to a whole process.

use std::process::Command;

/// Returns whether this process runs kernel set `set`. If not, runs the test `name`
/// (`module::function`) in a child process that does, and forwards its skip messages.
pub fn runs_on(set: &str, name: &str) -> bool {
    if std::env::var("KVANT_ISA").as_deref() == Ok(set) {
        return true;
    }
    let mut again = Command::new(std::env::current_exe().unwrap());
    let output = again.env("KVANT_ISA", set).args([name, "--exact", "--nocapture"]).output().unwrap();
    let [stdout, stderr] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    stderr.lines().filter(|line| line.starts_with("skipped: ")).for_each(|line| eprintln!("{line}"));
    // An unknown test name would succeed with nothing run.
    assert!(output.status.success() && stdout.contains("1 passed"), "{name}: {stdout}\n{stderr}");
    false
}
