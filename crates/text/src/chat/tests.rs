//! Templates rendered as Jinja2 renders them, and hostile inputs.

use std::path::PathBuf;

use serde_json::{Value as Json, json};

use super::*;
use crate::tokenizer::{TokenizerModel, VocabData};

/// An empty conversation.
const NO_MESSAGES: &[Message] = &[];

/// Outputs of `transformers` for every shared template: see `tools/reference/chat_templates.py`.
const GOLDEN: &str = include_str!("../../tests/fixtures/chat_templates.json");

/// The time at which the golden outputs were generated: 2026-01-02, 15:04:05.
const THEN: Option<i64> = Some(1_767_366_245);

/// Parses the messages and options of a golden case.
fn case(json: &Json) -> (Vec<Message>, RenderOptions) {
    let messages = json["messages"].as_array().unwrap().iter();
    let text = |m: &Json, key: &str| m[key].as_str().unwrap().to_owned();
    let messages = messages.map(|m| Message::new(text(m, "role"), text(m, "content"))).collect();
    let mut extra = json.as_object().unwrap().clone();
    extra.retain(|key, _| !["messages", "tools", "add_generation_prompt"].contains(&key.as_str()));
    let options = RenderOptions {
        add_generation_prompt: json["add_generation_prompt"].as_bool().unwrap(),
        tools: json.get("tools").cloned(),
        extra,
        now: THEN,
        ..RenderOptions::default()
    };
    (messages, options)
}

#[test]
fn every_template_renders_as_transformers_does() {
    let dir = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/assets/templates"));
    if !dir.is_dir() {
        return eprintln!("skipped: {} is not there", dir.display());
    }
    let golden: Json = serde_json::from_str(GOLDEN).unwrap();
    let mut wrong = Vec::new();
    for (name, want) in golden["templates"].as_object().unwrap() {
        let source = std::fs::read_to_string(dir.join(name)).unwrap();
        let template = ChatTemplate::new(&source, "<BOS>", "<EOS>").unwrap();
        let mut row = String::new();
        for (case_name, setup) in golden["cases"].as_object().unwrap() {
            let (messages, options) = case(setup);
            let got = template.render(&messages, &options);
            let want = &want[case_name];
            let text = want["lenient"].as_str().or(want["text"].as_str());
            let same = match (&got, text, want["error"].as_str()) {
                // Firefunction's server defines this variable, and so does Kvant.
                (Ok(_), None, Some(want)) => want == "UndefinedError: 'functions' is undefined",
                (Ok(got), Some(want), _) => got.as_str() == want,
                // The template's own message, or a failure of its code.
                (Err(TemplateError::Refused(words)), None, Some(want)) => {
                    want.strip_prefix("TemplateError: ") == Some(words.as_str())
                }
                (Err(TemplateError::Render { .. } | TemplateError::Limit { .. }), None, Some(want)) => {
                    !want.starts_with("TemplateError") && one_line(&got)
                }
                _ => false,
            };
            let word = got
                .as_ref()
                .map_or_else(|e| format!("error ({e})"), |t| format!("{} bytes", t.as_str().len()));
            row += &format!(" {case_name}: {word}{};", if same { "" } else { " WRONG" });
            if !same {
                wrong.push(format!("{name}, {case_name}:\n got {got:?}\nwant {want:?}"));
            }
        }
        eprintln!("{name}:{row}");
    }
    assert!(wrong.is_empty(), "{} differ:\n{}", wrong.len(), wrong.join("\n"));
}

/// Whether the result is a success or an error that displays as one line.
fn one_line<T>(result: &Result<T, TemplateError>) -> bool {
    result.as_ref().err().is_none_or(|e| e.to_string().lines().count() == 1)
}

/// Renders `source` on one user message `Hi`.
fn render(source: &str) -> Result<String, TemplateError> {
    let options = RenderOptions { add_generation_prompt: true, now: THEN, ..Default::default() };
    let rendered = ChatTemplate::new(source, "<s>", "</s>")?.render(&[Message::user("Hi")], &options);
    rendered.map(|rendered| rendered.to_string())
}

