//! Constraints of an answer: its format and the schemas of its tool calls, as far as they can be
//! enforced.

use std::pin::Pin;

use kvant_text::tokenizer::Tokenizer;
use serde_json::Value;

use crate::constraint::schema::SupportedSchema;
use crate::constraint::{Constraint, ConstraintError, Constraints, OutputFormat, SchemaReduction};
use crate::output_parser::constraint::{FormatSet, ToolConstraint};
use crate::output_parser::tool_calls::Tool;

/// A constraint that is being compiled.
pub type CompilingConstraint<'a> =
    Pin<Box<dyn Future<Output = Result<Constraint, ConstraintError>> + Send + 'a>>;

/// Compiles a constraint, on any thread.
type Compile<'a> = dyn Fn(OutputFormat) -> CompilingConstraint<'a> + Sync + 'a;

/// Constraints, and warnings about schemas that they enforce in part.
#[derive(Default)]
pub struct AnswerConstraints {
    /// Constraints.
    pub constraints: Constraints,
    /// Warnings, each one line.
    pub warnings: Vec<String>,
}

/// What constrains an answer.
#[derive(Debug, Clone, Copy)]
pub struct AnswerRules<'a> {
    /// Tools that the model may call.
    pub tools: Option<&'a ToolConstraint>,
    /// Output format.
    pub format: Option<&'a OutputFormat>,
    /// Whether the answer begins with reasoning, which is free.
    pub is_reasoning: bool,
}

impl AnswerRules<'_> {
    /// Compiles the constraints by `compile`. An optional tool with an unsupported schema is
    /// constrained to the supported part, and leaves the others constrained.
    ///
    /// # Errors
    /// An output format, or the schema of a required tool, without support.
    pub async fn compile(
        self,
        tokenizer: &Tokenizer,
        compile: &Compile<'_>,
    ) -> Result<AnswerConstraints, ConstraintError> {
        let mut warnings = self.notes();
        let is_whole = |tool: &Tool| SupportedSchema::of(&tool.parameters).missing().is_none();
        let Some(tools) = self.tools else {
            return Ok(AnswerConstraints { constraints: self.all(tokenizer, compile).await?, warnings });
        };
        if tools.tools.iter().all(is_whole)
            && let Ok(constraints) = self.all(tokenizer, compile).await
        {
            return Ok(AnswerConstraints { constraints, warnings });
        }
        let mut tools = tools.clone();
        for tool in &mut tools.tools {
            let schema = OutputFormat::schema(tool.parameters.clone());
            let Err(error) = compile(schema).await else { continue };
            let name = &tool.name;
            if tools.is_required {
                return Err(ConstraintError::Invalid(format!(
                    "the arguments of the tool '{name}' cannot be constrained to their schema: {error}"
                )));
            }
            warnings.push(format!(
                "the arguments of the tool '{name}' are not constrained to all of their schema: {error}"
            ));
            tool.parameters = supported_subset(&tool.parameters, compile).await;
        }
        let reduced = AnswerRules { tools: Some(&tools), ..self };
        match reduced.all(tokenizer, compile).await {
            Ok(constraints) => Ok(AnswerConstraints { constraints, warnings }),
            Err(error) if tools.is_required || tools.value.is_some() => Err(error),
            // Unconstrained calls are still parsed.
            Err(error) => {
                warnings.push(format!("calls cannot be constrained to their schemas: {error}"));
                Ok(AnswerConstraints { constraints: Constraints::default(), warnings })
            }
        }
    }

    /// Compiles all constraints.
    async fn all(self, tokenizer: &Tokenizer, compile: &Compile<'_>) -> Result<Constraints, ConstraintError> {
        let formats = FormatSet::of(self.tools, self.format, tokenizer);
        let mut compiled = Vec::new();
        for (trigger, format) in formats.triggered(self.is_reasoning) {
            compiled.push((trigger, compile(format).await?));
        }
        Ok(Constraints::with_triggers(compiled))
    }

    /// Returns the annotations of schemas that do not constrain answers, such as unknown formats.
    fn notes(self) -> Vec<String> {
        let tools = self.tools.iter().flat_map(|tools| &tools.tools);
        let of_tools = tools.filter_map(|tool| {
            let notes = SupportedSchema::of(&tool.parameters).notes()?;
            Some(format!("the arguments of the tool '{}' are not constrained to {notes}", tool.name))
        });
        let of_answer = match self.format {
            Some(OutputFormat::Schema(schema)) => SupportedSchema::of(schema).notes(),
            _ => None,
        };
        of_tools.chain(of_answer.map(|notes| format!("the answer is not constrained to {notes}"))).collect()
    }
}

/// Returns the supported part of an object schema: an unsupported part accepts any value.
async fn supported_subset(schema: &Value, compile: &Compile<'_>) -> Value {
    let mut reduction = SchemaReduction::of(schema);
    loop {
        let result = compile(reduction.format()).await;
        if let Some(schema) = reduction.next(result.map(drop)) {
            return schema;
        }
    }
}
