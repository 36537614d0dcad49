//! Requests to a server: schemas, bodies and headers that crash, block or fill one.

use crate::chance::Choices;
use crate::served::{HOSTILE, post};

/// Beginnings of bodies with a short answer, to which schemas are added.
const CHAT: &str = r#""messages":[{"role":"user","content":"hi"}],"max_tokens":3"#;

/// Creates a request of any kind.
pub fn request(chance: &mut Choices) -> Vec<u8> {
    match chance.below(8) {
        0 | 1 => schema(chance),
        2 | 3 => grammar(chance),
        4 | 5 => values(chance),
        6 => fields(chance),
        _ => head(chance),
    }
}

/// Returns a depth: few levels, many, or enough to overflow a stack.
fn many(chance: &mut Choices, max: usize) -> usize {
    let max = chance.of(&[8, 300, max]);
    1 + chance.below(max)
}

/// Creates a deep, wide or cyclic JSON schema, in each request format.
fn schema(chance: &mut Choices) -> Vec<u8> {
    let n = many(chance, 1500);
    let schema = match chance.below(6) {
        0 => "{\"items\":".repeat(n) + "{}" + &"}".repeat(n),
        1 => format!("{{\"$ref\":\"#/$defs/0\",\"$defs\":{{{}}}}}", links(chance, n)),
        2 => {
            let fields: Vec<_> = (0..n).map(|i| format!("\"f{i}\":{{\"type\":\"string\"}}")).collect();
            format!("{{\"type\":\"object\",\"properties\":{{{}}}}}", fields.join(","))
        }
        3 => format!("{{\"anyOf\":[{}]}}", vec!["{\"type\":\"integer\"}"; n].join(",")),
        4 => format!("{{\"enum\":[{}]}}", (0..n).map(|i| i.to_string()).collect::<Vec<_>>().join(",")),
        _ => format!(
            "{{\"type\":\"string\",\"pattern\":\"({}){{{}}}\"}}",
            "a|b?".repeat(n),
            chance.below(1 << 20)
        ),
    };
    let tool = |schema: &str| {
        format!("{{\"type\":\"function\",\"function\":{{\"name\":\"f\",\"parameters\":{schema}}}}}")
    };
    let (path, body) = match chance.below(6) {
        0 => ("/v1/chat/completions", format!("{{{CHAT},\"guided_json\":{schema}}}")),
        1 => (
            "/v1/chat/completions",
            format!("{{{CHAT},\"tool_choice\":\"required\",\"tools\":[{}]}}", tool(&schema)),
        ),
        2 => ("/v1/chat/completions", format!("{{{CHAT},\"tools\":[{}]}}", tool(&schema))),
        3 => ("/completion", format!("{{\"prompt\":\"hi\",\"n_predict\":3,\"json_schema\":{schema}}}")),
        4 => ("/api/chat", format!("{{{CHAT},\"stream\":false,\"format\":{schema}}}")),
        _ => ("/v1/messages", format!("{{{CHAT},\"tools\":[{{\"name\":\"f\",\"input_schema\":{schema}}}]}}")),
    };
    post(path, HOSTILE, body.as_bytes())
}

/// Creates definitions that each refer to the next, some deeply nested.
fn links(chance: &mut Choices, n: usize) -> String {
    let depth = chance.of(&[0, 1, 40, 110]);
    let link = |i: usize| {
        let next = if i + 1 < n { i + 1 } else { chance.below(n) };
        let (open, close) = ("{\"items\":".repeat(depth), "}".repeat(depth));
        format!("\"{i}\":{open}{{\"$ref\":\"#/$defs/{next}\"}}{close}")
    };
    (0..n).map(link).collect::<Vec<_>>().join(",")
}

