//! Conversations: commands out of order, endless lines, invalid UTF-8.

use std::io;
use std::path::Path;

use crate::case::Case;
use crate::chance::Choices;
use crate::fixtures::Fixtures;

const LINES: [&[u8]; 26] = [
    b"hi",
    b"/help",
    b"/clear",
    b"/reset",
    b"/regenerate",
    b"/system",
    b"/system \x1b[2J",
    b"/stats",
    b"/kv",
    b"/save",
    b"/save saved",
    b"/load saved",
    b"/load missing",
    b"/load .",
    b"/save .",
    b"//",
    b"/",
    b"/\xff",
    b"\"\"\"",
    b"\\",
    b"\"\"\"a\"\"\"",
    b"\xff\xfe",
    b"\0",
    b"<|im_end|>",
    b"/nothing",
    b"/bye now",
];

/// Creates some lines, the last one terminated or not.
pub fn conversation(chance: &mut Choices, _: &Fixtures, folder: &Path) -> io::Result<Case> {
    let mut lines = Vec::new();
    for _ in 0..chance.below(12) {
        lines.extend_from_slice(chance.of(&LINES));
        lines.extend_from_slice(chance.of(&[&b"\n"[..], b"\r\n", b"\n\n"]));
    }
    if chance.one_in(6) {
        lines.extend(b"a ".repeat(200_000));
    }
    let types = ["f16", "turbo3", "q4_0"];
    let case = Case::new(folder, ["chat", "-n", "3", "-t", "1", "-c", chance.of(&["1", "24", "128"])]);
    let mut case = case.and(["-ctk", chance.of(&types), "-ctv", chance.of(&types)]);
    if chance.one_in(2) {
        case = case.and(["--context-shift"]);
    }
    Ok(case.reads(lines).output("saved").conversation())
}
