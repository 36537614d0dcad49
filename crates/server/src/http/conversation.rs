//! Messages, tools, and what the template makes of them.

use kvant::chat::Thoughts;
use kvant::{ChatTemplate, Model, Picture, RenderOptions, Tokenizer};
use serde_json::{Map, Value};

use super::error::ApiError;
use super::fields::{Fields, text_bytes};
use super::history;
use crate::speech::Speech;
use crate::speech::constraint::ToolConstraint;
use crate::speech::tools::{Format, Tool, described, format_of};
use crate::thinking::Thinking;

/// A conversation to go on with.
pub(crate) struct Conversation {
    messages: Vec<Value>,
    /// The files of the pictures in them, in their order.
    pictures: Vec<Vec<u8>>,
    options: RenderOptions,
    /// Instructions about the tools, where the template has none.
    instructions: Option<String>,
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

/// What templates say that take one call of a message.
const SINGLE_CALLS: &str = "only supports single tool-calls";

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
        template: &ChatTemplate,
        usual: (Option<bool>, Option<usize>),
    ) -> Result<Self, ApiError> {
        let given: Vec<Map<String, Value>> = fields.need("messages", "a list of messages")?;
        if given.is_empty() {
            return Err(ApiError::field("messages", "at least one message", "none"));
        }
        let (described_tools, tools, choice) = offered(fields)?;
        let template = template.for_tools(!tools.is_empty()).map_err(kvant::Error::from)?.source();
        let format = format_of(template);
        let mut pictures = Vec::new();
        let messages = given
            .into_iter()
            .map(|given| history::message(given, format, &mut pictures))
            .collect::<Result<Vec<_>, _>>()?;
        let budget = budget(fields)?.unwrap_or(usual.1);
        // Who may not think at all does better to know.
        let thinks = if budget == Some(0) { Some(false) } else { usual.0 };
        let extra = told(fields, thinks)?;
        let messages =
            if template.contains(SINGLE_CALLS) { history::one_call_each(messages) } else { messages };
        let continue_final_message = continues(fields, messages.last())?;
        let opens_turn: Option<bool> = fields.get("add_generation_prompt", "true or false")?;
        let add_generation_prompt = opens_turn.unwrap_or(true) && !continue_final_message;
        let mut options = RenderOptions {
            add_generation_prompt,
            continue_final_message,
            extra,
            ..RenderOptions::default()
        };
        let mut instructions = None;
        if !tools.is_empty() {
            match template.contains("tools") {
                true => options.tools = Some(described_tools.into()),
                false => instructions = Some(described(&described_tools)),
            }
        }
        // Made to call, small models make the same call until there is no room left.
        let calls_several = choice == Choice::Auto && !template.contains(SINGLE_CALLS);
        Ok(Self {
            messages,
            pictures,
            options,
            instructions,
            tools: (!tools.is_empty()).then_some((format, tools)),
            choice,
            parallel: fields.get("parallel_tool_calls", "true or false")?.unwrap_or(calls_several),
            splits_thoughts: fields.get::<String>("reasoning_format", "a text")?.as_deref() != Some("none"),
            budget,
        })
    }

    /// The text of the prompt.
    pub fn text(&self, model: &Model) -> Result<String, ApiError> {
        let template = model.chat_template()?;
        let render = |messages: &[Value]| Ok(template.render(messages, &self.options)?.to_string());
        Ok(self.with_instructions(render)?)
    }

    /// Renders the messages in the first of several spellings that the template takes. A template without tools is told of them in words:
    /// as a system message, or in front of the first message. Others want the arguments of calls as objects, or as texts.
    fn with_instructions<T>(
        &self,
        render: impl Fn(&[Value]) -> Result<T, kvant::Error>,
    ) -> Result<T, kvant::Error> {
        let Some(instructions) = &self.instructions else {
            let with_texts = || render(&history::with_text_arguments(&self.messages));
            return render(&self.messages).or_else(|refused| with_texts().map_err(|_| refused));
        };
        let [as_system, in_front] = history::in_words(&self.messages, instructions);
        render(&as_system).or_else(|refused| render(&in_front).map_err(|_| refused))
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
        let render = |messages: &[Value]| model.picture_prompt(messages, &self.options, &pictures);
        let (rendered, tokens) = self.with_instructions(render)?;
        let template = template.for_tools(self.tools.is_some()).map_err(kvant::Error::from)?;
        let thoughts = Thoughts::of(template.source(), rendered.as_str());
        let tokenizer = model.tokenizer()?;
        let thinking = (thoughts != Thoughts::none())
            .then(|| Thinking::new(thoughts.clone(), self.budget, tokenizer))
            .transpose()
            .map_err(kvant::Error::from)?;
        let thoughts = if self.splits_thoughts { thoughts } else { Thoughts::none() };
        Ok(Opening { tokens, pictures, speech: Speech::new(thoughts, self.tools.clone()), thinking })
    }

    /// Control tokens that are part of the answer, as tools may be called.
    pub fn call_marks(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        self.tools.as_ref().map_or(Vec::new(), |(format, _)| format.control_tokens(tokenizer))
    }

    /// What the answer is held to on account of its tools.
    pub fn tool_constraint(&self) -> Option<ToolConstraint> {
        let (format, tools) = self.tools.as_ref()?;
        let (tools, is_required) = (tools.clone(), self.choice == Choice::Required);
        Some(ToolConstraint { format, tools, parallel: self.parallel, is_required, value: None })
    }
}

