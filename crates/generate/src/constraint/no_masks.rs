//! Constraints of a build without the feature `constraint`.

use std::time::Duration;

use kvant_text::tokenizer::Tokenizer;

use super::{ConstraintError, OutputFormat};

/// State of a constraint, which cannot be created without the feature `constraint`.
#[derive(Debug)]
pub struct Constraint(());

/// Compiler of a build that cannot compile.
#[derive(Debug)]
pub struct ConstraintCompiler(());

impl ConstraintCompiler {
    /// Creates the compiler.
    ///
    /// # Errors
    /// None.
    pub fn new() -> std::io::Result<Self> {
        Ok(Self(()))
    }

    /// Fails.
    ///
    /// # Errors
    /// Always.
    pub fn constraint(&self, _: &Tokenizer, _: &OutputFormat) -> Result<Constraint, ConstraintError> {
        missing()
    }
}

fn missing<T>() -> Result<T, ConstraintError> {
    Err(ConstraintError::Invalid("this build has no constraints (feature `constraint`)".to_owned()))
}

impl Constraint {
    /// Returns a constraint in the same state, if its mask is available.
    pub fn fork(&self) -> Option<Self> {
        None
    }

    /// Reports whether the mask is available.
    pub fn is_ready(&mut self, _: Duration) -> bool {
        true
    }

    /// Excludes the tokens that the constraint forbids.
    ///
    /// # Errors
    /// Always.
    pub fn mask(&mut self, _: &mut [f32]) -> Result<(), ConstraintError> {
        missing()
    }

    /// Records a token.
    ///
    /// # Errors
    /// Always.
    pub fn consume(&mut self, _: u32) -> Result<bool, ConstraintError> {
        missing()
    }

    /// Consumes tokens that were generated before the constraint became active.
    ///
    /// # Errors
    /// Always.
    pub fn catch_up(&mut self, _: &[u32]) -> Result<(), ConstraintError> {
        missing()
    }
}
