//! Constraints of a request, and warnings about their unsupported parts.

use kvant::generate::constraint::OutputFormat;
use kvant::generate::conversation::{AnswerConstraints, AnswerRules, CompilingConstraint};
use kvant::generate::reasoning_budget::ReasoningBudget;

use super::error::{ApiError, shortened};
use super::generation_request::GenerationRequest;
use super::{Caller, ServedModel};

impl ServedModel {
    /// Compiles the constraints of the answers to a request.
    ///
    /// # Errors
    /// A constraint without support, or a required tool with such a schema.
    pub(super) async fn constraints(
        &self,
        request: &GenerationRequest,
        caller: &Caller,
    ) -> Result<AnswerConstraints, ApiError> {
        let rules = AnswerRules {
            tools: request.tools.as_ref(),
            format: request.form.as_ref(),
            is_reasoning: request.answer.reasoning_budget.as_ref().is_some_and(ReasoningBudget::is_open),
        };
        let compile = |format: OutputFormat| -> CompilingConstraint<'_> {
            Box::pin(self.grammars.constraint(&self.model, format, caller.owner.clone()))
        };
        let mut compiled = rules.compile(self.tokenizer(), &compile).await?;
        for warning in &mut compiled.warnings {
            *warning = shortened(warning);
            tracing::warn!(id = %caller.id, "{warning}");
        }
        Ok(compiled)
    }
}
