//! The one way to the terminal: results on stdout, all else on stderr.
//!
//! A result that cannot be written is a failure, but for a closed pipe: then nobody wants more. What is said on stderr is said
//! to whoever listens, and nobody listening stops no work. Text of strangers (a file's metadata, a name, an error that quotes
//! them) is made [printable] on the way.

use std::borrow::Cow;
use std::fmt::Display;
use std::io::{self, IsTerminal, StderrLock, StdoutLock, Write};

use anstream::{AutoStream, ColorChoice};
use kvant::gguf::printable;
use serde_json::Value;

/// The most characters of a line that is said or printed.
const LINE: usize = 2048;

/// Where results are written as they come: text of a model, tables of numbers.
pub fn results() -> StdoutLock<'static> {
    io::stdout().lock()
}

/// Whether a terminal shows results, and would obey what is in them.
pub fn is_obeyed() -> bool {
    io::stdout().is_terminal()
}

/// The text of a model as it may be written: to a terminal without control characters, but for ends of lines and tabs. A model repeats what
/// strangers have written, and a terminal would take its title, its colours or the clipboard from there. Files and pipes get all.
pub fn spoken(text: &str, is_obeyed: bool) -> Cow<'_, str> {
    let is_left_out = |c: char| is_obeyed && c.is_control() && !matches!(c, '\n' | '\t');
    if text.contains(is_left_out) { text.replace(is_left_out, "").into() } else { text.into() }
}

/// Prints lines of a result.
pub fn print(text: impl Display) -> io::Result<()> {
    writeln!(results(), "{}", shown(&text.to_string()))
}

/// Prints a result for programs, on one line.
pub fn print_json(value: &Value) -> io::Result<()> {
    writeln!(results(), "{}", escaped(value.to_string()))
}

/// Brings out what has been written; a full disk may tell only now.
pub fn flush() -> io::Result<()> {
    results().flush()
}

/// Says something that is no result: how far it is, what was noticed, what went wrong.
pub fn say(text: impl Display) {
    let _ = writeln!(heard(), "{}", shown(&text.to_string()));
}

/// Says something to programs that listen, on one line of JSON.
pub fn say_json(line: String) {
    let _ = writeln!(heard(), "{}", escaped(line));
}

/// Whether somebody may watch what is said.
pub fn is_watched() -> bool {
    heard().is_terminal()
}

/// Whether something waits at stdin that no terminal wrote.
pub fn is_piped_to() -> bool {
    #[cfg(unix)]
    let n = rustix::io::ioctl_fionread(io::stdin()).unwrap_or(0);
    #[cfg(not(unix))]
    let n = 0_u64;
    n > 0 && !io::stdin().is_terminal()
}

/// Whether results may have colours: not with NO_COLOR, nor where there is no terminal, or one that knows none.
pub fn has_colours() -> bool {
    AutoStream::choice(&io::stdout()) != ColorChoice::Never
}

fn heard() -> StderrLock<'static> {
    io::stderr().lock()
}

fn shown(text: &str) -> String {
    text.split('\n').map(|line| printable(line, LINE)).collect::<Vec<_>>().join("\n")
}

/// JSON in which the control characters that JSON leaves as they are (from DEL on) are escaped too.
pub fn escaped(json: String) -> String {
    let is_left = |c: char| c.is_control() && !c.is_ascii_whitespace();
    if !json.contains(is_left) {
        return json;
    }
    let escape = |c: char| if is_left(c) { format!("\\u{:04x}", u32::from(c)) } else { c.to_string() };
    json.chars().map(escape).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_model_says_moves_no_terminal_and_reaches_a_file_whole() {
        let said =
            "a\u{1b}]0;OWNED\u{7}\u{1b}]52;c;b3du\u{1b}\\\tb\r\n\u{9b}31m\u{85}\u{7f}\u{0}\u{8}字 é \u{200d}";
        assert_eq!(spoken(said, true), "a]0;OWNED]52;c;b3du\\\tb\n31m字 é \u{200d}");
        assert_eq!(spoken(said, false), said);
        let all: String = (0..0x100).filter_map(char::from_u32).collect();
        let left: Vec<char> = spoken(&all, true).chars().filter(|c| c.is_control()).collect();
        assert_eq!(left, ['\t', '\n']);
    }

    #[test]
    fn lines_stay_lines_and_lose_what_a_terminal_obeys() {
        assert_eq!(shown("one\ntwo\u{1b}[2J\n"), "one\ntwo\\u{1b}[2J\n");
    }

    #[test]
    fn json_without_control_characters_means_the_same() {
        let value = serde_json::json!({ "name": "a\u{1b}\u{7f}\u{9b}\n字", "list": [1, "\u{85}"] });
        for json in [value.to_string(), serde_json::to_string_pretty(&value).unwrap()] {
            let escaped = escaped(json);
            assert!(!escaped.chars().any(|c| c.is_control() && c != '\n'), "{escaped:?}");
            assert_eq!(serde_json::from_str::<Value>(&escaped).unwrap(), value);
        }
    }
}
