//! What answers are held to where tools may be called.

use std::sync::Arc;

use kvant::Tokenizer;
use serde_json::Value;

use super::json_calls::{self, CallScanner};
use super::tools::{Format, Tool};
use crate::guide::{Cue, Form};

/// Tools that may or must be called, beside a value that `response_format` asks for.
#[derive(Debug, Clone)]
pub(crate) struct ToolConstraint {
    pub format: &'static Format,
    pub tools: Vec<Tool>,
    /// Whether an answer may hold several calls.
    pub parallel: bool,
    pub is_required: bool,
    /// Schema of a value that is an answer as well.
    pub value: Option<Arc<Value>>,
}

/// The forms of one constraint.
pub(crate) struct Forms {
    /// Holds from the beginning of the answer.
    pub now: Option<Form>,
    /// The first whose cue is given holds from there on.
    pub later: Vec<(Cue, Form)>,
}

impl ToolConstraint {
    /// A required call goes before a value; where calls are optional, either is an answer, and so is any text where no value is asked for.
    pub fn forms(&self, tokenizer: &Tokenizer) -> Forms {
        let Self { format, tools, parallel, .. } = self;
        let now = match &self.value {
            _ if self.is_required => Some(format.grammar(tools, false, *parallel, tokenizer)),
            Some(schema) => Some(format.grammar_beside(tools, *parallel, schema, tokenizer)),
            None => None,
        };
        if let Some(lark) = now {
            return Forms { now: Some(Form::Lark(lark)), later: Vec::new() };
        }
        let scanner = CallScanner::new(tools.iter().map(|tool| tool.name.clone()));
        let own = (!format.only_first).then(|| {
            (Cue::said(format.opens), Form::Lark(format.grammar(tools, true, *parallel, tokenizer)))
        });
        let plain = (Cue::JsonCall(scanner), Form::Lark(json_calls::grammar(tools, *parallel)));
        Forms { now: None, later: own.into_iter().chain([plain]).collect() }
    }

    /// Holds the arguments of the tool at `index` to another schema.
    pub fn set_schema(&mut self, index: usize, schema: Value) {
        self.tools[index].parameters = schema;
    }
}
