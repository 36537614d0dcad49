//! Constraints of a model's vocabulary.

use kvant_generate::constraint::{Constraint, ConstraintError, OutputFormat};

use crate::{Error, Model};

/// The compiler of a model's vocabulary, created at first use.
#[cfg(feature = "constraint")]
pub(crate) type LazyCompiler = std::sync::OnceLock<kvant_generate::constraint::ConstraintCompiler>;
/// Nothing in a build without constraints.
#[cfg(not(feature = "constraint"))]
pub(crate) type LazyCompiler = ();

impl Model {
    /// Compiles a constraint for texts of this format; [`GenerateOptions::format`] does so for one
    /// generation.
    ///
    /// [`GenerateOptions::format`]: crate::GenerateOptions::format
    ///
    /// # Errors
    /// A format that is invalid, unsupported, too large or too ambiguous; a build without the
    /// feature `constraint`; as [`Model::tokenizer`].
    #[cfg(feature = "constraint")]
    pub fn constraint(&self, format: &OutputFormat) -> Result<Constraint, Error> {
        use kvant_generate::constraint::ConstraintCompiler;
        let tokenizer = self.tokenizer()?;
        let lazy = self.compiler();
        if lazy.get().is_none() {
            let compiler = ConstraintCompiler::new();
            // Another thread may have been faster.
            _ = lazy.set(compiler.map_err(|error| ConstraintError::Invalid(error.to_string()))?);
        }
        let compiler = lazy.get().expect("set above");
        Ok(compiler.constraint(tokenizer, format)?)
    }

    /// Fails: this build has no constraints.
    ///
    /// # Errors
    /// Always.
    #[cfg(not(feature = "constraint"))]
    pub fn constraint(&self, _: &OutputFormat) -> Result<Constraint, Error> {
        let why = "this build has no constraints (feature `constraint`)";
        Err(ConstraintError::Invalid(why.to_owned()).into())
    }
}
