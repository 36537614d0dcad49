//! Sanitizes untrusted text for display.

use std::path::Path;

/// Returns `text` as one line without terminal control: up to `max` characters, with control
/// characters and bidirectional formatting escaped (`\u{1b}`). Longer text is truncated and its
/// length appended.
pub fn printable(text: &str, max: usize) -> String {
    let (mut shown, mut left) = (String::new(), max);
    for c in text.chars() {
        let escaped = is_control(c).then(|| c.escape_debug());
        let Some(rest) = left.checked_sub(escaped.as_ref().map_or(1, ExactSizeIterator::len)) else {
            shown += &format!("… ({} characters)", text.chars().count());
            break;
        };
        left = rest;
        match escaped {
            Some(escaped) => shown.extend(escaped),
            None => shown.push(c),
        }
    }
    shown
}

/// Formats a path for messages, at most 4,096 characters: a path may contain line breaks, a message
/// may not.
pub fn printable_path(path: &Path) -> String {
    printable(&path.to_string_lossy(), 4096)
}

/// Returns whether a terminal interprets a character instead of printing it.
fn is_control(c: char) -> bool {
    let is_bidirectional =
        matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    c.is_control() || is_bidirectional || matches!(c, '\u{2028}' | '\u{2029}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terminal_control_characters_are_escaped() {
        let hostile = "\u{1b}[31mred\u{9b}2J\u{7f}\r\n\t\0 \u{202e}abc\u{2028}";
        let shown = printable(hostile, 100);
        assert!(!shown.chars().any(is_control), "{shown:?}");
        assert_eq!(shown, r"\u{1b}[31mred\u{9b}2J\u{7f}\r\n\t\0 \u{202e}abc\u{2028}");
        for plain in ["", "Ünï→字 e\u{301} \"quoted\" C:\\x", "😀"] {
            assert_eq!(printable(plain, 100), plain);
        }
    }

    #[test]
    fn long_text_is_truncated_with_its_length() {
        assert_eq!(printable("字字字", 3), "字字字");
        assert_eq!(printable("字字字字", 3), "字字字… (4 characters)");
        assert!(printable(&"x".repeat(1 << 20), 64).len() < 100);
        assert_eq!(printable("\n\u{1b}\n", 8), r"\n\u{1b}… (3 characters)");
        assert!(printable(&"\u{202e}".repeat(1 << 20), 64).chars().count() < 100);
    }
}
