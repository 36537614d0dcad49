//! Lexer for templates, with Jinja's whitespace rules: blocks are trimmed (`trim_blocks`,
//! `lstrip_blocks`), and one final newline is removed.

use super::Fault;

/// A token of a template.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Token {
    /// Text outside of tags.
    Data(String),
    /// `{{` and `}}`, `{%` and `%}`.
    VarBegin,
    VarEnd,
    BlockBegin,
    BlockEnd,
    Name(String),
    Text(String),
    Int(i128),
    Float(f64),
    /// An operator or bracket.
    Op(&'static str),
    /// The end of the template.
    End,
}

/// Longer operators precede their prefixes.
const OPS: [&str; 26] = [
    "==", "!=", ">=", "<=", "//", "**", "+", "-", "*", "/", "%", "~", "[", "]", "(", ")", "{", "}", ">", "<",
    "=", ".", ":", "|", ",", ";",
];

/// Splits `source` into tokens, each with its line, counted from 1.
///
/// # Errors
/// [`Fault::Failed`] with the line.
pub(super) fn lex(source: &str) -> Result<Vec<(Token, u32)>, (Fault, u32)> {
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let source = source.strip_suffix('\n').unwrap_or(&source);
    let mut lexer = Lexer { rest: source, line: 1, tokens: Vec::new() };
    match lexer.data() {
        Ok(()) => {
            lexer.tokens.push((Token::End, lexer.line));
            Ok(lexer.tokens)
        }
        Err(fault) => Err((fault, lexer.line)),
    }
}

struct Lexer<'a> {
    rest: &'a str,
    line: u32,
    tokens: Vec<(Token, u32)>,
}

/// The kind of a tag.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Tag {
    Variable,
    Block,
    Comment,
}

impl<'a> Lexer<'a> {
    fn push(&mut self, token: Token) {
        self.tokens.push((token, self.line));
    }

