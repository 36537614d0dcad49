//! Reads messages, tools and template options of a request, in the names of all APIs.

use kvant::{
    ChatTemplate, Conversation, EncodedMedia, MediaKind, Model, ToolChoice, ToolSet, Turn, TurnOptions,
};
use serde_json::{Map, Value};

use super::error::ApiError;
use super::fields::{Fields, text_bytes};
use super::media::{MediaFile, content};

/// Reasoning options of requests that set none.
#[derive(Clone, Copy)]
pub(crate) struct ReasoningDefaults {
    /// `enable_thinking` for the chat template; undefined when `None`.
    pub enable_thinking: Option<bool>,
    /// Budget in tokens; unlimited when `None`.
    pub budget: Option<usize>,
}

/// Conversation of a request.
pub(crate) struct ConversationRequest {
    conversation: Conversation,
    /// Image and audio files of the messages, in order.
    files: Vec<MediaFile>,
}

impl ConversationRequest {
    /// Reads the conversation of a request for a model with this chat template.
    pub fn read(
        fields: &Fields,
        template: &ChatTemplate,
        usual: ReasoningDefaults,
    ) -> Result<Self, ApiError> {
        let given: Vec<Map<String, Value>> = fields.need("messages", "a list of messages")?;
        if given.is_empty() {
            return Err(ApiError::field("messages", "at least one message", "none"));
        }
        let tools = offered(fields)?;
        let mut files = Vec::new();
        let messages =
            given.into_iter().map(|given| message(given, &mut files)).collect::<Result<Vec<_>, _>>()?;
        let conversation = Conversation::new(messages, turn_options(fields, tools, usual)?, template)?;
        Ok(Self { conversation, files })
    }

    /// Renders the text of the prompt.
    pub fn text(&self, model: &Model) -> Result<String, ApiError> {
        let template = model.chat_template()?;
        let rendered = self.conversation.render(|messages, options| template.render(messages, options));
        Ok(rendered.map_err(kvant::Error::from)?.to_string())
    }

    /// Returns the size of the texts in bytes, media excluded.
    pub fn n_bytes(&self) -> usize {
        self.conversation.messages().iter().map(text_bytes).sum()
    }

    /// Renders the prompt of the next turn. `encode` is called with each file and the tokens that
    /// are left of `n_ctx`, as long as the tokens of the media fit.
    pub fn open(
        &self,
        model: &Model,
        n_ctx: usize,
        mut encode: impl FnMut(&MediaFile, usize) -> Result<EncodedMedia, ApiError>,
    ) -> Result<Turn, ApiError> {
        model.chat_template()?;
        if let Some(file) = self.files.iter().find(|file| !model.supports_media(file.kind)) {
            let (encoder, got) = match file.kind {
                MediaKind::Image => ("vision", "an image"),
                MediaKind::Audio => ("audio", "audio"),
            };
            let expected =
                format!("parts of type text (this model has no {encoder} encoder: no mmproj file was given)");
            return Err(ApiError::field("content", &expected, got));
        }
        let mut media = Vec::with_capacity(self.files.len());
        let mut n_tokens = 0;
        for file in &self.files {
            let encoded = encode(file, n_ctx - n_tokens)?;
            n_tokens += encoded.tokens().len();
            if n_tokens > n_ctx {
                return Err(ApiError::too_long(n_tokens, n_ctx));
            }
            media.push(encoded);
        }
        Ok(model.turn(&self.conversation, media)?)
    }
}

/// Reads a message: its content becomes text, or parts if it has media.
fn message(mut message: Map<String, Value>, files: &mut Vec<MediaFile>) -> Result<Value, ApiError> {
    if message.get("role").and_then(Value::as_str).unwrap_or_default().is_empty() {
        return Err(ApiError::field("messages", "a role in every message", Value::Object(message)));
    }
    let content = match message.remove("content").unwrap_or_default() {
        text @ (Value::String(_) | Value::Null) => text,
        Value::Array(parts) => content(&parts, files)?,
        other => return Err(ApiError::field("content", "a text or a list of parts", other)),
    };
    message.insert("content".to_owned(), content);
    Ok(message.into())
}

/// Reads the options of the next turn.
fn turn_options(fields: &Fields, tools: ToolSet, usual: ReasoningDefaults) -> Result<TurnOptions, ApiError> {
    let reasoning_budget = budget(fields)?.unwrap_or(usual.budget);
    // With a budget of 0 the template disables reasoning.
    let thinks = usual.enable_thinking.filter(|_| reasoning_budget != Some(0));
    Ok(TurnOptions {
        tools,
        reasoning_budget,
        variables: fields.get("chat_template_kwargs", "an object")?.unwrap_or_default(),
        reasoning_effort: fields.get("reasoning_effort", "a text")?,
        enable_thinking: fields.get("enable_thinking", "true or false")?.or(thinks),
        continue_final_message: fields.get("continue_final_message", "true or false")?,
        add_generation_prompt: fields.get("add_generation_prompt", "true or false")?,
        parallel_tool_calls: fields.get("parallel_tool_calls", "true or false")?,
        keeps_reasoning: fields.get::<String>("reasoning_format", "a text")?.as_deref() == Some("none"),
    })
}

/// Returns the reasoning budget of a request, under the names of llama.cpp and vLLM; `Some(None)`
/// means unlimited.
fn budget(fields: &Fields) -> Result<Option<Option<usize>>, ApiError> {
    const NAMES: [&str; 3] = ["thinking_budget_tokens", "reasoning_budget_tokens", "thinking_token_budget"];
    let budget: Option<i64> = fields.any(&NAMES, "a whole number")?;
    Ok(budget.map(|budget| usize::try_from(budget).ok()))
}

/// Returns the callable tools of a request.
fn offered(fields: &Fields) -> Result<ToolSet, ApiError> {
    let mut all: Vec<Value> = fields.get("tools", "a list of tools")?.unwrap_or_default();
    let choice = match fields.value("tool_choice") {
        None => ToolChoice::Auto,
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
                None | Some("auto") => ToolChoice::Auto,
                Some("required") => ToolChoice::Required,
                Some(other) => return Err(ApiError::field("tool_choice", "mode auto or required", other)),
            }
        }
        Some(given) => ToolChoice::from_json(given)?,
    };
    Ok(ToolSet::new(all, &choice)?)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_allowed_tools_are_offered() {
        let tool = |name: &str| json!({ "type": "function", "function": { "name": name } });
        let body = |choice: Value| json!({ "messages": [{ "role": "user", "content": "x" }], "tools": [tool("a"), tool("b")], "tool_choice": choice });
        let nested =
            json!({ "type": "allowed_tools", "allowed_tools": { "mode": "required", "tools": [tool("b")] } });
        let flat = json!({ "type": "allowed_tools", "mode": "auto", "tools": [{ "type": "function", "name": "b" }] });
        for (choice, want) in [(nested, ToolChoice::Required), (flat, ToolChoice::Auto)] {
            let fields = Fields::new(body(choice).as_object().unwrap().clone());
            assert_eq!(offered(&fields).unwrap(), ToolSet::new(vec![tool("b")], &want).unwrap());
        }
    }
}
