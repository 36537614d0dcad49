//! Constraints of a request, and warnings about their unsupported parts.

use serde_json::Value;

use kvant::generate::constraint::schema::SupportedSchema;
use kvant::generate::constraint::{ConstraintError, Constraints, OutputFormat};
use kvant::generate::output_parser::constraint::{FormatSet, ToolConstraint};
use kvant::generate::output_parser::tool_calls::Tool;
use kvant::generate::reasoning_budget::ReasoningBudget;

use super::error::{ApiError, shortened};
use super::generation_request::GenerationRequest;
use super::{Caller, ServedModel};

/// Constraints, and warnings for the client.
pub(super) struct RequestConstraints {
    pub guides: Constraints,
    pub warnings: Vec<String>,
}

impl ServedModel {
    /// Returns the guides of the answers to a request.
    ///
    /// # Errors
    /// A constraint without support, or a required tool with such a schema.
    pub(super) async fn held(
        &self,
        request: &GenerationRequest,
        caller: &Caller,
    ) -> Result<RequestConstraints, ApiError> {
        let held = self.held_with_warnings(request, caller).await?;
        held.warnings.iter().for_each(|warning| tracing::warn!(id = %caller.id, "{warning}"));
        Ok(held)
    }

    async fn held_with_warnings(
        &self,
        request: &GenerationRequest,
        caller: &Caller,
    ) -> Result<RequestConstraints, ApiError> {
        let mut warnings = notes(request);
        let Some(mut tools) = request.tools.clone() else {
            return Ok(RequestConstraints { guides: self.guides(request, None, caller).await?, warnings });
        };
        let is_whole = |tool: &Tool| SupportedSchema::of(&tool.parameters).missing().is_none();
        if tools.tools.iter().all(is_whole)
            && let Ok(guides) = self.guides(request, Some(&tools), caller).await
        {
            return Ok(RequestConstraints { guides, warnings });
        }
        // A tool with an unsupported schema leaves the others constrained.
        for index in 0..tools.tools.len() {
            let tool = tools.tools[index].clone();
            let Err(error) = self.try_schema(&tool.parameters, caller).await else { continue };
            let name = tool.name;
            if tools.is_required {
                let why = format!(
                    "the arguments of the tool '{name}' cannot be constrained to their schema: {error}"
                );
                return Err(ApiError::invalid(shortened(&why)));
            }
            let owner = caller.owner.clone();
            tools.set_schema(
                index,
                self.grammars.supported_subset(&self.model, &tool.parameters, owner).await,
            );
            let why = format!(
                "the arguments of the tool '{name}' are not constrained to all of their schema: {error}"
            );
            warnings.push(shortened(&why));
        }
        match self.guides(request, Some(&tools), caller).await {
            Ok(guides) => Ok(RequestConstraints { guides, warnings }),
            Err(error) if tools.is_required || tools.value.is_some() => Err(error.into()),
            // Unconstrained calls are still parsed.
            Err(error) => {
                warnings.push(format!("calls cannot be constrained to their schemas: {error}"));
                Ok(RequestConstraints { guides: Constraints::default(), warnings })
            }
        }
    }

    /// Returns the guides of a request with these tools.
    async fn guides(
        &self,
        request: &GenerationRequest,
        tools: Option<&ToolConstraint>,
        caller: &Caller,
    ) -> Result<Constraints, ConstraintError> {
        let is_reasoning = request.answer.reasoning_budget.as_ref().is_some_and(ReasoningBudget::is_open);
        let formats = FormatSet::of(tools, request.form.as_ref(), self.tokenizer());
        let mut guides = Vec::new();
        for (trigger, format) in formats.triggered(is_reasoning) {
            let guide = self.grammars.constraint(&self.model, format, caller.owner.clone()).await?;
            guides.push((trigger, guide));
        }
        Ok(Constraints::with_triggers(guides))
    }

    async fn try_schema(&self, schema: &Value, caller: &Caller) -> Result<(), ConstraintError> {
        let form = OutputFormat::schema(schema.clone());
        self.grammars.constraint(&self.model, form, caller.owner.clone()).await.map(drop)
    }
}

/// Returns the annotations of schemas that do not constrain answers, such as unknown formats.
fn notes(request: &GenerationRequest) -> Vec<String> {
    let tools = request.tools.iter().flat_map(|tools| &tools.tools);
    let of_tools = tools.filter_map(|tool| {
        let notes = SupportedSchema::of(&tool.parameters).notes()?;
        Some(shortened(&format!("the arguments of the tool '{}' are not constrained to {notes}", tool.name)))
    });
    let of_answer = match &request.form {
        Some(OutputFormat::Schema(schema)) => SupportedSchema::of(schema).notes(),
        _ => None,
    };
    of_tools
        .chain(of_answer.map(|notes| shortened(&format!("the answer is not constrained to {notes}"))))
        .collect()
}
