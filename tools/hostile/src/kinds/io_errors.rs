//! Unwritable and unreadable streams, and invalid output paths.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use crate::case::{Case, Expect, Stream};
use crate::chance::Choices;
use crate::fixtures::{Fixtures, text};

/// Creates a case with a closed or full stream, or an invalid path.
pub fn ends(chance: &mut Choices, fixtures: &Fixtures, folder: &Path) -> io::Result<Case> {
    if chance.one_in(2) { closed(chance, folder) } else { invalid_path(chance, fixtures, folder) }
}

fn closed(chance: &mut Choices, folder: &Path) -> io::Result<Case> {
    let mut case = match chance.below(9) {
        0 => Case::new(folder, ["doctor"]),
        1 => Case::new(folder, ["inspect", "bundled"]),
        2 => Case::new(folder, ["eval", "distortion", "--vectors", "1", "-o", "json"]),
        3 => Case::new(folder, ["run", "-p", "hi", "-n", "2", "--json", "--prompt-cache", "cache"])
            .output("cache"),
        4 => Case::new(folder, ["chat", "-n", "2"]).reads("hi\nhi\n/save saved\n/nothing\n").output("saved"),
        5 => Case::new(folder, ["--help"]),
        6 => Case::new(folder, ["completions", "bash"]),
        7 => Case::new(folder, ["bench", "--synthetic", "tiny:q8_0", "-p", "1", "-n", "1", "-r", "1"]),
        _ => Case::new(folder, ["run", "-p", "hi", "-n", "2"]),
    };
    let is_chat = case.args.first().is_some_and(|arg| arg == "chat");
    let all = [Stream::Kept, Stream::Full, Stream::Closed];
    (case.stdout, case.stderr) = (chance.of(&all), chance.of(&all));
    if chance.one_in(3) {
        case.stdin = None;
    }
    case.is_conversation = is_chat;
    let is_full = case.stdout == Stream::Full && !is_chat;
    Ok(if is_full { case.expect(Expect::Refused) } else { case })
}

/// Creates a special file named `given`, or returns an invalid name.
fn place(chance: &mut Choices, folder: &Path) -> io::Result<String> {
    let given = folder.join("given");
    let made = |program: &str, args: &[&str]| Command::new(program).args(args).arg(&given).status();
    match chance.below(10) {
        0 => fs::create_dir(&given)?,
        1 => drop(made("mkfifo", &[])?),
        2 => symlink("given", &given)?,
        3 => symlink(folder.join("missing/file"), &given)?,
        4 => {
            fs::write(&given, b"no folder")?;
            return Ok("given/file".to_owned());
        }
        5 => return Ok("missing/file".to_owned()),
        6 => return Ok("/proc/self/file".to_owned()),
        7 => return Ok("n".repeat(300)),
        8 => return Ok((chance.of(&["", ".", "..", "/", "given/"])).to_owned()),
        // A socket is no regular file.
        _ => drop(std::os::unix::net::UnixListener::bind(&given)?),
    }
    Ok("given".to_owned())
}

fn invalid_path(chance: &mut Choices, _: &Fixtures, folder: &Path) -> io::Result<Case> {
    let place = &place(chance, folder)?;
    let ppl = ["eval", "ppl", "-f", "text", "-c", "32", "--chunks", "1", "-t", "1"];
    let case = match chance.below(10) {
        0 => Case::new(folder, ["run", "-p", "hi", "-n", "1", "--prompt-cache", place]),
        1 => Case::new(folder, ["quantize", "bundled", place, "q4_0"]),
        2 => Case::new(folder, ppl).and(["--state", place]),
        3 => Case::new(folder, ppl).and(["--save-base", place]),
        4 => Case::new(folder, ["eval", "kld", "--base", place]),
        5 => Case::new(folder, ["run", "-m", place, "-p", "hi"]),
        6 => Case::new(folder, ["inspect", place]),
        7 => Case::new(folder, ["eval", "kld", "-f", "text", "--chunks", "1", "--state", place]),
        8 => Case::new(folder, ["eval", "niah", "-c", "64", "--depths", "1", "--form", place]),
        _ => {
            let lines = format!("/save {place}\n/load {place}\n/kv\n");
            let chat = Case::new(folder, ["chat", "-n", "1"]).reads(lines).file("text", text())?;
            return Ok(chat.expect(Expect::Answered).conversation());
        }
    };
    // Some options treat an empty name as absent.
    let expect = if place.is_empty() { Expect::Either } else { Expect::Refused };
    case.expect(expect).file("text", text())
}
