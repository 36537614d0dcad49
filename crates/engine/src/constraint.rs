//! Constraints of a model's vocabulary.

use std::pin::pin;
use std::task::{Context, Poll, Waker};

use kvant_generate::constraint::{Constraint, ConstraintCompiler, ConstraintError, OutputFormat};
use kvant_generate::conversation::{AnswerConstraints, AnswerRules, CompilingConstraint};

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
        Ok(self.constraint_compiler()?.constraint(self.tokenizer()?, format)?)
    }

    /// Compiles what constrains an answer.
    pub(crate) fn constraints(&self, rules: AnswerRules<'_>) -> Result<AnswerConstraints, Error> {
        let tokenizer = self.tokenizer()?;
        let compile = |format: OutputFormat| -> CompilingConstraint<'_> {
            Box::pin(async move { self.constraint_compiler()?.constraint(tokenizer, &format) })
        };
        let mut compiled = pin!(rules.compile(tokenizer, &compile));
        // `compile` blocks instead of waiting, so that the first poll completes.
        loop {
            if let Poll::Ready(compiled) = compiled.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
                return Ok(compiled?);
            }
        }
    }

    fn constraint_compiler(&self) -> Result<&ConstraintCompiler, ConstraintError> {
        let lazy = self.compiler();
        if lazy.get().is_none() {
            let compiler = ConstraintCompiler::new();
            // Another thread may have been faster.
            _ = lazy.set(compiler.map_err(|error| ConstraintError::Invalid(error.to_string()))?);
        }
        Ok(lazy.get().expect("set above"))
    }
}
