//! Tools of a turn: which of them the model may call, and whether it must.

use std::str::FromStr;

use serde_json::{Value, json};

use super::InvalidConversation;
use crate::output_parser::tool_calls::Tool;

/// Tool choice of a turn.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum ToolChoice {
    /// The model may call any tool.
    #[default]
    Auto,
    /// The prompt describes no tool.
    None,
    /// The model must call a tool.
    Required,
    /// The model must call the tool of this name.
    Tool(String),
}

impl ToolChoice {
    const EXPECTED: &str = "none, auto, required, or a function's name";

    /// Returns the choice of this name in OpenAI's API: `none`, `auto`, `required` or `any`.
    ///
    /// # Errors
    /// Another name.
    pub fn named(name: &str) -> Result<Self, InvalidConversation> {
        match name {
            "none" => Ok(Self::None),
            "auto" => Ok(Self::Auto),
            "required" | "any" => Ok(Self::Required),
            other => Err(InvalidConversation::new("tool_choice", Self::EXPECTED, other)),
        }
    }

    /// Returns the choice in the notation of OpenAI's API: a name as in [`ToolChoice::named`], or
    /// an object with the name of a function.
    ///
    /// # Errors
    /// Another value.
    pub fn from_json(choice: &Value) -> Result<Self, InvalidConversation> {
        if let Value::String(name) = choice {
            return Self::named(name);
        }
        let name = choice["function"]["name"].as_str().or(choice["name"].as_str());
        let name = name.ok_or_else(|| InvalidConversation::new("tool_choice", Self::EXPECTED, choice))?;
        Ok(Self::Tool(name.to_owned()))
    }
}

/// Parses a name as in [`ToolChoice::named`], or the JSON text of an object as in
/// [`ToolChoice::from_json`].
impl FromStr for ToolChoice {
    type Err = InvalidConversation;

    fn from_str(choice: &str) -> Result<Self, InvalidConversation> {
        match serde_json::from_str(choice) {
            Ok(choice @ Value::Object(_)) => Self::from_json(&choice),
            _ => Self::named(choice),
        }
    }
}

/// Callable tools of a turn.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ToolSet {
    /// Descriptions for the template.
    pub(super) described: Vec<Value>,
    /// Names and parameters.
    pub(super) tools: Vec<Tool>,
    pub(super) is_required: bool,
}

impl ToolSet {
    /// Returns the tools that `choice` leaves of these descriptions, in the notation of OpenAI's
    /// API: `{"type": "function", "function": {"name": .., "description": .., "parameters": ..}}`.
    ///
    /// # Errors
    /// A description without a name; a choice that no tool fits.
    pub fn new(mut described: Vec<Value>, choice: &ToolChoice) -> Result<Self, InvalidConversation> {
        let is_required = matches!(choice, ToolChoice::Required | ToolChoice::Tool(_));
        match choice {
            ToolChoice::None => return Ok(Self::default()),
            ToolChoice::Tool(name) => {
                described.retain(|tool| tool["function"]["name"] == **name);
                if described.is_empty() {
                    return Err(InvalidConversation::new("tool_choice", "one of the tools", name));
                }
            }
            ToolChoice::Auto | ToolChoice::Required => {}
        }
        if described.is_empty() && is_required {
            let expected = "at least one tool where one is to be called";
            return Err(InvalidConversation::new("tools", expected, "none"));
        }
        let tools = described.iter().map(tool).collect::<Result<_, _>>()?;
        Ok(Self { described, tools, is_required })
    }

    /// Works as [`ToolSet::new`], from the JSON text of a list of descriptions.
    ///
    /// # Errors
    /// As there, and a text that is no list.
    pub fn from_json(described: &str, choice: &ToolChoice) -> Result<Self, InvalidConversation> {
        Self::new(super::list("tools", "a JSON list of tools", described)?, choice)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.tools.is_empty()
    }
}

fn tool(described: &Value) -> Result<Tool, InvalidConversation> {
    let function = &described["function"];
    let name = function["name"].as_str().filter(|name| !name.is_empty());
    let expected = "functions that have a name";
    let name = name.ok_or_else(|| InvalidConversation::new("tools", expected, described))?;
    let any = || json!({ "type": "object" });
    let parameters = function.get("parameters").filter(|schema| schema.is_object()).cloned();
    Ok(Tool { name: name.to_owned(), parameters: parameters.unwrap_or_else(any) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_leaves_the_tools_that_fit_it() {
        let tool = |name: &str| json!({ "type": "function", "function": { "name": name } });
        let of = |choice: &Value| {
            let choice = ToolChoice::from_json(choice)?;
            let set = ToolSet::new(vec![tool("a"), tool("b")], &choice)?;
            let names = set.tools.into_iter().map(|tool| tool.name).collect::<String>();
            Ok::<_, InvalidConversation>((names, set.is_required))
        };
        for (choice, names, is_required) in [
            (json!("none"), "", false),
            (json!("auto"), "ab", false),
            (json!("any"), "ab", true),
            (json!({ "type": "function", "function": { "name": "b" } }), "b", true),
            (json!({ "type": "function", "name": "a" }), "a", true),
        ] {
            assert_eq!(of(&choice).unwrap(), (names.to_owned(), is_required), "{choice}");
        }
        for choice in [json!("b"), json!({ "name": "c" }), json!(3)] {
            assert!(of(&choice).unwrap_err().to_string().starts_with("tool_choice: expected"), "{choice}");
        }
        assert_eq!(r#"{"name": "a"}"#.parse(), Ok(ToolChoice::Tool("a".to_owned())));
        assert_eq!("required".parse(), Ok(ToolChoice::Required));
        let error = ToolSet::new(Vec::new(), &ToolChoice::Required).unwrap_err();
        assert_eq!(
            error.to_string(),
            "tools: expected at least one tool where one is to be called, got none"
        );
        let error = ToolSet::new(vec![json!({ "name": "a" })], &ToolChoice::Auto).unwrap_err();
        assert!(error.to_string().starts_with("tools: expected functions that have a name"), "{error}");
    }
}
