//! The program's own files: any change must be rejected, or have no effect.

use std::io;
use std::path::Path;

use crate::case::{Case, Expect};
use crate::chance::Choices;
use crate::fixtures::{Fixtures, MEASURE, PROMPT, text};

/// Modifies a file: some bytes, its end, or all of it.
fn corrupt(chance: &mut Choices, bytes: &mut Vec<u8>) {
    let until = bytes.len();
    match chance.below(6) {
        0 => bytes.truncate(chance.below(until)),
        1 => bytes.extend([&[0][..], &chance.bytes(100)].concat()),
        2 => *bytes = chance.bytes(200),
        3 => chance.mutate(bytes, 200),
        _ => chance.mutate(bytes, until),
    }
}

/// Creates a case with a context file, for `run` or a conversation.
pub fn context(chance: &mut Choices, fixtures: &Fixtures, folder: &Path) -> io::Result<Case> {
    let (kv, sound) = &fixtures.contexts[chance.below(fixtures.contexts.len())];
    let mut bytes = sound.clone();
    let is_corrupt = !chance.one_in(8);
    if is_corrupt {
        corrupt(chance, &mut bytes);
    }
    if chance.one_in(5) {
        let chat = ["chat", "-n", "1", "-t", "1", "-c", "256"];
        let case = Case::new(folder, chat).reads("/load cache\nhi\n/kv\n").file("cache", bytes)?;
        return Ok(case.expect(Expect::Answered).conversation());
    }
    let run = ["run", "-p", PROMPT, "-n", "2", "-c", "256", "-t", "1", "--quiet", "--prompt-cache", "cache"];
    // A valid file of another type, or for a shorter context, is rejected as well.
    let kv = if is_corrupt { kv } else { "turbo2" };
    Case::new(folder, run).and(["-ctk", kv, "-ctv", kv]).expect(Expect::Refused).file("cache", bytes)
}

/// Creates a case with base logits, finished steps, or a tuning file.
pub fn measured(chance: &mut Choices, fixtures: &Fixtures, folder: &Path) -> io::Result<Case> {
    match chance.below(5) {
        0 | 1 => {
            let mut bytes = fixtures.base.clone();
            corrupt(chance, &mut bytes);
            let eval = ["eval", "kld", "-t", "1", "-q", "-ctk", "turbo4", "--base", "base"];
            Case::new(folder, eval).expect(Expect::Refused).file("base", bytes)
        }
        2 | 3 => {
            let (command, sound) = &fixtures.states[chance.below(fixtures.states.len())];
            let mut bytes = sound.clone();
            corrupt(chance, &mut bytes);
            let eval = [&["eval", command][..], &MEASURE, &["text", "--state", "state"]].concat();
            let types: &[&str] = if *command == "kld" { &["-ctk", "turbo3"] } else { &[] };
            // An unfinished last line of a killed run is measured again; all other changes must be
            // rejected.
            let whole = bytes.iter().rposition(|&b| b == b'\n').map_or(0, |end| end + 1);
            let is_cut = sound.starts_with(&bytes) || whole > 0 && sound.starts_with(&bytes[..whole]);
            let expect = if is_cut { Expect::Either } else { Expect::Refused };
            Case::new(folder, eval)
                .and(types)
                .expect(expect)
                .output("state")
                .file("text", text())?
                .file("state", bytes)
        }
        _ => {
            let bytes = match chance.below(3) {
                0 => chance.bytes(300),
                1 => b"{\"prefetch\": 1e400, \"n_threads\": -1".to_vec(),
                _ => b"[".repeat(100_000),
            };
            let command = ["run", "-p", "hi", "-n", "1", "-t", "1"];
            let mut case = Case::new(folder, command).expect(Expect::Answered).file("tuning.json", bytes)?;
            case.env.push(("KVANT_TUNING".into(), "tuning.json".into()));
            Ok(case)
        }
    }
}

/// Creates a case with an importance matrix or a recipe.
pub fn importance(chance: &mut Choices, fixtures: &Fixtures, folder: &Path) -> io::Result<Case> {
    let quantize = ["quantize", "bundled", "out.gguf"];
    if chance.one_in(4) {
        let mut recipe = b"q4_0 *\nq8_0 first:1 last:1 # ends\nq5_0 ffn_down attn_v\n".to_vec();
        corrupt(chance, &mut recipe);
        let case = Case::new(folder, quantize).and(["--recipe", "recipe"]).output("out.gguf");
        return case.file("recipe", recipe);
    }
    let mut bytes = fixtures.importance.clone();
    corrupt(chance, &mut bytes);
    let name = chance.of(&["q4_0", "q4_1", "q4_K", "iq3_s", "iq4_xs"]);
    // Changed sums are sums.
    Case::new(folder, quantize)
        .and([name, "--imatrix", "importance"])
        .output("out.gguf")
        .file("importance", bytes)
}
