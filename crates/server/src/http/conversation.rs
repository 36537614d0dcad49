//! Reads messages, tools and template options of a request and renders the prompt.

use kvant::chat::ReasoningParser;
use kvant::generate::output_parser::OutputParser;
use kvant::generate::output_parser::constraint::ToolConstraint;
use kvant::generate::output_parser::tool_calls::{Format, Tool, format_of, tool_instructions};
use kvant::generate::reasoning_budget::ReasoningBudget;
use kvant::{ChatTemplate, EncodedImage, Model, RenderOptions, Tokenizer};
use serde_json::{Map, Value};

use super::error::ApiError;
use super::fields::{Fields, text_bytes};
use super::history;

/// Conversation of a request.
pub(crate) struct Conversation {
    messages: Vec<Value>,
    /// Image files of the messages, in order.
    images: Vec<Vec<u8>>,
    options: RenderOptions,
    /// Tool instructions for a template without tool support.
    instructions: Option<String>,
    /// Callable tools, and the model's tool call format.
    tools: Option<(&'static Format, Vec<Tool>)>,
    choice: Choice,
    /// If false, at most one tool call per answer.
    parallel: bool,
    /// Whether reasoning is separated from the content.
    splits_reasoning: bool,
    /// Reasoning budget in tokens.
    budget: Option<usize>,
}

/// Error text of templates that accept one tool call per message.
const SINGLE_CALLS: &str = "only supports single tool-calls";

/// Tool choice.
#[derive(Debug, Clone, PartialEq)]
enum Choice {
    Auto,
    Required,
}

/// Rendered prompt, and the parser of its continuation.
pub(crate) struct Opening {
    pub tokens: Vec<u32>,
    /// Images of the prompt's image tokens.
    pub images: Vec<EncodedImage>,
    pub parser: OutputParser,
    /// Detects the end of reasoning and enforces its budget.
    pub thinking: Option<ReasoningBudget>,
}

impl Conversation {
    /// Reads the conversation of a request for a model with this chat template. `usual` holds the
    /// defaults of `enable_thinking` and of the reasoning budget.
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
        let mut images = Vec::new();
        let messages = given
            .into_iter()
            .map(|given| history::message(given, format, &mut images))
            .collect::<Result<Vec<_>, _>>()?;
        let budget = budget(fields)?.unwrap_or(usual.1);
        // With a budget of 0 the template disables reasoning.
        let thinks = if budget == Some(0) { Some(false) } else { usual.0 };
        let extra = template_variables(fields, thinks)?;
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
                false => instructions = Some(tool_instructions(&described_tools)),
            }
        }
        // Small models that are forced to call a tool repeat the call until the token limit.
        let calls_several = choice == Choice::Auto && !template.contains(SINGLE_CALLS);
        Ok(Self {
            messages,
            images,
            options,
            instructions,
            tools: (!tools.is_empty()).then_some((format, tools)),
            choice,
            parallel: fields.get("parallel_tool_calls", "true or false")?.unwrap_or(calls_several),
            splits_reasoning: fields.get::<String>("reasoning_format", "a text")?.as_deref() != Some("none"),
            budget,
        })
    }

    /// Renders the text of the prompt.
    pub fn text(&self, model: &Model) -> Result<String, ApiError> {
        let template = model.chat_template()?;
        let render = |messages: &[Value]| Ok(template.render(messages, &self.options)?.to_string());
        Ok(self.with_instructions(render)?)
    }

    /// Renders the messages in the first variant that the template accepts. A template without tool
    /// support gets the tools as text: in a system message or before the first message. Other
    /// templates expect the arguments of calls as objects, or as strings.
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

    /// Returns the size of the texts in bytes, images excluded.
    pub fn n_bytes(&self) -> usize {
        self.messages.iter().map(text_bytes).sum()
    }

    /// Renders the prompt of the next turn. `encode_image` is called as long as the tokens of the
    /// images fit into `n_ctx`.
    pub fn open(
        &self,
        model: &Model,
        n_ctx: usize,
        mut encode_image: impl FnMut(&[u8]) -> Result<EncodedImage, ApiError>,
    ) -> Result<Opening, ApiError> {
        let template = model.chat_template()?;
        if !self.images.is_empty() && !model.supports_images() {
            let expected = "parts of type text (this model has no vision encoder: no mmproj file was given)";
            return Err(ApiError::field("content", expected, "an image"));
        }
        let mut images = Vec::with_capacity(self.images.len());
        let mut n_tokens = 0;
        for file in &self.images {
            let image = encode_image(file)?;
            n_tokens += image.tokens().len();
            if n_tokens > n_ctx {
                return Err(ApiError::too_long(n_tokens, n_ctx));
            }
            images.push(image);
        }
        let render = |messages: &[Value]| model.image_prompt(messages, &self.options, &images);
        let (rendered, tokens) = self.with_instructions(render)?;
        let template = template.for_tools(self.tools.is_some()).map_err(kvant::Error::from)?;
        let reasoning = ReasoningParser::of(template.source(), rendered.as_str());
        let tokenizer = model.tokenizer()?;
        let thinking = (reasoning != ReasoningParser::none())
            .then(|| ReasoningBudget::new(reasoning.clone(), self.budget, tokenizer))
            .transpose()
            .map_err(kvant::Error::from)?;
        let reasoning = if self.splits_reasoning { reasoning } else { ReasoningParser::none() };
        Ok(Opening { tokens, images, parser: OutputParser::new(reasoning, self.tools.clone()), thinking })
    }

    /// Returns control tokens whose text is part of the answer when tools may be called.
    pub fn call_marks(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        self.tools.as_ref().map_or(Vec::new(), |(format, _)| format.control_tokens(tokenizer))
    }

    /// Returns the constraint that the tools impose on the answer.
    pub fn tool_constraint(&self) -> Option<ToolConstraint> {
        let (format, tools) = self.tools.as_ref()?;
        let (tools, is_required) = (tools.clone(), self.choice == Choice::Required);
        Some(ToolConstraint { format, tools, parallel: self.parallel, is_required, value: None })
    }
}

