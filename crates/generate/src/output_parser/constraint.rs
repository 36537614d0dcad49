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
    pub now: Option<OutputFormat>,
    /// The first whose trigger occurs applies from there on.
    pub later: Vec<(Trigger, OutputFormat)>,
}

impl ToolConstraint {
    /// Returns the output formats. A required call takes precedence over a value; with optional
    /// calls either is an answer, and without a value so is any text.
    pub fn forms(&self, tokenizer: &Tokenizer) -> FormatSet {
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

    /// Replaces the schema of the arguments of the tool at `index`.
    pub fn set_schema(&mut self, index: usize, schema: Value) {
        self.tools[index].parameters = schema;
    }
}
