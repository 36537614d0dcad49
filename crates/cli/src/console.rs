//! Writes to the terminal: results to stdout, everything else to stderr.
//!
//! A result that cannot be written is a failure, except for a closed pipe, which means that the
//! reader needs no more. Messages on stderr are best effort: a closed stderr stops no work.
//! Untrusted text (a file's metadata, a name, an error that quotes them) is made [printable] first.

use std::borrow::Cow;
use std::fmt::Display;
use std::io::{self, IsTerminal, StderrLock, StdoutLock, Write};

use anstream::{AutoStream, ColorChoice};
use kvant::gguf::printable;
use serde_json::Value;

/// Maximum characters of a printed line.
const LINE: usize = 2048;

/// Returns stdout for incremental results: text of a model, tables of numbers.
pub fn results() -> StdoutLock<'static> {
    io::stdout().lock()
}

/// Returns whether stdout is a terminal, which interprets control characters.
pub fn stdout_is_terminal() -> bool {
    io::stdout().is_terminal()
}

/// Returns a model's text as it may be written: for a terminal without control characters, except
/// line ends and tabs. A model repeats untrusted text, and a terminal would take its title, its
/// colours or the clipboard from there. Files and pipes get the text unchanged.
pub fn sanitized_output(text: &str, is_terminal: bool) -> Cow<'_, str> {
    let is_removed = |c: char| is_terminal && c.is_control() && !matches!(c, '\n' | '\t');
    if text.contains(is_removed) { text.replace(is_removed, "").into() } else { text.into() }
}

/// Prints lines of a result.
pub fn print(text: impl Display) -> io::Result<()> {
    writeln!(results(), "{}", printable_lines(&text.to_string()))
}

/// Prints a JSON result on one line.
pub fn print_json(value: &Value) -> io::Result<()> {
    writeln!(results(), "{}", escaped(value.to_string()))
}

/// Flushes the results; a full disk may surface only now.
pub fn flush() -> io::Result<()> {
    results().flush()
}

/// Prints a message that is not a result to stderr: progress, notes, errors.
pub fn eprint_line(text: impl Display) {
    let _ = writeln!(stderr(), "{}", printable_lines(&text.to_string()));
}

/// Prints one line of JSON to stderr.
pub fn eprint_json(line: String) {
    let _ = writeln!(stderr(), "{}", escaped(line));
}

/// Returns whether stderr is a terminal.
pub fn stderr_is_terminal() -> bool {
    stderr().is_terminal()
}

/// Returns whether stdin has bytes to read and is no terminal.
pub fn is_piped_to() -> bool {
    #[cfg(unix)]
    let n = rustix::io::ioctl_fionread(io::stdin()).unwrap_or(0);
    #[cfg(not(unix))]
    let n = 0_u64;
    n > 0 && !io::stdin().is_terminal()
}

/// Returns whether results may have colours: not with NO_COLOR, nor without a terminal that
/// supports them.
pub fn has_colours() -> bool {
    AutoStream::choice(&io::stdout()) != ColorChoice::Never
}

fn stderr() -> StderrLock<'static> {
    io::stderr().lock()
}

fn printable_lines(text: &str) -> String {
    text.split('\n').map(|line| printable(line, LINE)).collect::<Vec<_>>().join("\n")
}

/// Escapes the control characters that JSON permits verbatim (from DEL on).
pub fn escaped(json: String) -> String {
    let must_escape = |c: char| c.is_control() && !c.is_ascii_whitespace();
    if !json.contains(must_escape) {
        return json;
    }
    let escape = |c: char| if must_escape(c) { format!("\\u{:04x}", u32::from(c)) } else { c.to_string() };
    json.chars().map(escape).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_removed_for_terminals_only() {
        let text =
            "a\u{1b}]0;OWNED\u{7}\u{1b}]52;c;b3du\u{1b}\\\tb\r\n\u{9b}31m\u{85}\u{7f}\u{0}\u{8}字 é \u{200d}";
        assert_eq!(sanitized_output(text, true), "a]0;OWNED]52;c;b3du\\\tb\n31m字 é \u{200d}");
        assert_eq!(sanitized_output(text, false), text);
        let all: String = (0..0x100).filter_map(char::from_u32).collect();
        let controls: Vec<char> = sanitized_output(&all, true).chars().filter(|c| c.is_control()).collect();
        assert_eq!(controls, ['\t', '\n']);
    }

    #[test]
    fn lines_are_kept_without_control_characters() {
        assert_eq!(printable_lines("one\ntwo\u{1b}[2J\n"), "one\ntwo\\u{1b}[2J\n");
    }

    #[test]
    fn escaped_json_parses_to_the_same_value() {
        let value = serde_json::json!({ "name": "a\u{1b}\u{7f}\u{9b}\n字", "list": [1, "\u{85}"] });
        for json in [value.to_string(), serde_json::to_string_pretty(&value).unwrap()] {
            let escaped = escaped(json);
            assert!(!escaped.chars().any(|c| c.is_control() && c != '\n'), "{escaped:?}");
            assert_eq!(serde_json::from_str::<Value>(&escaped).unwrap(), value);
        }
    }
}
