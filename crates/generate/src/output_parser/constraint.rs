//! Constraint of answers that may call tools.

use std::sync::Arc;

use kvant_text::tokenizer::Tokenizer;
use serde_json::Value;

use super::json_calls::{self, CallScanner};
use super::tool_calls::{Format, Tool};
use crate::constraint::{OutputFormat, Trigger};

/// Tools that may or must be called, and the value of `response_format` as an alternative.
#[derive(Debug, Clone)]
pub struct ToolConstraint {
    /// Call format of the model.
    pub format: &'static Format,
    /// Tools.
    pub tools: Vec<Tool>,
    /// Whether an answer may contain several calls.
    pub parallel: bool,
    /// Whether the answer must be a call.
    pub is_required: bool,
    /// Schema of a value that is also an answer.
    pub value: Option<Arc<Value>>,
}

/// Output formats of a constraint.
pub struct FormatSet {
    /// Applies from the beginning of the answer.
    now: Option<OutputFormat>,
    /// The first whose trigger occurs applies from there on.
    later: Vec<(Trigger, OutputFormat)>,
}

impl FormatSet {
    /// Returns the formats of an answer: those of the tools, unless an output format excludes tool
    /// calls.
    pub fn of(tools: Option<&ToolConstraint>, format: Option<&OutputFormat>, tokenizer: &Tokenizer) -> Self {
        match (tools, format) {
            (Some(tools), None | Some(OutputFormat::Schema(_))) => tools.formats(tokenizer),
            (Some(tools), Some(_)) if tools.is_required => tools.formats(tokenizer),
            (_, format) => Self { now: format.cloned(), later: Vec::new() },
        }
    }

    /// Returns the formats, each with its trigger; one without a trigger applies from the beginning
    /// of the answer. That of an answer that begins with reasoning applies after it.
    pub fn triggered(self, is_reasoning: bool) -> Vec<(Option<Trigger>, OutputFormat)> {
        match self.now {
            Some(format) => vec![(is_reasoning.then_some(Trigger::ReasoningEnd), format)],
            None => self.later.into_iter().map(|(trigger, format)| (Some(trigger), format)).collect(),
        }
    }
}

impl ToolConstraint {
    /// Returns the output formats. A required call takes precedence over a value; with optional
    /// calls either is an answer, and without a value so is any text.
    fn formats(&self, tokenizer: &Tokenizer) -> FormatSet {
        let Self { format, tools, parallel, .. } = self;
        let now = match &self.value {
            _ if self.is_required => Some(format.grammar(tools, false, *parallel, tokenizer)),
            Some(schema) => Some(format.grammar_or_value(tools, *parallel, schema, tokenizer)),
            None => None,
        };
        if let Some(lark) = now {
            return FormatSet { now: Some(OutputFormat::Lark(lark)), later: Vec::new() };
        }
        let scanner = CallScanner::new(tools.iter().map(|tool| tool.name.clone()));
        let own = (!format.only_first).then(|| {
            (
                Trigger::text(format.opens),
                OutputFormat::Lark(format.grammar(tools, true, *parallel, tokenizer)),
            )
        });
        let plain = (Trigger::JsonCall(scanner), OutputFormat::Lark(json_calls::grammar(tools, *parallel)));
        FormatSet { now: None, later: own.into_iter().chain([plain]).collect() }
    }

    /// Applies the output format of the answer: a value of its schema is an alternative to a call.
    pub fn set_format(&mut self, format: Option<&OutputFormat>) {
        if let Some(OutputFormat::Schema(schema)) = format {
            self.value = Some(Arc::clone(schema));
        }
    }
}