    /// Advances by `n` bytes and returns them.
    fn take(&mut self, n: usize) -> &'a str {
        let (taken, rest) = self.rest.split_at(n);
        self.line += taken.bytes().filter(|&b| b == b'\n').count() as u32;
        self.rest = rest;
        taken
    }

    /// Lexes text and tags, to the end.
    fn data(&mut self) -> Result<(), Fault> {
        let mut line_start = true;
        while let Some((at, tag)) = next_tag(self.rest) {
            let sign = self.rest.as_bytes().get(at + 2).copied().filter(|b| b"-+".contains(b));
            let text = before_tag(&self.rest[..at], tag, sign, line_start).to_owned();
            if !text.is_empty() {
                self.push(Token::Data(text));
            }
            self.take(at + 2 + usize::from(sign.is_some()));
            line_start = match tag {
                Tag::Comment => self.comment()?,
                Tag::Block => match self.raw()? {
                    Some(line_start) => line_start,
                    None => self.tag(Token::BlockBegin, "%}", Token::BlockEnd)?,
                },
                Tag::Variable => self.tag(Token::VarBegin, "}}", Token::VarEnd)?,
            };
        }
        if !self.rest.is_empty() {
            self.push(Token::Data(self.rest.to_owned()));
            self.take(self.rest.len());
        }
        Ok(())
    }

    /// Lexes the inside of a tag between `begin` and `close`. Returns whether a line starts after
    /// it.
    fn tag(&mut self, begin: Token, close: &str, end: Token) -> Result<bool, Fault> {
        self.push(begin);
        self.expression(close)?;
        let trims = end == Token::BlockEnd;
        self.push(end);
        Ok(self.close(close, trims))
    }

    /// Consumes a closing bracket and the whitespace that it trims. Returns whether a line starts
    /// there.
    fn close(&mut self, close: &str, trims: bool) -> bool {
        let sign = self.rest.as_bytes().first().copied().filter(|b| b"-+".contains(b));
        self.take(usize::from(sign.is_some()) + close.len());
        let taken = match sign {
            Some(b'-') => self.take(self.rest.len() - self.rest.trim_start().len()),
            None if trims && self.rest.starts_with('\n') => self.take(1),
            _ => "",
        };
        taken.ends_with('\n')
    }

    fn comment(&mut self) -> Result<bool, Fault> {
        let end = self.rest.find("#}").ok_or_else(|| Fault::failed("a comment does not end"))?;
        let signed = end > 0 && b"-+".contains(&self.rest.as_bytes()[end - 1]);
        self.take(end - usize::from(signed));
        Ok(self.close("#}", true))
    }

    /// Lexes `{% raw %}...{% endraw %}`, after its `{%`, as text. Returns `None` for another tag.
    fn raw(&mut self) -> Result<Option<bool>, Fault> {
        let Some((begin, closes)) = keyword_tag(self.rest, "raw") else { return Ok(None) };
        self.take(begin);
        if closes == b'-' {
            self.take(self.rest.len() - self.rest.trim_start().len());
        }
        let end = self.rest.match_indices("{%").find_map(|(at, _)| {
            let inside = &self.rest[at + 2..];
            let signed = usize::from(inside.starts_with(['-', '+']));
            let (len, _) = keyword_tag(&inside[signed..], "endraw")?;
            Some((at, signed, len))
        });
        let (at, signed, len) = end.ok_or_else(|| Fault::failed("'raw' does not end"))?;
        let text = &self.rest[..at];
        let text = if self.rest[at + 2..].starts_with('-') { text.trim_end() } else { text };
        if !text.is_empty() {
            self.push(Token::Data(text.to_owned()));
        }
        let closed = &self.rest[..at + 2 + signed + len];
        let close = closed.len() - 2 - usize::from(closed[..closed.len() - 2].ends_with(['-', '+']));
        self.take(close);
        Ok(Some(self.close("%}", true)))
    }

    /// Lexes tokens up to `close`, which counts only outside of brackets.
    fn expression(&mut self, close: &str) -> Result<(), Fault> {
        let mut open = Vec::new();
        loop {
            self.take(self.rest.len() - self.rest.trim_start().len());
            let unsigned = self.rest.strip_prefix(['-', '+']).unwrap_or(self.rest);
            if open.is_empty() && (self.rest.starts_with(close) || unsigned.starts_with(close)) {
                return Ok(());
            }
            let Some(first) = self.rest.chars().next() else {
                return Err(Fault::failed(format!("a tag does not end with '{close}'")));
            };
            if first.is_alphabetic() || first == '_' {
                let n = self.rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(self.rest.len());
                let name = self.take(n).to_owned();
                self.push(Token::Name(name));
            } else if first.is_ascii_digit() {
                self.number()?;
            } else if first == '"' || first == '\'' {
                self.text(first)?;
            } else {
                self.op(&mut open)?;
            }
        }
    }

    fn op(&mut self, open: &mut Vec<&'static str>) -> Result<(), Fault> {
        let Some(op) = OPS.into_iter().find(|op| self.rest.starts_with(op)) else {
            let c = self.rest.chars().next().unwrap_or_default();
            return Err(Fault::failed(format!("unexpected character '{}'", c.escape_default())));
        };
        match op {
            "(" => open.push(")"),
            "[" => open.push("]"),
            "{" => open.push("}"),
            ")" | "]" | "}" if open.pop() != Some(op) => {
                return Err(Fault::failed(format!("unexpected '{op}'")));
            }
            _ => {}
        }
        self.take(op.len());
        self.push(Token::Op(op));
        Ok(())
    }

    fn number(&mut self) -> Result<(), Fault> {
        let digits = |text: &str| text.find(|c: char| !c.is_ascii_digit() && c != '_').unwrap_or(text.len());
        let mut n = digits(self.rest);
        let after = &self.rest[n..];
        let fraction = after.strip_prefix('.').map_or(0, digits);
        if fraction > 0 {
            n += 1 + fraction;
        }
        let after = &self.rest[n..];
        let exponent =
            after.strip_prefix(['e', 'E']).map(|e| (e.len(), e.strip_prefix(['-', '+']).unwrap_or(e)));
        let exponent = exponent.map_or(0, |(len, e)| match digits(e) {
            0 => 0,
            n => 1 + len - e.len() + n,
        });
        n += exponent;
        let is_float = fraction > 0 || exponent > 0;
        let text = self.take(n).replace('_', "");
        let fail = || Fault::failed(format!("'{text}' is not a representable number"));
        let token = if is_float {
            Token::Float(text.parse().map_err(|_| fail())?)
        } else {
            Token::Int(i128::from(text.parse::<i64>().map_err(|_| fail())?))
        };
        self.push(token);
        Ok(())
    }

    /// Lexes a string literal with Python's escapes.
    fn text(&mut self, mark: char) -> Result<(), Fault> {
        let mut out = String::new();
        let mut chars = self.rest.char_indices().skip(1);
        let end = loop {
            let Some((at, c)) = chars.next() else {
                return Err(Fault::failed("a string does not end"));
            };
            if c == mark {
                break at + 1;
            }
            if c != '\\' {
                out.push(c);
                continue;
            }
            let escaped = chars.next().map(|(_, c)| c);
            let mut code = |n| {
                let hex: String = chars.by_ref().take(n).map(|(_, c)| c).collect();
                u32::from_str_radix(&hex, 16).ok().and_then(char::from_u32)
            };
            let fail = || Fault::failed("a string has an invalid escape");
            match escaped {
                Some('n') => out.push('\n'),
                Some('r') => out.push('\r'),
                Some('t') => out.push('\t'),
                Some('b') => out.push('\u{8}'),
                Some('f') => out.push('\u{c}'),
                Some('0') => out.push('\0'),
                Some('x') => out.push(code(2).ok_or_else(fail)?),
                Some('u') => out.push(code(4).ok_or_else(fail)?),
                Some('U') => out.push(code(8).ok_or_else(fail)?),
                Some('\n') => {}
                Some(c @ ('\\' | '\'' | '"')) => out.push(c),
                // Python keeps an unknown escape verbatim.
                Some(c) => out.extend(['\\', c]),
                None => {}
            }
        };
        self.take(end);
        self.push(Token::Text(out));
        Ok(())
    }
}