/// Creates a grammar of mutually recursive rules, or with many alternatives.
fn grammar(chance: &mut Choices) -> Vec<u8> {
    let n = many(chance, 5000);
    let is_lark = chance.one_in(2);
    let (start, is) = if is_lark { ("start", ": ") } else { ("root", " ::= ") };
    let grammar = match chance.below(5) {
        0 => {
            let rule = |i: usize| format!("r{i}{is}\"a\" r{} | \"b\"\n", (i + 1) % n);
            format!("{start}{is}r0\n") + &(0..n).map(rule).collect::<String>()
        }
        1 => format!("{start}{is}{} | \"c\"\n", vec![format!("\"a\" {start} \"b\""); n].join(" | ")),
        2 => format!("{start}{is}{}\"a\"{}\n", "(".repeat(n), ")*".repeat(n)),
        3 => format!("{start}{is}{start} {start} | \"a\"\n"),
        _ => {
            let mut text = format!("{start}{is}r0\nr0{is}\"a\"\n").into_bytes();
            let until = text.len();
            chance.mutate(&mut text, until);
            String::from_utf8_lossy(&text).into_owned()
        }
    };
    let (path, name) =
        if is_lark { ("/v1/completions", "guided_grammar") } else { ("/completion", "grammar") };
    let text = json(&grammar);
    let body = format!("{{\"prompt\":\"hi\",\"max_tokens\":3,\"n_predict\":3,\"{name}\":{text}}}");
    post(path, HOSTILE, body.as_bytes())
}

/// Escapes a text as JSON.
fn json(text: &str) -> String {
    let escaped = |c: char| match c {
        '"' | '\\' => format!("\\{c}"),
        c if c < ' ' => format!("\\u{:04x}", c as u32),
        c => c.to_string(),
    };
    format!("\"{}\"", text.chars().map(escaped).collect::<String>())
}

/// Creates a body of many small values, or one long text.
fn values(chance: &mut Choices) -> Vec<u8> {
    let n_bytes = chance.of(&[1 << 10, 1 << 16, 1 << 20, 8 << 20, 31 << 20]);
    let of = |one: &str| one.repeat(n_bytes / one.len());
    let path =
        chance.of(&["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/embeddings"]);
    let name = chance.of(&["prompt", "content", "tokens", "messages", "input", "x", "chat_template_kwargs"]);
    let value = match chance.below(8) {
        0 => format!("[{}[0]]", of("[0],")),
        1 => format!("[{}0]", of("0,")),
        2 => format!("[{}{{}}]", of("{\"\":0},")),
        3 => format!("\"{}\"", of(" ")),
        4 => format!("\"{}\"", of("a")),
        5 => format!("\"{}\"", of("\\u0000")),
        6 => of("["),
        _ => format!("\"{}\"", of("\u{301}e")),
    };
    post(path, HOSTILE, format!("{{\"max_tokens\":1,\"{name}\":{value}}}").as_bytes())
}

/// Creates a modified small body.
fn fields(chance: &mut Choices) -> Vec<u8> {
    let number =
        chance.of(&["-1", "1e308", "-1e-308", "9007199254740993", "null", "true", "\"x\"", "[]", "{}"]);
    let field = chance.of(&[
        "temperature",
        "top_p",
        "top_k",
        "n",
        "seed",
        "max_tokens",
        "stop",
        "logit_bias",
        "logprobs",
        "stream",
        "kv_type",
        "kv_policy",
        "repeat_penalty",
        "presence_penalty",
        "lora",
        "cache_prompt",
        "ignore_eos",
        "echo",
        "best_of",
        "user",
    ]);
    let mut body = format!("{{{CHAT},\"prompt\":\"hi\",\"n_predict\":2,\"{field}\":{number}}}").into_bytes();
    if chance.one_in(2) {
        let until = body.len();
        chance.mutate(&mut body, until);
    }
    let path = chance.of(&[
        "/v1/chat/completions",
        "/v1/completions",
        "/completion",
        "/api/chat",
        "/lora-adapters",
        "/infill",
    ]);
    post(path, HOSTILE, &body)
}

/// Creates a modified header, or an endless one.
fn head(chance: &mut Choices) -> Vec<u8> {
    let mut request = post("/v1/completions", HOSTILE, br#"{"prompt":"hi","max_tokens":1}"#);
    match chance.below(4) {
        0 => format!("GET /{} HTTP/1.1\r\nHost: localhost\r\n\r\n", "a".repeat(many(chance, 1 << 20)))
            .into_bytes(),
        1 => {
            let lines: String = (0..many(chance, 5000)).map(|i| format!("X-{i}: {i}\r\n")).collect();
            format!("GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{lines}\r\n")
                .into_bytes()
        }
        2 => {
            let chunk = chance.of(&["ffffffffffffffff", "-1", "0x10", "10;a=b", "7fffffff"]);
            format!("POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {HOSTILE}\r\nTransfer-Encoding: chunked\r\n\r\n{chunk}\r\n{{").into_bytes()
        }
        _ => {
            let until = request.len();
            chance.mutate(&mut request, until);
            request
        }
    }
}
