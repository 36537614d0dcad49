//! Unrolls the loops of a kernel that its constants count.
//!
//! wgpu adds a counter to every loop, so that none is infinite, and drivers may then leave short
//! loops as they are: arrays that such a loop indexes lie in memory instead of registers. So a loop
//! `for (var i = 0u; i < N; i++) {`, N a product of constants, becomes N blocks, each with its own
//! constant `i`. Lines keep their numbers. Kernels of products request it
//! ([`Constants::unrolling`](crate::constants::Constants::unrolling)).

use std::collections::HashMap;

/// Maximum turns of an unrolled loop, and bytes of its text if it has more than one.
const MAX_TURNS: u32 = 16;
const MAX_BYTES: usize = 12 << 10;

/// The values of the constants of a text.
type Values<'a> = HashMap<&'a str, u32>;

/// Returns `text` with its short loops unrolled.
pub(crate) fn unrolled(text: &str) -> String {
    let mut values = Values::new();
    for line in text.lines() {
        let definition = line.strip_prefix("const ").and_then(|line| line.split_once(": u32 = "));
        let Some((name, rest)) = definition else { continue };
        let value = rest.split_once(';').and_then(|(value, _)| product(value, &values));
        values.extend(value.map(|value| (name, value)));
    }
    expand(text, &values)
}

/// Returns the value of a product or quotient of constants.
fn product(text: &str, values: &Values<'_>) -> Option<u32> {
    let mut result = 1u32;
    let mut divides = false;
    for token in text.split_whitespace() {
        match token {
            "*" => divides = false,
            "/" => divides = true,
            _ => {
                let literal = token.strip_suffix('u').and_then(|digits| digits.parse().ok());
                let value = literal.or_else(|| values.get(token).copied())?;
                result = if divides { result.checked_div(value)? } else { result.checked_mul(value)? };
            }
        }
    }
    Some(result)
}

/// Unrolls the loops of a part of the text, inner ones first.
fn expand(text: &str, values: &Values<'_>) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find("for (") {
        let (before, of_loop) = rest.split_at(at);
        out += before;
        let head_len = of_loop.find('{').map_or(of_loop.len(), |at| at + 1);
        let (head, after) = of_loop.split_at(head_len);
        let body_len = body_len(after);
        let body = expand(&after[..body_len], values);
        let turns = turns(head, values).filter(|(_, turns)| {
            let bytes = body.len() * *turns as usize;
            (*turns == 1 || bytes <= MAX_BYTES) && *turns <= MAX_TURNS && !leaves(&after[..body_len])
        });
        match turns {
            Some((name, turns)) => {
                out += &format!("{{ const {name} = 0u;{body}");
                let line = on_one_line(&body);
                (1..turns).for_each(|turn| out += &format!("}} {{ const {name} = {turn}u;{line}"));
            }
            None => {
                out += head;
                out += &body;
            }
        }
        rest = &after[body_len..];
    }
    out + rest
}

/// Returns the counter of a loop with a constant number of turns, and that number, at least one.
fn turns<'a>(head: &'a str, values: &Values<'_>) -> Option<(&'a str, u32)> {
    let (name, rest) = head.strip_prefix("for (var ")?.split_once(" = 0u; ")?;
    let bound = rest.strip_prefix(name)?.strip_prefix(" < ")?;
    let bound = bound.strip_suffix(&format!("; {name}++) {{"))?;
    product(bound, values).filter(|turns| *turns > 0).map(|turns| (name, turns))
}

/// Returns the length of the body of a loop, up to its closing brace.
fn body_len(text: &str) -> usize {
    let mut depth = 0;
    let mut is_comment = false;
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            b'\n' => is_comment = false,
            b'/' if text[at..].starts_with("//") => is_comment = true,
            b'{' if !is_comment => depth += 1,
            b'}' if !is_comment && depth == 0 => return at,
            b'}' if !is_comment => depth -= 1,
            _ => {}
        }
    }
    text.len()
}

/// Returns whether a body ends its loop or a turn of it, not just those of loops within.
fn leaves(body: &str) -> bool {
    let mut own = String::new();
    let mut rest = body;
    while let Some(at) = ["for (", "while ", "loop "].iter().filter_map(|word| rest.find(word)).min() {
        own += &rest[..at];
        let head_len = rest[at..].find('{').map_or(rest.len(), |brace| at + brace + 1);
        rest = &rest[head_len..];
        rest = &rest[body_len(rest)..];
    }
    own += rest;
    let own = on_one_line(&own);
    own.contains("break;") || own.contains("continue;")
}

/// Returns `text` without comments and ends of lines.
fn on_one_line(text: &str) -> String {
    let code = |line: &str| line.split_once("//").map_or(line, |(code, _)| code).trim().to_owned();
    text.lines().map(code).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loops_that_constants_count_become_blocks() {
        let text = "const N: u32 = 3u;\nconst M: u32 = 2u * N / 3u;\nfor (var i = 0u; i < M; i++) {\n  a[i] = 1; // {\n}\nend";
        let want = "const N: u32 = 3u;\nconst M: u32 = 2u * N / 3u;\n{ const i = 0u;\n  a[i] = 1; // {\n} { const i = 1u; a[i] = 1;}\nend";
        assert_eq!(unrolled(text), want);
    }

    #[test]
    fn loops_within_loops_are_unrolled_and_lines_keep_their_numbers() {
        let text =
            "for (var i = 0u; i < p.n; i++) {\n for (var j = 0u; j < 2u; j++) {\n  f(i, j);\n }\n}\nlast";
        let want = "for (var i = 0u; i < p.n; i++) {\n { const j = 0u;\n  f(i, j);\n } { const j = 1u; f(i, j); }\n}\nlast";
        assert_eq!(unrolled(text), want);
        assert_eq!(unrolled(text).lines().position(|line| line == "last"), Some(5));
    }

    #[test]
    fn other_loops_stay() {
        for text in [
            "for (var i = 0u; i < 17u; i++) { a(); }",
            "for (var i = 0u; i < N - 1u; i++) { a(); }",
            "for (var i = 0u; i < 4u; i += 2u) { a(); }",
            "for (var i = 1u; i < 4u; i++) { a(); }",
            "for (var i = 0u; i < 4u; i++) { if a { break; } }",
            "for (var i = 0u; i < 4u; i++) { while b { continue; } if a { continue; } }",
        ] {
            assert_eq!(unrolled(text), text);
        }
        let inner = "for (var i = 0u; i < 1u; i++) { while b { break; } }";
        assert_eq!(unrolled(inner), "{ const i = 0u; while b { break; } }");
    }
}
