//! Claims about rendered conversations.

use std::path::Path;

use serde_json::json;

use super::*;

fn rendered(source: &str, messages: &Value, options: TurnOptions) -> Result<String, String> {
    let template = ChatTemplate::new(source, "<s>", "</s>").map_err(|error| error.to_string())?;
    let messages = messages.as_array().unwrap().clone();
    let conversation = Conversation::new(messages, options, &template).map_err(|error| error.to_string())?;
    let render = |messages: &[Value], options: &RenderOptions| template.render(messages, options);
    Ok(conversation.render(render).map_err(|error| error.to_string())?.to_string())
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
        let tool = json!({ "type": "function", "function": { "name": "weather", "description": "The weather", "parameters": parameters } });
        let tools = ToolSet::new(vec![tool], &ToolChoice::Auto).unwrap();
        let options = TurnOptions { tools, ..TurnOptions::default() };
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
            let expected = if messages.as_array().unwrap().len() > 1 { "Rain." } else { "How is it?" };
            match rendered(&source, &messages, options.clone()) {
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
    let options = |continues, opens| TurnOptions {
        continue_final_message: continues,
        add_generation_prompt: opens,
        ..TurnOptions::default()
    };
    for (continues, opens, want) in [
        (None, None, "<user>Count.</><assistant>1, 2,"),
        (Some(true), None, "<user>Count.</><assistant>1, 2,"),
        (Some(false), None, "<user>Count.</><assistant>1, 2,</><assistant>"),
        (None, Some(true), "<user>Count.</><assistant>1, 2,</><assistant>"),
        (None, Some(false), "<user>Count.</><assistant>1, 2,</>"),
    ] {
        let text = rendered(source, &messages, options(continues, opens)).unwrap();
        assert_eq!(text, want, "{continues:?} {opens:?}");
    }
    let error = rendered(source, &json!([messages[0]]), options(Some(true), None)).unwrap_err();
    assert!(error.contains("continue_final_message"), "{error}");
}

#[test]
fn reasoning_options_become_template_variables() {
    let variables = |options: TurnOptions| Value::from(options.variables()).to_string();
    let none = TurnOptions::default;
    let effort = |effort: &str| Some(effort.to_owned());
    for (options, want) in [
        (none(), json!({})),
        (TurnOptions { enable_thinking: Some(true), ..none() }, json!({ "enable_thinking": true })),
        (TurnOptions { reasoning_budget: Some(0), ..none() }, json!({ "enable_thinking": false })),
        (TurnOptions { reasoning_budget: Some(8), ..none() }, json!({})),
        (TurnOptions { reasoning_effort: effort("low"), ..none() }, json!({ "reasoning_effort": "low" })),
        (TurnOptions { reasoning_effort: effort("none"), ..none() }, json!({ "enable_thinking": false })),
        (
            TurnOptions { reasoning_budget: Some(0), enable_thinking: Some(true), ..none() },
            json!({ "enable_thinking": true }),
        ),
    ] {
        assert_eq!(variables(options.clone()), want.to_string(), "{options:?}");
    }
}

#[test]
fn invalid_messages_are_rejected_with_one_line() {
    for (messages, line) in [
        (json!([]), "messages: expected at least one message, got none"),
        (json!([{ "content": "x" }]), "messages: expected a role in every message"),
        (json!(["x"]), "messages: expected a list of messages, got \"x\""),
    ] {
        let error = rendered("tools", &messages, TurnOptions::default()).unwrap_err();
        assert!(error.starts_with(line), "{error}");
    }
}