#[test]
fn the_environment_is_that_of_transformers() {
    let cases = [
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", "<s>Hi</s>"),
        // Trimmed blocks, and one newline less at the end.
        ("  {% if true %}\nyes\n  {% endif %}\nend\n", "yes\nend"),
        ("{% generation %}a{% endgeneration %}{%- generation -%} b {%- endgeneration -%}", "ab"),
        (
            "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% elif i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}",
            "02",
        ),
        (
            "{% set ns = namespace(n=1) %}{% for _ in 'ab' %}{% set ns.n = ns.n * 2 %}{% endfor %}{{ ns.n }}",
            "4",
        ),
        ("{{ strftime_now('%d %b %Y') }}", "02 Jan 2026"),
        ("{{ ' x '.strip() + 'a-b'.split('-')[1] + {'k': 'v'}.get('k') }}", "xbv"),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}", "a1"),
        ("{{ [true, none, 'it\\'s', 1.0, {'a': 'b'}] }}", "[True, None, \"it's\", 1.0, {'a': 'b'}]"),
        ("{{ (not true) | string }}{{ nothing }}{{ tools is none }}", "FalseTrue"),
        ("{{ messages[-1]['content'][::-1] }}", "iH"),
        (
            "{{ none is iterable }}{{ 'a' is sequence }}{{ {} is sequence }}{{ 1 is sequence }}",
            "FalseTrueTrueFalse",
        ),
    ];
    for (source, want) in cases {
        assert_eq!(render(source).unwrap(), want, "{source}");
    }
}

#[test]
fn tojson_is_pythons() {
    let tools = json!([{"b": "<é & '\"🚀>", "a": [1, 2.5, true, null, {}, []]}]);
    let show = |filter: &str| {
        let template = ChatTemplate::new(&format!("{{{{ tools[0] | {filter} }}}}"), "", "").unwrap();
        let options = RenderOptions { tools: Some(tools.clone()), ..Default::default() };
        template.render(NO_MESSAGES, &options).unwrap().to_string()
    };
    let plain = r#"{"b": "<é & '\"🚀>", "a": [1, 2.5, true, null, {}, []]}"#;
    assert_eq!(show("tojson"), plain);
    assert_eq!(show("tojson(ensure_ascii=False)"), plain);
    assert_eq!(
        show("tojson(ensure_ascii=true)"),
        r#"{"b": "<\u00e9 & '\"\ud83d\ude80>", "a": [1, 2.5, true, null, {}, []]}"#
    );
    assert_eq!(
        show("tojson(separators=(',', ':'), sort_keys=true)"),
        r#"{"a":[1,2.5,true,null,{},[]],"b":"<é & '\"🚀>"}"#
    );
    assert_eq!(
        show("tojson(indent=2)"),
        "{\n  \"b\": \"<é & '\\\"🚀>\",\n  \"a\": [\n    1,\n    2.5,\n    true,\n    null,\n    {},\n    []\n  ]\n}"
    );
}

#[test]
fn refusals_and_failures_are_one_line_each() {
    let err = render("{{ raise_exception('No system\n role') }}").unwrap_err();
    assert!(matches!(&err, TemplateError::Refused(words) if words == "No system role"), "{err:?}");
    let cases = [
        ("{% if %}", "does not parse at line 1"),
        ("\n{{ missing.field }}", "failed at line 2"),
        ("{{ undefined_function() }}", "failed at line 1"),
        ("{{ tojson | nofilter }}", "nofilter"),
        ("{% include 'secrets' %}", "does not parse at line 1"),
        ("{{ missing | tojson }}", "undefined"),
    ];
    for (source, want) in cases {
        let got = render(source);
        let err = got.as_ref().expect_err(source).to_string();
        assert!(err.contains(want) && one_line(&got), "{source}: {err}");
    }
}

/// Builds a file with the tokens `tokens` and an optional `template`.
fn file(tokens: &[&str], template: Option<&str>) -> (Gguf, Tokenizer) {
    let mut writer = kvant_gguf::GgufWriter::new();
    if let Some(template) = template {
        writer.set("tokenizer.chat_template", template).unwrap();
    }
    let mut bytes = std::io::Cursor::new(Vec::new());
    writer.write_to(&mut bytes, |_| Ok::<(), kvant_gguf::GgufError>(())).unwrap();
    let mut data = VocabData::new(TokenizerModel::Gpt2, tokens.iter().map(|t| (*t).to_owned()).collect());
    data.merges = Some(Vec::new());
    data.special.bos = Some(0);
    (Gguf::from_bytes(bytes.into_inner()).unwrap(), Tokenizer::new(data).unwrap())
}

