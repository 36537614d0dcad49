//! Constraints of a request, and warnings about their unsupported parts.

use serde_json::Value;

use super::asked::Asked;
use super::error::{ApiError, shortened};
use super::{Caller, Hosted};
use crate::guide::schema::HeldSchema;
use crate::guide::{Cue, Form, FormError, Guides};
use crate::speech::constraint::{Forms, ToolConstraint};
use crate::speech::tools::Tool;
use crate::thinking::Thinking;

/// Guides, and warnings for the client.
pub(super) struct Held {
    pub guides: Guides,
    pub warnings: Vec<String>,
}

impl Hosted {
    /// Returns the guides of the answers to a request.
    ///
    /// # Errors
    /// A constraint without support, or a required tool with such a schema.
    pub(super) async fn held(&self, asked: &Asked, caller: &Caller) -> Result<Held, ApiError> {
        let held = self.held_with_warnings(asked, caller).await?;
        held.warnings.iter().for_each(|warning| tracing::warn!(id = %caller.id, "{warning}"));
        Ok(held)
    }

    async fn held_with_warnings(&self, asked: &Asked, caller: &Caller) -> Result<Held, ApiError> {
        let mut warnings = notes(asked);
        let Some(mut tools) = asked.tools.clone() else {
            return Ok(Held { guides: self.guides(asked, None, caller).await?, warnings });
        };
        let is_whole = |tool: &Tool| HeldSchema::of(&tool.parameters).missing().is_none();
        if tools.tools.iter().all(is_whole)
            && let Ok(guides) = self.guides(asked, Some(&tools), caller).await
        {
            return Ok(Held { guides, warnings });
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
            tools.set_schema(index, self.grammars.loosened(&self.model, &tool.parameters, owner).await);
            let why = format!(
                "the arguments of the tool '{name}' are not constrained to all of their schema: {error}"
            );
            warnings.push(shortened(&why));
        }
        match self.guides(asked, Some(&tools), caller).await {
            Ok(guides) => Ok(Held { guides, warnings }),
            Err(error) if tools.is_required || tools.value.is_some() => Err(error.into()),
            // Unconstrained calls are still parsed.
            Err(error) => {
                warnings.push(format!("calls cannot be constrained to their schemas: {error}"));
                Ok(Held { guides: Guides::default(), warnings })
            }
        }
    }

    /// Returns the guides of a request with these tools.
    async fn guides(
        &self,
        asked: &Asked,
        tools: Option<&ToolConstraint>,
        caller: &Caller,
    ) -> Result<Guides, FormError> {
        let guide = async |form: Form| self.grammars.guide(&self.model, form, caller.owner.clone()).await;
        // The constraint applies after the reasoning.
        let is_thinking = asked.answer.thinking.as_ref().is_some_and(Thinking::is_going_on);
        let Forms { now, later } = asked.forms(tools, self.tokenizer());
        if let Some(form) = now {
            let guide = guide(form).await?;
            return Ok(if is_thinking {
                Guides::later(vec![(Cue::Thought, guide)])
            } else {
                Guides::now(guide)
            });
        }
        let mut guides = Vec::with_capacity(later.len());
        for (cue, form) in later {
            guides.push((cue, guide(form).await?));
        }
        Ok(Guides::later(guides))
    }

    async fn try_schema(&self, schema: &Value, caller: &Caller) -> Result<(), FormError> {
        let form = Form::schema(schema.clone());
        self.grammars.guide(&self.model, form, caller.owner.clone()).await.map(drop)
    }
}

/// Returns the annotations of schemas that do not constrain answers, such as unknown formats.
fn notes(asked: &Asked) -> Vec<String> {
    let tools = asked.tools.iter().flat_map(|tools| &tools.tools);
    let of_tools = tools.filter_map(|tool| {
        let notes = HeldSchema::of(&tool.parameters).notes()?;
        Some(shortened(&format!("the arguments of the tool '{}' are not constrained to {notes}", tool.name)))
    });
    let of_answer = match &asked.form {
        Some(Form::Schema(schema)) => HeldSchema::of(schema).notes(),
        _ => None,
    };
    of_tools
        .chain(of_answer.map(|notes| shortened(&format!("the answer is not constrained to {notes}"))))
        .collect()
}
