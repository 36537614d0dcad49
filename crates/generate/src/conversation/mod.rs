//! Conversations: renders messages, tools and reasoning options as the prompt of the next turn, and
//! chooses how its answer is parsed and constrained.

mod constraints;
mod history;
mod tools;

use std::fmt::Display;

use kvant_text::chat::{ChatTemplate, ReasoningParser, RenderOptions, TemplateError};
use kvant_text::tokenizer::{Tokenizer, TokenizerError};
use serde_json::{Map, Value};

use crate::output_parser::OutputParser;
use crate::output_parser::constraint::ToolConstraint;
use crate::output_parser::tool_calls::{Format, Tool, format_of, tool_instructions};
use crate::reasoning_budget::ReasoningBudget;
pub use constraints::{AnswerConstraints, AnswerRules, CompilingConstraint};
pub use tools::{ToolChoice, ToolSet};

/// Error text of templates that accept one tool call per message.
const SINGLE_CALLS: &str = "only supports single tool-calls";

/// Invalid part of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{name}: expected {expected}, got {got}")]
pub struct InvalidConversation {
    /// The part.
    pub name: &'static str,
    /// Its allowed values.
    pub expected: &'static str,
    /// The given value.
    pub got: String,
}

impl InvalidConversation {
    /// Creates the error of the part `name`.
    pub fn new(name: &'static str, expected: &'static str, got: impl Display) -> Self {
        Self { name, expected, got: got.to_string() }
    }
}

/// Reason why a conversation cannot be rendered.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ConversationError {
    /// A part is invalid.
    #[error(transparent)]
    Invalid(#[from] InvalidConversation),
    /// The model's template for tools is unsound.
    #[error(transparent)]
    Template(#[from] TemplateError),
}

/// Options of the next turn.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TurnOptions {
    /// Callable tools.
    pub tools: ToolSet,
    /// Whether an answer may contain several calls. `None`: unless a call is required or the
    /// template accepts one call per message.
    pub parallel_tool_calls: Option<bool>,
    /// Whether the model reasons first, where its template has a choice. `None` leaves it to the
    /// template, but for a budget of 0, which disables reasoning.
    pub enable_thinking: Option<bool>,
    /// Effort of the reasoning, for templates that read it; `none` disables reasoning.
    pub reasoning_effort: Option<String>,
    /// Maximum reasoning tokens, after which the end mark is forced; unlimited if `None`.
    pub reasoning_budget: Option<usize>,
    /// Keeps the reasoning in the text of the answer, with its marks.
    pub keeps_reasoning: bool,
    /// Further variables of the template, which take precedence over those of other options.
    pub variables: Map<String, Value>,
    /// Whether the answer continues the last message. `None`: where that is a text of the assistant
    /// and `add_generation_prompt` is `None`.
    pub continue_final_message: Option<bool>,
    /// Whether the prompt ends with the opening of the assistant's turn. `None`: unless the answer
    /// continues the last message.
    pub add_generation_prompt: Option<bool>,
}

impl TurnOptions {
    /// Returns the variables of the template.
    fn variables(&self) -> Map<String, Value> {
        let mut variables = self.variables.clone();
        let effort = self.reasoning_effort.as_deref();
        let default = (self.reasoning_budget == Some(0)).then_some(false);
        let thinks = if effort == Some("none") { Some(false) } else { self.enable_thinking.or(default) };
        if let Some(effort) = effort.filter(|effort| *effort != "none") {
            variables.entry("reasoning_effort").or_insert(effort.into());
        }
        if let Some(thinks) = thinks {
            variables.entry("enable_thinking").or_insert(thinks.into());
        }
        variables
    }

    /// Reports whether the answer continues the last message.
    fn continues(&self, last: Option<&Value>) -> Result<bool, InvalidConversation> {
        let is_text = |message: &&Value| {
            let has_text = message["content"].as_str().is_some_and(|text| !text.trim().is_empty());
            message["role"] == "assistant" && message["tool_calls"].is_null() && has_text
        };
        let can = last.filter(is_text).is_some();
        match self.continue_final_message {
            Some(true) if !can => {
                let expected = "a text of the assistant as the last message, which is continued";
                Err(InvalidConversation::new("continue_final_message", expected, "another one"))
            }
            Some(continues) => Ok(continues),
            None => Ok(can && self.add_generation_prompt.is_none()),
        }
    }
}

/// Conversation and the options of its next turn, in the form that a chat template expects.
#[derive(Debug, Clone)]
pub struct Conversation {
    messages: Vec<Value>,
    options: RenderOptions,
    /// Tool instructions for a template without tool support.
    instructions: Option<String>,
    /// Callable tools, and the model's tool call format.
    tools: Option<(&'static Format, Vec<Tool>)>,
    is_required: bool,
    parallel: bool,
    keeps_reasoning: bool,
    budget: Option<usize>,
}

/// How the answer of a turn is decoded, constrained and parsed.
#[derive(Debug, Clone)]
pub struct AnswerFormat {
    /// Separates reasoning, text and tool calls.
    pub parser: OutputParser,
    /// Detects the end of reasoning and enforces its budget, if the model may reason.
    pub reasoning_budget: Option<ReasoningBudget>,
    /// Control tokens whose text is part of the answer.
    pub call_marks: Vec<u32>,
    /// Constraint of tool calls, if the model may call tools.
    pub tools: Option<ToolConstraint>,
}

impl Default for AnswerFormat {
    /// Returns the format of an answer that is text.
    fn default() -> Self {
        let parser = OutputParser::new(ReasoningParser::none(), None);
        Self { parser, reasoning_budget: None, call_marks: Vec::new(), tools: None }
    }
}

impl Conversation {
    /// Converts messages as [`Conversation::new`], from their JSON text.
    ///
    /// # Errors
    /// As there, and a text that is no list of messages.
    pub fn from_json(
        messages: &str,
        options: TurnOptions,
        template: &ChatTemplate,
    ) -> Result<Self, ConversationError> {
        Self::new(list("messages", "a JSON list of messages", messages)?, options, template)
    }