/// Reports whether the last message is continued: as the request states; otherwise if it is a text
/// of the assistant and the request does not set `add_generation_prompt`.
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

/// Returns the template variables: explicit ones, and those derived from the reasoning fields.
fn template_variables(fields: &Fields, thinks: Option<bool>) -> Result<Map<String, Value>, ApiError> {
    let mut variables: Map<String, Value> =
        fields.get("chat_template_kwargs", "an object")?.unwrap_or_default();
    let effort: Option<String> = fields.get("reasoning_effort", "a text")?;
    let thinks = fields.get("enable_thinking", "true or false")?.or(thinks);
    let thinks = if effort.as_deref() == Some("none") { Some(false) } else { thinks };
    if let Some(effort) = effort.filter(|effort| effort != "none") {
        variables.entry("reasoning_effort").or_insert(effort.into());
    }
    if let Some(thinks) = thinks {
        variables.entry("enable_thinking").or_insert(thinks.into());
    }
    Ok(variables)
}

/// Returns the reasoning budget of a request, under the names of llama.cpp and vLLM; `Some(None)`
/// means unlimited.
fn budget(fields: &Fields) -> Result<Option<Option<usize>>, ApiError> {
    const NAMES: [&str; 3] = ["thinking_budget_tokens", "reasoning_budget_tokens", "thinking_token_budget"];
    let budget: Option<i64> = fields.any(&NAMES, "a whole number")?;
    Ok(budget.map(|budget| usize::try_from(budget).ok()))
}

/// Returns the callable tools of a request, as described and as parsed, and the tool choice.
fn offered(fields: &Fields) -> Result<(Vec<Value>, Vec<Tool>, Choice), ApiError> {
    let mut all: Vec<Value> = fields.get("tools", "a list of tools")?.unwrap_or_default();
    let expected = "none, auto, required, or a function's name";
    let choice = match fields.value("tool_choice") {
        None => Choice::Auto,
        Some(given) if given["type"] == "allowed_tools" => {
            // Chat Completions nests this object, Responses has it flat.
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

    /// Clients return calls of other servers too, in their spellings.
    #[test]
    fn every_template_takes_the_turn_after_a_tool_call() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/assets/templates");
        if !folder.is_dir() {
            println!("skipped: {}: the templates are not here", folder.display());
            return;
        }
        let mut errors = Vec::new();
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
            let assistant = |content: Value, calls: Value| json!({ "role": "assistant", "content": content, "tool_calls": calls });
            for (what, messages) in [
                ("a first turn", json!([user])),
                (
                    "an object",
                    json!([
                        user,
                        assistant(Value::Null, json!([call(id, json!({ "city": "Oslo" }))])),
                        result(id)
                    ]),
                ),
                (
                    "a text",
                    json!([
                        user,
                        assistant("".into(), json!([call(id, r#"{"city": "Oslo"}"#.into())])),
                        result(id)
                    ]),
                ),
                ("none", json!([user, assistant(Value::Null, json!([call(id, "".into())])), result(id)])),
                ("null", json!([user, assistant(Value::Null, json!([call(id, Value::Null)])), result(id)])),
                (
                    "a cut text",
                    json!([
                        user,
                        assistant("I see.".into(), json!([call(id, r#"{"city": "Os"#.into())])),
                        result(id)
                    ]),
                ),
                (
                    "two calls",
                    json!([
                        user,
                        assistant(Value::Null, json!([call("a", json!({})), call("b", json!({}))])),
                        result("a"),
                        result("b")
                    ]),
                ),
            ] {
                let body = json!({ "messages": messages, "tools": tools });
                let expected = if messages.as_array().unwrap().len() > 1 { "Rain." } else { "How is it?" };
                match rendered(&source, &body) {
                    Ok(text) if text.contains("How is it?") && text.contains(expected) => {}
                    Ok(text) => errors.push(format!("{name}: {what}: something is lost: {text}")),
                    Err(error) => errors.push(format!("{name}: {what}: {error}")),
                }
            }
        }
        assert!(errors.is_empty(), "{}", errors.join("\n"));
    }

    #[test]
    fn a_final_assistant_message_is_continued_by_default() {
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
    fn only_allowed_tools_are_offered() {
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