#[test]
fn chatml_is_the_fallback_if_the_vocabulary_has_its_tokens() {
    let (gguf, tokenizer) = file(&["<BOS>", "<|im_start|>", "<|im_end|>"], None);
    let options = RenderOptions { add_generation_prompt: true, ..Default::default() };
    let text = ChatTemplate::from_gguf(&gguf, &tokenizer).unwrap();
    let text = text.render(&[Message::system("S"), Message::user("U")], &options).unwrap();
    let want = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(text.as_str(), want);
    let (gguf, tokenizer) = file(&["a"], None);
    assert!(matches!(ChatTemplate::from_gguf(&gguf, &tokenizer), Err(TemplateError::Missing)));
    let (gguf, tokenizer) = file(&["<BOS>", "<|im_start|>"], Some("{{ bos_token }}{{ eos_token }}"));
    let template = ChatTemplate::from_gguf(&gguf, &tokenizer).unwrap();
    assert_eq!(template.render(NO_MESSAGES, &options).unwrap().as_str(), "<BOS>");
}

#[test]
fn the_name_of_a_builtin_template_selects_it() {
    let (gguf, tokenizer) = file(&["<BOS>"], Some("rwkv-world"));
    let template = ChatTemplate::from_gguf(&gguf, &tokenizer).unwrap();
    assert_eq!(template.source(), builtin("rwkv-world").unwrap());
    // As llama.cpp's template renders in `transformers`.
    let golden: Json = serde_json::from_str(GOLDEN).unwrap();
    let want = &golden["templates"]["llama-cpp-rwkv-world.jinja"];
    for (name, setup) in golden["cases"].as_object().unwrap() {
        let (messages, options) = case(setup);
        assert_eq!(template.render(&messages, &options).unwrap().as_str(), want[name]["text"], "{name}");
    }
    let messages = json!([
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": null},
        {"role": "assistant", "content": "<think>1</think> 2 </think>\nA\n"},
        {"role": "system", "content": "S"},
    ]);
    let mut options = RenderOptions { add_generation_prompt: true, ..Default::default() };
    options.extra.insert("enable_thinking".to_owned(), json!(true));
    let text = template.render(messages.as_array().unwrap(), &options).unwrap();
    let want = "<BOS>System: S\n\nUser: U\n\nAssistant: A\n\nAssistant: <think>";
    assert_eq!(text.as_str(), want);
}

#[test]
fn conversations_with_tools_use_the_tool_use_template() {
    let with = |others: &[(&str, &str)]| {
        let mut writer = kvant_gguf::GgufWriter::new();
        for (key, template) in others {
            writer.set(&format!("tokenizer.chat_template{key}"), *template).unwrap();
        }
        let mut bytes = std::io::Cursor::new(Vec::new());
        writer.write_to(&mut bytes, |_| Ok::<(), kvant_gguf::GgufError>(())).unwrap();
        let (_, tokenizer) = file(&["<BOS>"], None);
        ChatTemplate::from_gguf(&Gguf::from_bytes(bytes.into_inner()).unwrap(), &tokenizer)
    };
    let render = |template: &ChatTemplate, tools: Option<Json>| {
        let options = RenderOptions { tools, ..RenderOptions::default() };
        template.render(&[Message::user("x")], &options).map(|text| text.to_string())
    };
    let tools = || Some(json!([{ "type": "function" }]));
    let both =
        with(&[("", "usual"), (".tool_use", "{{ bos_token }}{{ tools | length }}"), (".rag", "{%")]).unwrap();
    assert_eq!(render(&both, None).unwrap(), "usual");
    assert_eq!(render(&both, Some(json!([]))).unwrap(), "usual");
    assert_eq!(render(&both, tools()).unwrap(), "<BOS>1");
    assert_eq!(both.for_tools(true).unwrap().source(), "{{ bos_token }}{{ tools | length }}");
    assert_eq!((both.source(), both.for_tools(false).unwrap().source()), ("usual", "usual"));
    // Conversations with images select the same template.
    let options = RenderOptions { tools: tools(), ..RenderOptions::default() };
    let messages = [json!({ "role": "user", "content": "x" })];
    let text = both.render_media(&messages, &options, MediaMarks::default()).unwrap().whole;
    assert_eq!(text.as_str(), "<BOS>1");
    let alone = with(&[(".tool_use", "tools")]).unwrap();
    assert_eq!(
        (render(&alone, None).unwrap(), render(&alone, tools()).unwrap()),
        ("tools".into(), "tools".into())
    );
    // A syntax error of the tool template surfaces only when it is used.
    let bad = with(&[("", "usual"), (".tool_use", "{%")]).unwrap();
    assert_eq!(render(&bad, None).unwrap(), "usual");
    assert!(matches!(render(&bad, tools()), Err(TemplateError::Syntax { .. })));
}

