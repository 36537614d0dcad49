//! Untrusted chat templates.

use std::io;
use std::path::Path;

use crate::case::Case;
use crate::chance::Choices;
use crate::fixtures::Fixtures;

/// Pieces of templates, `@` for another piece.
const PIECES: [&str; 30] = [
    "{% for m in messages %}@{% endfor %}",
    "{% for i in range(1000000000) %}@{% endfor %}",
    "{% for i in range(1000) %}{% for j in range(1000) %}@{% endfor %}{% endfor %}",
    "{% if @ %}@{% else %}@{% endif %}",
    "{% set x = messages %}@",
    "{% set ns = namespace(t='ab') %}{% for i in range(64) %}{% set ns.t = ns.t ~ ns.t %}{% endfor %}{{ ns.t }}",
    "{% macro f(a) %}{{ f(a) }}{% endmacro %}{{ f(1) }}",
    "{% macro f(a) %}@{{ f(a ~ a) if a|length < 100000000 }}{% endmacro %}{{ f('x') }}",
    "{{ '' ~ 'x' * 99999999999 }}",
    "{{ 'x'|indent(10000000000) }}",
    "{{ range(0, 9223372036854775807)|list|length }}",
    "{{ messages[0].content[::-1] }}",
    "{{ messages[-9223372036854775808] }}",
    "{{ messages[0]['content'].split('')|join('@') }}",
    "{{ 1 / 0 }}{{ 1 // 0 }}{{ 1 % 0 }}",
    "{{ 9 ** 9 ** 9 ** 9 }}",
    "{{ (-9223372036854775807 - 1) // -1 }}",
    "{{ '%s' % messages }}",
    "{{ messages|tojson(indent=999999999) }}",
    "{{ strftime_now('%Y%n%t%Q%9999999999d') }}",
    "{{ raise_exception('a\\nerror: b\\x1b[2J') }}",
    "{{ messages|map(attribute='content')|join('<|im_end|>') }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.content.x.y.z }}",
    "{% raw %}@{% endraw %}",
    "{% async %}",
    "{%- endfor -%}",
    "{# @",
    "{{ @ }}",
    "\u{0}\u{202e}<|im_start|>system",
];

/// Pieces that nest indefinitely.
const NESTED: [(&str, &str); 8] = [
    ("[", "]"),
    ("(", ")"),
    ("not ", ""),
    ("1+", ""),
    ("-", ""),
    ("{% if 1 %}", "{% endif %}"),
    ("'a'~", ""),
    ("x[", "]"),
];

/// Creates a template from pieces, or by changing the model's; the message is harmless.
pub fn template(chance: &mut Choices, fixtures: &Fixtures, folder: &Path) -> io::Result<Case> {
    let own = fixtures.gguf.meta().get::<&str>("tokenizer.chat_template").unwrap_or_default();
    let bytes = match chance.below(5) {
        0 => nested(chance).into_bytes(),
        1 => {
            let mut bytes = own.as_bytes().to_vec();
            let until = bytes.len();
            chance.mutate(&mut bytes, until);
            bytes
        }
        2 => [own, &grown(chance, 0)].concat().into_bytes(),
        _ => grown(chance, 0).into_bytes(),
    };
    let run = ["run", "-n", "1", "-t", "1", "-c", "256", "--chat-template", "template"];
    let case = match chance.below(4) {
        0 => {
            let chat = ["chat", "-n", "1", "-t", "1", "--chat-template", "template"];
            Case::new(folder, chat).reads("hi\n/regenerate\n").conversation()
        }
        1 => Case::new(folder, run).and(["--system-prompt", "be brief", "-p", "hi"]),
        _ => Case::new(folder, run).and(["-p", "hi"]),
    };
    case.file("template", bytes)
}

fn nested(chance: &mut Choices) -> String {
    let (open, close) = chance.of(&NESTED);
    let n = chance.of(&[10, 100, 1000, 100_000]);
    let middle = format!("{}1{}", open.repeat(n), close.repeat(n));
    match open.starts_with('{') {
        true => middle,
        false => format!("{{{{ {middle} }}}}"),
    }
}

fn grown(chance: &mut Choices, depth: usize) -> String {
    let piece = chance.of(&PIECES);
    let mut parts = piece.split('@');
    let mut text = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let inner = if depth < 3 { grown(chance, depth + 1) } else { "1".to_owned() };
        text = text + &inner + part;
    }
    text
}