    /// Converts messages for `template`: objects with `role` and `content` (a text or, with images,
    /// parts `{"type": "text", "text": ..}` and `{"type": "image"}`), `tool_calls` and
    /// `tool_call_id` as in OpenAI's API.
    ///
    /// # Errors
    /// No message, one without a role, a last message that cannot be continued; an unsound template
    /// for tools.
    pub fn new(
        messages: Vec<Value>,
        options: TurnOptions,
        template: &ChatTemplate,
    ) -> Result<Self, ConversationError> {
        if messages.is_empty() {
            return Err(InvalidConversation::new("messages", "at least one message", "none").into());
        }
        let template = template.for_tools(!options.tools.is_empty())?.source();
        let format = format_of(template);
        let has_single_calls = template.contains(SINGLE_CALLS);
        let messages = messages
            .into_iter()
            .map(|message| history::message(message, format))
            .collect::<Result<_, _>>()?;
        let messages = if has_single_calls { history::one_call_each(messages) } else { messages };
        let continue_final_message = options.continues(messages.last())?;
        let opens_turn = options.add_generation_prompt.unwrap_or(true);
        let mut render = RenderOptions {
            add_generation_prompt: opens_turn && !continue_final_message,
            continue_final_message,
            extra: options.variables(),
            ..RenderOptions::default()
        };
        let TurnOptions { tools: ToolSet { described, tools, is_required }, .. } = options;
        let mut instructions = None;
        if !tools.is_empty() {
            match template.contains("tools") {
                true => render.tools = Some(described.into()),
                false => instructions = Some(tool_instructions(&described)),
            }
        }
        // Small models that are forced to call a tool repeat the call until the token limit.
        let calls_several = !is_required && !has_single_calls;
        Ok(Self {
            messages,
            options: render,
            instructions,
            tools: (!tools.is_empty()).then_some((format, tools)),
            is_required,
            parallel: options.parallel_tool_calls.unwrap_or(calls_several),
            keeps_reasoning: options.keeps_reasoning,
            budget: options.reasoning_budget,
        })
    }

    /// Returns the messages.
    pub fn messages(&self) -> &[Value] {
        &self.messages
    }

    /// Renders the messages by `render`, in the first variant that the template accepts. A template
    /// without tool support gets the tools as text: in a system message or before the first
    /// message. Other templates expect the arguments of calls as objects, or as strings.
    ///
    /// # Errors
    /// That of the first variant, if `render` rejects all.
    pub fn render<T, E>(&self, render: impl Fn(&[Value], &RenderOptions) -> Result<T, E>) -> Result<T, E> {
        let render = |messages: &[Value]| render(messages, &self.options);
        let Some(instructions) = &self.instructions else {
            let with_texts = || render(&history::with_text_arguments(&self.messages));
            return render(&self.messages).or_else(|refused| with_texts().map_err(|_| refused));
        };
        let [as_system, in_front] = history::in_words(&self.messages, instructions);
        render(&as_system).or_else(|refused| render(&in_front).map_err(|_| refused))
    }

    /// Returns the format of the answer to a prompt with this text.
    ///
    /// # Errors
    /// As [`ReasoningBudget::new`] and [`ChatTemplate::for_tools`].
    pub fn answer_format<E: From<TemplateError> + From<TokenizerError>>(
        &self,
        rendered: &str,
        template: &ChatTemplate,
        tokenizer: &Tokenizer,
    ) -> Result<AnswerFormat, E> {
        let template = template.for_tools(self.tools.is_some())?;
        let reasoning = ReasoningParser::of(template.source(), rendered);
        let reasoning_budget = (reasoning != ReasoningParser::none())
            .then(|| ReasoningBudget::new(reasoning.clone(), self.budget, tokenizer))
            .transpose()?;
        let reasoning = if self.keeps_reasoning { ReasoningParser::none() } else { reasoning };
        let control_tokens = |(format, _): &(&'static Format, _)| format.control_tokens(tokenizer);
        Ok(AnswerFormat {
            parser: OutputParser::new(reasoning, self.tools.clone()),
            reasoning_budget,
            call_marks: self.tools.as_ref().map_or(Vec::new(), control_tokens),
            tools: self.tool_constraint(),
        })
    }

    /// Returns the constraint that the tools impose on the answer.
    fn tool_constraint(&self) -> Option<ToolConstraint> {
        let (format, tools) = self.tools.clone()?;
        let Self { is_required, parallel, .. } = *self;
        Some(ToolConstraint { format, tools, parallel, is_required, value: None })
    }
}

/// Parses the list in a JSON text.
fn list(name: &'static str, expected: &'static str, json: &str) -> Result<Vec<Value>, InvalidConversation> {
    serde_json::from_str(json).map_err(|error| InvalidConversation::new(name, expected, error))
}

#[cfg(test)]
mod tests;
