//! A stranger's text, made fit to be shown.

use std::path::Path;

/// `text` in one line that a terminal shows and does not obey: as much of it as `max` characters show, with control characters
/// and those that turn the direction of writing spelt out (`\u{1b}`). What was longer says by how much.
pub fn printable(text: &str, max: usize) -> String {
    let (mut shown, mut left) = (String::new(), max);
    for c in text.chars() {
        let spelt = is_obeyed(c).then(|| c.escape_debug());
        let Some(rest) = left.checked_sub(spelt.as_ref().map_or(1, ExactSizeIterator::len)) else {
            shown += &format!("… ({} characters)", text.chars().count());
            break;
        };
        left = rest;
        match spelt {
            Some(spelt) => shown.extend(spelt),
            None => shown.push(c),
        }
    }
    shown
}

/// A path as every message shows it, at most 4,096 characters: it may hold line breaks, a message may not.
pub fn printable_path(path: &Path) -> String {
    printable(&path.to_string_lossy(), 4096)
}

/// Whether a terminal does something else with a character than show it.
fn is_obeyed(c: char) -> bool {
    let turns =
        matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    c.is_control() || turns || matches!(c, '\u{2028}' | '\u{2029}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_that_a_terminal_obeys_is_left() {
        let hostile = "\u{1b}[31mred\u{9b}2J\u{7f}\r\n\t\0 \u{202e}abc\u{2028}";
        let shown = printable(hostile, 100);
        assert!(!shown.chars().any(is_obeyed), "{shown:?}");
        assert_eq!(shown, r"\u{1b}[31mred\u{9b}2J\u{7f}\r\n\t\0 \u{202e}abc\u{2028}");
        for plain in ["", "Ünï→字 e\u{301} \"quoted\" C:\\x", "😀"] {
            assert_eq!(printable(plain, 100), plain);
        }
    }

    #[test]
    fn long_text_is_cut_between_characters_and_says_how_long_it_is() {
        assert_eq!(printable("字字字", 3), "字字字");
        assert_eq!(printable("字字字字", 3), "字字字… (4 characters)");
        assert!(printable(&"x".repeat(1 << 20), 64).len() < 100);
        assert_eq!(printable("\n\u{1b}\n", 8), r"\n\u{1b}… (3 characters)");
        assert!(printable(&"\u{202e}".repeat(1 << 20), 64).chars().count() < 100);
    }
}
