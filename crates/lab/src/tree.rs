//! The two trees: git, cargo, and the target's conformance suites.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::target::Target;
use crate::verdict::Fault;

/// A checkout, its commit, and the folder that it is built into.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tree {
    /// The checkout.
    pub root: PathBuf,
    /// Its commit, short; with `+` where files have changed since.
    pub commit: String,
    /// Where cargo builds it.
    built: PathBuf,
}

/// The candidate, which is the checkout of the current folder, and base.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trees {
    /// The tree under judgement.
    pub candidate: Tree,
    /// The tree that it is compared with.
    pub base: Tree,
}

impl Trees {
    /// Finds the checkout around `folder`, and checks base out beside its builds: `base`, or by
    /// default HEAD for a changed checkout and HEAD~1 for a clean one.
    ///
    /// # Errors
    ///
    /// [`Fault::Broken`] outside a checkout of Kvant, or for an unknown commit.
    pub fn open(folder: &Path, base: Option<&str>) -> Result<Self, Fault> {
        let root = PathBuf::from(git(folder, &["rev-parse", "--show-toplevel"])?.trim());
        if !root.join("crates/lab/Cargo.toml").is_file() {
            return Err(Fault::Broken("expected a checkout of Kvant with crates/lab here".to_owned()));
        }
        let is_changed = !git(&root, &["status", "--porcelain"])?.trim().is_empty();
        let commit_of = |reference: &str| {
            let commit = format!("{reference}^{{commit}}");
            git(&root, &["rev-parse", "--verify", "--quiet", "--short=12", &commit])
                .map(|commit| commit.trim().to_owned())
                .map_err(|_| Fault::Broken(format!("base: expected a commit, got '{reference}'")))
        };
        let commit = commit_of("HEAD")? + if is_changed { "+" } else { "" };
        let base = commit_of(base.unwrap_or(if is_changed { "HEAD" } else { "HEAD~1" }))?;
        let lab = root.join("target/lab");
        let base_root = lab.join("base-tree");
        if base_root.join(".git").exists() {
            git(&base_root, &["checkout", "--quiet", "--detach", "--force", &base])?;
        } else {
            let path = base_root.to_string_lossy().into_owned();
            git(&root, &["worktree", "prune"])?;
            git(&root, &["worktree", "add", "--quiet", "--detach", "--force", &path, &base])?;
        }
        Ok(Self {
            candidate: Tree { root, commit, built: lab.join("candidate") },
            base: Tree { root: base_root, commit: base, built: lab.join("base") },
        })
    }
}

impl Tree {
    /// Builds the program of this tree for a device, and returns its path.
    ///
    /// # Errors
    ///
    /// [`Fault::Broken`] with the compiler's first error.
    pub fn build(&self, device: &str) -> Result<PathBuf, Fault> {
        let mut args = vec!["build", "--release", "--package", "kvant-cli", "--bin", "kvant"];
        args.extend(features(device));
        self.cargo(&args)?;
        Ok(self.built.join("release").join(format!("kvant{}", std::env::consts::EXE_SUFFIX)))
    }

    /// Runs the conformance suites of a target on its device; those of CPUs on every kernel set.
    ///
    /// # Errors
    ///
    /// [`Fault::Wrong`] with the first failure; [`Fault::Broken`] if they do not build.
    pub fn run_suites(&self, target: &Target) -> Result<(), Fault> {
        let device = target.device.split(':').next().unwrap_or_default();
        let mut args = match device {
            "cpu" => vec!["test", "--release", "--package", "kvant-conformance", "--test", "conformance"],
            "wgpu" => vec!["test", "--release", "--package", "kvant-wgpu", "--lib"],
            _ => vec!["test", "--release", "--package", "kvant-cuda", "--lib"],
        };
        let build = [&args[..], &["--no-run"]].concat();
        self.cargo(&build)?;
        args.extend(["--quiet", "--"]);
        for suite in target.suites {
            // The program of the suites takes one part of a name.
            let output = self.output(&[&args[..], &[suite]].concat())?;
            if let Some(line) = output.failure(&["wrong;", "want ", "panicked at", "FAILED"]) {
                return Err(Fault::Wrong(format!("conformance {suite}: {line}")));
            }
        }
        Ok(())
    }

    fn cargo(&self, args: &[&str]) -> Result<(), Fault> {
        match self.output(args)?.failure(&["error"]) {
            None => Ok(()),
            Some(line) => Err(Fault::Broken(format!("cargo {}: {line}", args[0]))),
        }
    }

    fn output(&self, args: &[&str]) -> Result<Output, Fault> {
        let output = Command::new("cargo")
            .args(args)
            .current_dir(&self.root)
            .env("CARGO_TARGET_DIR", &self.built)
            .stdin(Stdio::null())
            .output()
            .map_err(|error| Fault::Broken(format!("cargo: {error}")))?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Ok(Output { succeeded: output.status.success(), text: text(&output.stdout) + &text(&output.stderr) })
    }
}

/// What a command printed, and whether it succeeded.
struct Output {
    succeeded: bool,
    text: String,
}

impl Output {
    /// Returns the first line with one of these words, or else the last line; `None` after success.
    fn failure(&self, words: &[&str]) -> Option<String> {
        let lines = || self.text.lines().map(str::trim).filter(|line| !line.is_empty());
        let telling = words.iter().find_map(|word| lines().find(|line| line.contains(word)));
        let line = || telling.or(lines().next_back()).unwrap_or("it failed without a word").to_owned();
        (!self.succeeded).then(line)
    }
}

/// Returns the features of the program for a device: no others, which take time to build.
fn features(device: &str) -> Vec<&'static str> {
    match device.split(':').next() {
        Some("wgpu") => vec!["--no-default-features", "--features", "wgpu"],
        Some("cuda") => vec!["--no-default-features", "--features", "cuda"],
        _ => vec!["--no-default-features"],
    }
}

/// Returns the output of git in a folder.
///
/// # Errors
///
/// [`Fault::Broken`] with what git says.
pub(crate) fn git(folder: &Path, args: &[&str]) -> Result<String, Fault> {
    let output = Command::new("git").arg("-C").arg(folder).args(args).output();
    let output = output.map_err(|error| Fault::Broken(format!("git: {error}")))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(Fault::Broken(format!("git {}: {}", args[0], said.lines().next().unwrap_or("it failed"))))
}
