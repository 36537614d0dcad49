//! Constraints of a model's vocabulary.

use kvant_generate::constraint::{Constraint, ConstraintCompiler, ConstraintError, OutputFormat};

use crate::error::Error;
use crate::model::Model;

impl Model {
    /// Compiles a constraint for texts of this format; [`GenerateOptions::format`] does so for one
    /// generation.
    ///
    /// [`GenerateOptions::format`]: crate::GenerateOptions::format
    ///
    /// # Errors
    /// A format that is invalid, unsupported, too large or too ambiguous; a build without the
    /// feature `constraint`; as [`Model::tokenizer`].
    pub fn constraint(&self, format: &OutputFormat) -> Result<Constraint, Error> {
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
}
