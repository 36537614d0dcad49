//! Messages, tools, and what the template makes of them.

use kvant::chat::Thoughts;
use kvant::{Model, Picture, RenderOptions};
use serde_json::{Map, Value};

use super::error::ApiError;
use super::fields::{Fields, text_bytes};
use super::pictures::content;
use crate::guide::Form;
use crate::speech::Speech;
use crate::speech::tools::{Format, Tool, described, format_of};
use crate::thinking::Thinking;

/// A conversation to go on with.
pub(crate) struct Conversation {
    messages: Vec<Value>,
    /// The files of the pictures in them, in their order.
    pictures: Vec<Vec<u8>>,
    options: RenderOptions,
    /// What may be called, and how the model writes that.
    tools: Option<(&'static Format, Vec<Tool>)>,
    choice: Choice,
    /// At most one call in an answer when false.
    parallel: bool,
    /// Thoughts are told apart from what is said.
    splits_thoughts: bool,
    /// The most tokens of a thought.
    budget: Option<usize>,
}

/// Whether tools are to be called.
#[derive(Debug, Clone, PartialEq)]
enum Choice {
    Auto,
    Required,
}

/// A prompt, and how to read what follows it.
pub(crate) struct Opening {
    pub tokens: Vec<u32>,
    /// What some of them are of.
    pub pictures: Vec<Picture>,
    pub speech: Speech,
    /// Tells when the thought is over that the answer may begin with, and how long that may be.
    pub thinking: Option<Thinking>,
}

impl Conversation {
    /// The conversation of a request to a model with this chat template. Where that does not say, the template is told whether to think as
    /// the first of `usual` says, and a thought has as many tokens at most as the second.
    pub fn read(
        fields: &Fields,
        template: &str,
        usual: (Option<bool>, Option<usize>),
    ) -> Result<Self, ApiError> {
        let given: Vec<Map<String, Value>> = fields.need("messages", "a list of messages")?;
        if given.is_empty() {
            return Err(ApiError::field("messages", "at least one message", "none"));
        }
        let format = format_of(template);
        let mut pictures = Vec::new();
        let mut messages = given
            .into_iter()
            .map(|given| message(given, format, &mut pictures))
            .collect::<Result<Vec<_>, _>>()?;
        let (described_tools, tools, choice) = offered(fields)?;
        let budget = budget(fields)?.unwrap_or(usual.1);
        // Who may not think at all does better to know.
        let thinks = if budget == Some(0) { Some(false) } else { usual.0 };
        let extra = told(fields, thinks)?;
        let add_generation_prompt = fields.get("add_generation_prompt", "true or false")?.unwrap_or(true);
        let mut options = RenderOptions { add_generation_prompt, extra, ..RenderOptions::default() };
        if !tools.is_empty() {
            if template.contains("tools") {
                options.tools = Some(described_tools.into());
            } else {
                tell(&mut messages, &described(&described_tools));
            }
        }
        Ok(Self {
            messages,
            pictures,
            options,
            tools: (!tools.is_empty()).then_some((format, tools)),
            choice,
            parallel: fields.get("parallel_tool_calls", "true or false")?.unwrap_or(true),
            splits_thoughts: fields.get::<String>("reasoning_format", "a text")?.as_deref() != Some("none"),
            budget,
        })
    }

    /// The text of the prompt.
    pub fn text(&self, model: &Model) -> Result<String, ApiError> {
        let rendered = model.chat_template()?.render(&self.messages, &self.options);
        Ok(rendered.map_err(kvant::Error::from)?.to_string())
    }

    /// Bytes of what it says, pictures aside.
    pub fn n_bytes(&self) -> usize {
        self.messages.iter().map(text_bytes).sum()
    }

    /// What the next turn begins with. `look` brings pictures, as long as their tokens fit into `n_ctx`.
    pub fn open(
        &self,
        model: &Model,
        n_ctx: usize,
        mut look: impl FnMut(&[u8]) -> Result<Picture, ApiError>,
    ) -> Result<Opening, ApiError> {
        let template = model.chat_template()?;
        if !self.pictures.is_empty() && !model.sees() {
            let expected = "parts of type text (this model sees nothing: no mmproj file was given)";
            return Err(ApiError::field("content", expected, "a picture"));
        }
        let mut pictures = Vec::with_capacity(self.pictures.len());
        let mut n_tokens = 0;
        for file in &self.pictures {
            let picture = look(file)?;
            n_tokens += picture.tokens().len();
            if n_tokens > n_ctx {
                return Err(ApiError::too_long(n_tokens, n_ctx));
            }
            pictures.push(picture);
        }
        let (rendered, tokens) = model.picture_prompt(&self.messages, &self.options, &pictures)?;
        let thoughts = Thoughts::of(template.source(), rendered.as_str());
        let tokenizer = model.tokenizer()?;
        let thinking = (thoughts != Thoughts::none())
            .then(|| Thinking::new(thoughts.clone(), self.budget, tokenizer))
            .transpose()
            .map_err(kvant::Error::from)?;
        let thoughts = if self.splits_thoughts { thoughts } else { Thoughts::none() };
        Ok(Opening { tokens, pictures, speech: Speech::new(thoughts, self.tools.clone()), thinking })
    }

    /// What the answer is held to from its beginning, since a call is asked for.
    pub fn form(&self) -> Option<Form> {
        let (format, tools) = self.tools.as_ref().filter(|_| self.choice == Choice::Required)?;
        Some(Form::Lark(format.grammar(tools, false, self.parallel)))
    }