/// Texts of control tokens of several model families.
const MARKS: [&str; 14] = [
    "<|im_start|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "<|end|>",
    "<|user|>",
    "<|assistant|>",
];

/// A byte-level vocabulary in which [`MARKS`] are control tokens and `<tool>` is user-defined.
fn marks() -> Tokenizer {
    let alphabet = (33u32..=126).chain(161..=172).chain(174..=255).chain(256..324);
    let mut tokens: Vec<String> = alphabet.filter_map(char::from_u32).map(String::from).collect();
    let n_bytes = tokens.len();
    tokens.extend(MARKS.map(str::to_owned));
    tokens.push("<tool>".to_owned());
    let mut types = vec![1; n_bytes];
    types.extend([3; MARKS.len()]);
    types.push(4);
    let mut data = VocabData::new(TokenizerModel::Gpt2, tokens);
    (data.merges, data.token_types) = (Some(Vec::new()), Some(types));
    (data.special.bos, data.special.eos) = (Some(n_bytes as u32 + 7), Some(n_bytes as u32 + 8));
    Tokenizer::new(data).unwrap()
}

/// Returns the control tokens of a conversation whose messages all contain `text`, or `None` if the
/// template rejects it.
fn control_tokens(template: &ChatTemplate, tokenizer: &Tokenizer, text: &str) -> Option<Vec<u32>> {
    let messages =
        [Message::system(text), Message::user(text), Message::assistant(text), Message::user(text)];
    let tools = json!([{"type": "function", "function": {
        "name": text, "description": text, "parameters": {"type": "object", "properties": {text: {"type": "string"}}},
    }}]);
    let with_tools =
        RenderOptions { add_generation_prompt: true, tools: Some(tools), now: THEN, ..Default::default() };
    let plain = RenderOptions { tools: None, ..with_tools.clone() };
    // Some formats support no tools, and some no system message.
    let ways = [(&messages[..], &with_tools), (&messages[..], &plain), (&messages[1..], &plain)];
    let rendered = ways.into_iter().find_map(|(m, options)| template.render(m, options).ok())?;
    let ids = tokenizer.encode(rendered.as_str(), rendered.special(), true).unwrap();
    Some(
        ids.into_iter()
            .filter(|&id| tokenizer.kind(id) == Some(crate::tokenizer::TokenKind::Control))
            .collect(),
    )
}