/// Finds the next tag.
fn next_tag(text: &str) -> Option<(usize, Tag)> {
    text.match_indices('{').find_map(|(at, _)| {
        let tag = match text.as_bytes().get(at + 1)? {
            b'{' => Tag::Variable,
            b'%' => Tag::Block,
            b'#' => Tag::Comment,
            _ => return None,
        };
        Some((at, tag))
    })
}

/// Whether `text`, the inside of a tag, is `keyword` alone. Returns the number of bytes through its
/// `%}`, and the sign before it.
fn keyword_tag(text: &str, keyword: &str) -> Option<(usize, u8)> {
    let rest = text.trim_start().strip_prefix(keyword)?.trim_start();
    let sign = rest.as_bytes().first().copied().unwrap_or_default();
    let rest = rest.strip_prefix(['-', '+']).unwrap_or(rest).strip_prefix("%}")?;
    Some((text.len() - rest.len(), sign))
}

/// Returns the text before a tag without the whitespace that the tag trims.
fn before_tag(text: &str, tag: Tag, sign: Option<u8>, line_start: bool) -> &str {
    if sign == Some(b'-') {
        return text.trim_end();
    }
    if sign == Some(b'+') || tag == Tag::Variable {
        return text;
    }
    let line = text.rfind('\n').map(|newline| newline + 1);
    match line.or(line_start.then_some(0)) {
        Some(line) if text[line..].chars().all(char::is_whitespace) => &text[..line],
        _ => text,
    }
}
