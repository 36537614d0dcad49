//! What is judged: a tree, and a case of it that runs.

use crate::case::Case;
use crate::wire::Digest;

/// Where a case runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// The device: `cpu`, `wgpu:0` or `cuda:0`.
    pub device: String,
    /// The kernel set of a CPU; that of `KVANT_ISA`, or its fastest, if `None`.
    pub isa: Option<&'static str>,
    /// Threads of a CPU.
    pub threads: usize,
}

/// A tree, which runs cases. Failures are one line each.
pub trait Contender {
    /// Starts a case afresh, with its state.
    fn start(&mut self, case: &Case, state: &[u8], settings: &Settings) -> Result<Box<dyn Subject>, String>;
}

/// A case that runs.
pub trait Subject {
    /// Runs the case on inputs, and returns a digest of the answers once all of them are there. The
    /// judge reads its clock around this.
    fn run(&mut self, inputs: &[f32]) -> Result<Digest, String>;
    /// Returns the answers to the last inputs.
    fn answers(&mut self) -> Result<Vec<u8>, String>;
}

/// Runs a case on inputs and returns its answers.
///
/// # Errors
///
/// The failure of the subject, or answers other than the digest's.
pub fn answers_of(subject: &mut dyn Subject, inputs: &[f32]) -> Result<Vec<u8>, String> {
    let digest = subject.run(inputs)?;
    fetch(subject, digest)
}

/// Returns the answers that have this digest.
///
/// # Errors
///
/// As [`answers_of`].
pub fn fetch(subject: &mut dyn Subject, digest: Digest) -> Result<Vec<u8>, String> {
    let answers = subject.answers()?;
    match Digest::of(&answers) == digest {
        true => Ok(answers),
        false => Err("the answers are not those that the clock saw".to_owned()),
    }
}
