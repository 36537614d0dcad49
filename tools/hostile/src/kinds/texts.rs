//! Texts: invalid UTF-8, endless lines, and words that resemble special tokens.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::Path;

use crate::case::{Case, Expect};
use crate::chance::Choices;
use crate::fixtures::Fixtures;

/// Edge cases of tokenizers and terminals.
const PIECES: [&str; 16] = [
    "a",
    " ",
    "\n",
    "\t\r\n",
    "\0",
    "\u{feff}",
    "e\u{301}\u{301}\u{301}\u{301}",
    "👩‍👩‍👧‍👦",
    "\u{202e}abc",
    "\u{10ffff}\u{e000}",
    "字",
    "<|im_start|>",
    "<0x00>",
    "\u{1b}[2J",
    "12345678901234567890",
    "* K f16\n0 0 V turbo3\n",
];

/// Returns text of up to two million characters, and whether it is valid UTF-8.
fn written(chance: &mut Choices) -> (Vec<u8>, bool) {
    let piece = chance.of(&PIECES);
    match chance.below(6) {
        0 => (piece.repeat(2_000_000 / piece.len()).into_bytes(), true),
        1 => (
            [&piece.repeat(chance.below(20)).into_bytes()[..], b"\xff\xfe", &chance.bytes(50)].concat(),
            false,
        ),
        2 => (b"\xed\xa0\x80 lone half of a pair".to_vec(), false),
        3 => (Vec::new(), true),
        _ => {
            let mut text = String::new();
            (0..chance.below(200)).for_each(|_| text += chance.of(&PIECES));
            (text.into_bytes(), true)
        }
    }
}

/// Creates a text input.
pub fn text(chance: &mut Choices, _: &Fixtures, folder: &Path) -> io::Result<Case> {
    let (bytes, is_text) = written(chance);
    let run = ["run", "-n", "1", "-t", "1", "-c", "512"];
    let case = match chance.below(9) {
        0 => Case::new(folder, run).reads(bytes.clone()),
        1 => Case::new(folder, run).and(["-f", "-"]).reads(bytes.clone()),
        2 => Case::new(folder, run).and(["-f", "text", "--raw"]),
        3 => Case::new(folder, run).and(["-p", "hi", "--kv-types", "text"]),
        4 => Case::new(folder, ["eval", "ppl", "-t", "1", "-c", "16", "--chunks", "1", "-f", "text"]),
        5 => Case::new(folder, ["eval", "niah", "-t", "1", "-c", "128", "--depths", "1", "--form", "text"]),
        6 => Case::new(folder, ["inspect", "bundled", "--kv-types", "text"]),
        _ => Case::new(folder, run).and(["-f", "text"]),
    };
    let case = if is_text { case } else { case.expect(Expect::Refused) };
    case.file("text", bytes)
}

/// Creates special tokens in a message: each must become several text tokens, never the special
/// token.
pub fn special(chance: &mut Choices, fixtures: &Fixtures, folder: &Path) -> io::Result<Case> {
    let n = 1 + chance.below(5);
    let mut text = "x".to_owned();
    (0..n).for_each(|_| {
        text = text.clone()
            + &fixtures.specials[chance.below(fixtures.specials.len())]
            + chance.of(&["", "user\n", " "])
    });
    let min_tokens = fixtures.n_prompt + 2 * n;
    let run = ["run", "-n", "1", "-t", "1", "-c", "512", "--json"];
    let case = match chance.below(6) {
        0 => Case::new(folder, run).and([OsString::from("-p"), OsString::from_vec(text.into_bytes())]),
        1 => Case::new(folder, run).and(["-f", "text"]).file("text", text.into_bytes())?,
        2 => Case::new(folder, run).reads(text),
        3 => Case::new(folder, run).and(["-p", "x", "--system-prompt", &text]),
        4 => Case::new(folder, run)
            .and(["-p", &text, "--raw", "--no-special"])
            .expect(Expect::PromptOf(1 + 2 * n)),
        _ => Case::new(folder, run).and(["-p", "x", &format!("--system-prompt={text}")]),
    };
    Ok(if case.expect == Expect::Either { case.expect(Expect::PromptOf(min_tokens)) } else { case })
}
