//! Templates as Jinja2 renders them, and templates that mean harm.

use std::path::PathBuf;

use serde_json::{Value as Json, json};

use super::*;
use crate::tokenizer::{TokenizerModel, VocabData};

/// What `transformers` makes of every shared template: see `tools/reference/chat_templates.py`.
const GOLDEN: &str = include_str!("../../tests/fixtures/chat_templates.json");

/// The time at which the golden texts were made.
fn then() -> DateTime {
    jiff::civil::date(2026, 1, 2).at(15, 4, 5, 0)
}

/// The messages and options of a golden case.
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
            let got = template.render_at(&messages, &options, then());
            let want = &want[case_name];
            let text = want["lenient"].as_str().or(want["text"].as_str());
            let same = match (&got, text, want["error"].as_str()) {
                (Ok(got), Some(want), _) => got == want,
                // The template's own words, or a failure of its code.
                (Err(TemplateError::Refused(words)), None, Some(want)) => {
                    want.strip_prefix("TemplateError: ") == Some(words)
                }
                (Err(TemplateError::Render { .. }), None, Some(want)) => {
                    !want.starts_with("TemplateError") && one_line(&got)
                }
                _ => false,
            };
            let word = got.as_ref().map_or_else(|e| format!("error ({e})"), |t| format!("{} bytes", t.len()));
            row += &format!(" {case_name}: {word}{};", if same { "" } else { " WRONG" });
            if !same {
                wrong.push(format!("{name}, {case_name}:\n got {got:?}\nwant {want:?}"));
            }
        }
        eprintln!("{name}:{row}");
    }
    assert!(wrong.is_empty(), "{} differ:\n{}", wrong.len(), wrong.join("\n"));
}

/// Whether an error, if it is one, reads as one line.
fn one_line(result: &Result<String, TemplateError>) -> bool {
    result.as_ref().err().is_none_or(|e| e.to_string().lines().count() == 1)
}

/// `source` rendered on one user message `Hi`.
fn render(source: &str) -> Result<String, TemplateError> {
    let options = RenderOptions { add_generation_prompt: true, ..Default::default() };
    ChatTemplate::new(source, "<s>", "</s>")?.render_at(&[Message::user("Hi")], &options, then())
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
        template.render(&[], &options).unwrap()
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
        ("{% include 'secrets' %}", "failed"),
        ("{{ missing | tojson }}", "undefined"),
        ("{{ strftime_now('%') }}", "strftime_now"),
    ];
    for (source, want) in cases {
        let got = render(source);
        let err = got.as_ref().expect_err(source).to_string();
        assert!(err.contains(want) && one_line(&got), "{source}: {err}");
    }
}

#[test]
fn hostile_templates_are_stopped() {
    let forever = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}";
    let flood = "{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}";
    let deep = "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}";
    assert!(matches!(render(forever), Err(TemplateError::Limit { limit: MAX_STEPS_TEXT })));
    assert!(matches!(render(flood), Err(TemplateError::Limit { limit: MAX_OUTPUT_TEXT })));
    assert!(matches!(render(deep), Err(TemplateError::Render { .. })));
    let nested = format!("{}{}", "{% if true %}".repeat(2000), "{% endif %}".repeat(2000));
    assert!(render(&nested).is_err() && render(&"{{ [".repeat(5000)).is_err());
    assert!(one_line(&render(&nested)));
}

/// A file with the tokens `tokens`, and `template` if any.
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
fn a_file_without_a_template_speaks_chatml_only_if_its_vocabulary_does() {
    let (gguf, tokenizer) = file(&["<BOS>", "<|im_start|>", "<|im_end|>"], None);
    let options = RenderOptions { add_generation_prompt: true, ..Default::default() };
    let text = ChatTemplate::from_gguf(&gguf, &tokenizer).unwrap();
    let text = text.render(&[Message::system("S"), Message::user("U")], &options).unwrap();
    let want = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(text, want);
    let (gguf, tokenizer) = file(&["a"], None);
    assert!(matches!(ChatTemplate::from_gguf(&gguf, &tokenizer), Err(TemplateError::Missing)));
    let (gguf, tokenizer) = file(&["<BOS>", "<|im_start|>"], Some("{{ bos_token }}{{ eos_token }}"));
    let template = ChatTemplate::from_gguf(&gguf, &tokenizer).unwrap();
    assert_eq!(template.render(&[], &options).unwrap(), "<BOS>");
}