    /// What the answer is held to once it has said the text that opens a call.
    pub fn form_of_calls(&self) -> Option<(&'static str, Form)> {
        let (format, tools) = self.tools.as_ref().filter(|_| self.choice == Choice::Auto)?;
        let form = Form::Lark(format.grammar(tools, true, self.parallel));
        (!format.only_first).then_some((format.opens, form))
    }
}

/// Variables of the template: those that are named as such, and what other fields say of thinking.
fn told(fields: &Fields, thinks: Option<bool>) -> Result<Map<String, Value>, ApiError> {
    let mut told: Map<String, Value> = fields.get("chat_template_kwargs", "an object")?.unwrap_or_default();
    let effort: Option<String> = fields.get("reasoning_effort", "a text")?;
    let thinks = fields.get("enable_thinking", "true or false")?.or(thinks);
    let thinks = if effort.as_deref() == Some("none") { Some(false) } else { thinks };
    if let Some(effort) = effort.filter(|effort| effort != "none") {
        told.entry("reasoning_effort").or_insert(effort.into());
    }
    if let Some(thinks) = thinks {
        told.entry("enable_thinking").or_insert(thinks.into());
    }
    Ok(told)
}

/// The most tokens of a thought, where the request says: `Some(None)` that there is no bound. By llama.cpp's names and vLLM's.
fn budget(fields: &Fields) -> Result<Option<Option<usize>>, ApiError> {
    const NAMES: [&str; 3] = ["thinking_budget_tokens", "reasoning_budget_tokens", "thinking_token_budget"];
    let budget: Option<i64> = fields.any(&NAMES, "a whole number")?;
    Ok(budget.map(|budget| usize::try_from(budget).ok()))
}

/// The tools of a request that may be called: as they were described, and read.
fn offered(fields: &Fields) -> Result<(Vec<Value>, Vec<Tool>, Choice), ApiError> {
    let mut all: Vec<Value> = fields.get("tools", "a list of tools")?.unwrap_or_default();
    let expected = "none, auto, required, or a function's name";
    let choice = match fields.value("tool_choice") {
        None => Choice::Auto,
        Some(Value::String(choice)) => match choice.as_str() {
            "none" => return Ok((Vec::new(), Vec::new(), Choice::Auto)),
            "auto" => Choice::Auto,
            "required" | "any" => Choice::Required,
            other => return Err(ApiError::field("tool_choice", expected, other)),
        },
        Some(named) => {
            let name = named["function"]["name"].as_str().or(named["name"].as_str());
            let name = name.ok_or_else(|| ApiError::field("tool_choice", expected, named))?;
            all.retain(|tool| tool["function"]["name"] == name);
            if all.is_empty() {
                return Err(ApiError::field("tool_choice", "one of the tools", name));
            }
            Choice::Required
        }
    };
    if all.is_empty() && choice == Choice::Required {
        return Err(ApiError::field("tools", "at least one tool where one is to be called", "none"));
    }
    let tools = all.iter().map(tool).collect::<Result<_, _>>()?;
    Ok((all, tools, choice))
}

fn tool(described: &Value) -> Result<Tool, ApiError> {
    let function = &described["function"];
    let name = function["name"].as_str().filter(|name| !name.is_empty());
    let name = name.ok_or_else(|| ApiError::field("tools", "functions that have a name", described))?;
    let any = || serde_json::json!({ "type": "object" });
    let parameters = function.get("parameters").filter(|schema| schema.is_object()).cloned();
    Ok(Tool { name: name.to_owned(), parameters: parameters.unwrap_or_else(any) })
}

/// Adds to the system message, or puts one first.
fn tell(messages: &mut Vec<Value>, text: &str) {
    if let Some(system) = messages.first_mut().filter(|message| message["role"] == "system") {
        let said = system["content"].as_str().unwrap_or_default();
        system["content"] = format!("{said}\n\n{text}").into();
    } else {
        messages.insert(0, serde_json::json!({ "role": "system", "content": text }));
    }
}

/// A message as templates read it: its content is text, or parts where there are pictures, the arguments of its calls are objects.
fn message(
    mut message: Map<String, Value>,
    format: &Format,
    pictures: &mut Vec<Vec<u8>>,
) -> Result<Value, ApiError> {
    let role = message.get("role").and_then(Value::as_str).unwrap_or_default();
    if role.is_empty() {
        return Err(ApiError::field("messages", "a role in every message", Value::Object(message)));
    }
    // What newer clients call a system message.
    if role == "developer" {
        message.insert("role".to_owned(), "system".into());
    }
    let content = match message.remove("content").unwrap_or_default() {
        text @ Value::String(_) => text,
        Value::Null => "".into(),
        Value::Array(parts) => content(&parts, pictures)?,
        other => return Err(ApiError::field("content", "a text or a list of parts", other)),
    };
    message.insert("content".to_owned(), content);
    if let Some(Value::Array(calls)) = message.get_mut("tool_calls")
        && !format.wants_text()
    {
        for call in calls {
            let arguments = call.get_mut("function").and_then(|function| function.get_mut("arguments"));
            let Some(arguments) = arguments else { continue };
            if let Some(object) = arguments.as_str().and_then(|text| serde_json::from_str::<Value>(text).ok())
            {
                *arguments = object;
            }
        }
    }
    Ok(message.into())
}