#[test]
fn message_text_never_becomes_a_control_token() {
    let tokenizer = marks();
    let mut sources: Vec<(String, String)> =
        BUILTIN.map(|(name, source)| (name.to_owned(), source.to_owned())).into();
    let dir = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/assets/templates"));
    match std::fs::read_dir(&dir) {
        Ok(files) => sources.extend(files.map(|file| file.unwrap().path()).filter_map(|path| {
            let name = path.file_name()?.to_str()?.strip_suffix(".jinja")?.to_owned();
            Some((name, std::fs::read_to_string(path).ok()?))
        })),
        Err(_) => eprintln!("skipped: {} is not there", dir.display()),
    }
    let mut n_rendered = 0;
    for (name, source) in &sources {
        let template = ChatTemplate::for_tokenizer(source, &tokenizer).unwrap();
        let Some(want) = control_tokens(&template, &tokenizer, "word") else { continue };
        n_rendered += 1;
        let all = MARKS.concat();
        let halves: Vec<&str> = MARKS.iter().flat_map(|mark| <[&str; 2]>::from(mark.split_at(2))).collect();
        for text in MARKS
            .iter()
            .copied()
            .chain([all.as_str(), "<|im_", "end|>", "<|", "|>", "[", "INST]"])
            .chain(halves)
        {
            let got = control_tokens(&template, &tokenizer, text);
            assert_eq!(got.as_ref(), Some(&want), "{name}: {text:?}");
        }
    }
    assert!(n_rendered >= BUILTIN.len(), "only {n_rendered} of {} formats render", sources.len());
}

#[test]
fn user_defined_tokens_are_parsed_in_message_text() {
    let tokenizer = marks();
    let template = ChatTemplate::for_tokenizer(builtin("chatml").unwrap(), &tokenizer).unwrap();
    let rendered = template.render(&[Message::user("a<tool>\u{e000}«»")], &RenderOptions::default()).unwrap();
    let ids = tokenizer.encode(rendered.as_str(), rendered.special(), false).unwrap();
    let id = |text| tokenizer.token_id(text).unwrap();
    assert_eq!(ids.iter().filter(|&&i| i == id("<tool>")).count(), 1);
    assert_eq!(
        (ids.first(), ids.iter().filter(|&&i| i == id("<|im_end|>")).count()),
        (Some(&id("<|im_start|>")), 1)
    );
    // Everything but the control tokens is tokenized as one text: the tokens match those of trusted
    // text.
    assert_eq!(ids, tokenizer.encode(rendered.as_str(), Special::Parse, false).unwrap());
}

#[test]
fn text_after_a_mark_keeps_its_trusted_ranges() {
    let tokenizer = marks();
    let template = ChatTemplate::for_tokenizer(builtin("chatml").unwrap(), &tokenizer).unwrap();
    let messages = [Message::assistant("MARK"), Message::user("<|im_end|>MARK<|im_end|>")];
    let rest = template.render(&messages, &RenderOptions::default()).unwrap().after("MARK").unwrap();
    assert_eq!(rest.as_str(), "<|im_end|>\n<|im_start|>user\n<|im_end|>MARK<|im_end|><|im_end|>\n");
    let ids = tokenizer.encode(rest.as_str(), rest.special(), false).unwrap();
    let end = tokenizer.token_id("<|im_end|>").unwrap();
    let n_ends = |ids: &[u32]| ids.iter().filter(|&&id| id == end).count();
    assert_eq!(n_ends(&ids), 2);
    assert!(rest.after("NONE").is_none());
    let more = rest.surrounded("<|im_end|>", "<|im_end|>");
    assert_eq!(more.as_str(), format!("<|im_end|>{rest}<|im_end|>"));
    assert_eq!(n_ends(&tokenizer.encode(more.as_str(), more.special(), false).unwrap()), 4);
    assert_eq!(rest.surrounded("", ""), rest);
}

#[test]
fn a_final_message_is_continued_directly_after_its_text() {
    let source = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
    let options = RenderOptions { continue_final_message: true, ..RenderOptions::default() };
    let render = |source: &str, answer: &str| {
        let template = ChatTemplate::new(source, "", "").unwrap();
        let messages = [Message::user("Yes"), Message::assistant(answer)];
        template.render(&messages, &options).map(|rendered| rendered.to_string())
    };
    for (answer, want) in
        [("Yes", "<user>Yes</><assistant>Yes"), (" So it\n", "<user>Yes</><assistant>So it")]
    {
        assert_eq!(render(source, answer).unwrap(), want);
    }
    // Trailing whitespace stays if the template preserves it.
    assert_eq!(render(&source.replace(" | trim", ""), "Yes, ").unwrap(), "<user>Yes</><assistant>Yes, ");
    let drops = "{% for m in messages %}{{ m.role }}{% endfor %}";
    assert_eq!(render(drops, "So"), Err(TemplateError::FinalMessage));
}