/// Whether the last message is to be continued: as the request says, else where the assistant said it and no new turn is asked for.
fn continues(fields: &Fields, last: Option<&Value>) -> Result<bool, ApiError> {
    let is_text = |message: &&Value| {
        let has_text = message["content"].as_str().is_some_and(|text| !text.trim().is_empty());
        message["role"] == "assistant" && message["tool_calls"].is_null() && has_text
    };
    let can = last.filter(is_text).is_some();
    match fields.get("continue_final_message", "true or false")? {
        Some(true) if !can => {
            let expected = "a text of the assistant as the last message, which is continued";
            Err(ApiError::field("continue_final_message", expected, "another one"))
        }
        Some(continues) => Ok(continues),
        None => Ok(can && fields.value("add_generation_prompt").is_none()),
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
        Some(given) if given["type"] == "allowed_tools" => {
            // Chat Completions nests what Responses writes flat.
            let allowed = given.get("allowed_tools").unwrap_or(given);
            let listed = allowed["tools"].as_array();
            let listed =
                listed.ok_or_else(|| ApiError::field("tool_choice", "a list of allowed tools", given))?;
            let name =
                |tool: &Value| tool["function"]["name"].as_str().or(tool["name"].as_str()).map(str::to_owned);
            let names: Vec<_> = listed.iter().filter_map(name).collect();
            all.retain(|tool| names.iter().any(|name| tool["function"]["name"] == **name));
            match allowed["mode"].as_str() {
                None | Some("auto") => Choice::Auto,
                Some("required") => Choice::Required,
                Some(other) => return Err(ApiError::field("tool_choice", "mode auto or required", other)),
            }
        }
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

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::json;

    use super::*;

    fn read(source: &str, body: &Value) -> Result<Conversation, ApiError> {
        let template = ChatTemplate::new(source, "<s>", "</s>").map_err(kvant::Error::from)?;
        Conversation::read(&Fields::new(body.as_object().unwrap().clone()), &template, (None, None))
    }

    fn rendered(source: &str, body: &Value) -> Result<String, String> {
        let template = ChatTemplate::new(source, "<s>", "</s>").map_err(|error| error.to_string())?;
        let conversation = read(source, body).map_err(|error| error.message().to_owned())?;
        let render = |messages: &[Value]| Ok(template.render(messages, &conversation.options)?.to_string());
        conversation.with_instructions(render).map_err(|error| error.to_string())
    }

    /// Clients send calls of any server back, in the spellings of their languages.
    #[test]
    fn every_template_takes_the_turn_after_a_tool_call() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/assets/templates");
        if !folder.is_dir() {
            println!("skipped: {}: the templates are not here", folder.display());
            return;
        }
        let mut wrong = Vec::new();
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_none_or(|extension| extension != "jinja") {
                continue;
            }
            let source = std::fs::read_to_string(&path).unwrap();
            let name = path.file_stem().unwrap().to_string_lossy().into_owned();
            let parameters = json!({ "type": "object", "properties": { "city": { "type": "string", "description": "A city" } }, "required": ["city"] });
            let tools = json!([{ "type": "function", "function": { "name": "weather", "description": "The weather", "parameters": parameters } }]);
            let call = |id: &str, arguments: Value| json!({ "id": id, "type": "function", "function": { "name": "weather", "arguments": arguments } });
            let id = "call_1a5edd9978c290030000000c";
            let result = |id: &str| json!({ "role": "tool", "tool_call_id": id, "content": "Rain." });
            let user = json!({ "role": "user", "content": "How is it?" });
            let said = |content: Value, calls: Value| json!({ "role": "assistant", "content": content, "tool_calls": calls });
            for (what, messages) in [
                ("a first turn", json!([user])),
                (
                    "an object",
                    json!([
                        user,
                        said(Value::Null, json!([call(id, json!({ "city": "Oslo" }))])),
                        result(id)
                    ]),
                ),
                (
                    "a text",
                    json!([
                        user,
                        said("".into(), json!([call(id, r#"{"city": "Oslo"}"#.into())])),
                        result(id)
                    ]),
                ),
                ("none", json!([user, said(Value::Null, json!([call(id, "".into())])), result(id)])),
                ("null", json!([user, said(Value::Null, json!([call(id, Value::Null)])), result(id)])),
                (
                    "a cut text",
                    json!([
                        user,
                        said("I see.".into(), json!([call(id, r#"{"city": "Os"#.into())])),
                        result(id)
                    ]),
                ),
                (
                    "two calls",
                    json!([
                        user,
                        said(Value::Null, json!([call("a", json!({})), call("b", json!({}))])),
                        result("a"),
                        result("b")
                    ]),
                ),
            ] {
                let body = json!({ "messages": messages, "tools": tools });
                let wants = if messages.as_array().unwrap().len() > 1 { "Rain." } else { "How is it?" };
                match rendered(&source, &body) {
                    Ok(text) if text.contains("How is it?") && text.contains(wants) => {}
                    Ok(text) => wrong.push(format!("{name}: {what}: something is lost: {text}")),
                    Err(error) => wrong.push(format!("{name}: {what}: {error}")),
                }
            }
        }
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    }

    #[test]
    fn an_answer_of_the_assistant_at_the_end_is_continued_unless_a_turn_is_asked_for() {
        let source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
        let messages =
            json!([{ "role": "user", "content": "Count." }, { "role": "assistant", "content": "1, 2," }]);
        for (more, want) in [
            (json!({}), "<user>Count.</><assistant>1, 2,"),
            (json!({ "continue_final_message": true }), "<user>Count.</><assistant>1, 2,"),
            (json!({ "continue_final_message": false }), "<user>Count.</><assistant>1, 2,</><assistant>"),
            (json!({ "add_generation_prompt": true }), "<user>Count.</><assistant>1, 2,</><assistant>"),
            (json!({ "add_generation_prompt": false }), "<user>Count.</><assistant>1, 2,</>"),
        ] {
            let mut body = json!({ "messages": messages });
            body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            assert_eq!(rendered(source, &body).unwrap(), want, "{more}");
        }
        let body = json!({ "messages": [messages[0]], "continue_final_message": true });
        assert!(rendered(source, &body).unwrap_err().contains("continue_final_message"));
    }

    #[test]
    fn allowed_tools_are_those_that_are_offered() {
        let tool = |name: &str| json!({ "type": "function", "function": { "name": name } });
        let body = |choice: Value| json!({ "messages": [{ "role": "user", "content": "x" }], "tools": [tool("a"), tool("b")], "tool_choice": choice });
        let nested =
            json!({ "type": "allowed_tools", "allowed_tools": { "mode": "required", "tools": [tool("b")] } });
        let flat = json!({ "type": "allowed_tools", "mode": "auto", "tools": [{ "type": "function", "name": "b" }] });
        for (choice, want) in [(nested, Choice::Required), (flat, Choice::Auto)] {
            let conversation = read("tools", &body(choice)).unwrap();
            let (_, tools) = conversation.tools.unwrap();
            assert_eq!((tools.len(), tools[0].name.as_str(), conversation.choice), (1, "b", want));
        }
    }
}
