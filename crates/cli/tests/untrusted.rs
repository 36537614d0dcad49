//! Numbers that make no sense, files of strangers and ends that cannot be written to: one clear line, an exit code, and nothing
//! that a terminal obeys.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use kvant::DType;
use kvant::gguf::GgufWriter;

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvant"));
    command.args(args).stdin(Stdio::null());
    command
}

fn kvant(args: &[&str]) -> Output {
    command(args).output().expect("the binary starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// A scratch folder of this test's own, emptied.
fn scratch(test: &str) -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("untrusted").join(test);
    let _ = fs::remove_dir_all(&dir);
    fs::create_dir_all(&dir).unwrap();
    dir
}

fn bundled() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/model/pocket-q8_0.gguf");
    path.to_str().unwrap().to_owned()
}

/// One line that begins with `error: ` and contains `words`, at most 2,100 characters long.
fn assert_line(what: &str, stderr: &[u8], words: &[&str]) {
    let line = text(stderr);
    assert_eq!(line.trim_end().lines().count(), 1, "{what}: {line}");
    assert!(line.starts_with("error: ") && !line.contains("internal"), "{what}: {line}");
    assert!(line.chars().count() < 2100, "{what}: {} characters", line.chars().count());
    for word in words {
        assert!(line.contains(word), "{what}: '{word}' is not in: {line}");
    }
}

#[cfg(target_os = "linux")]
fn full() -> Stdio {
    File::options().write(true).open("/dev/full").expect("Linux has it").into()
}

#[cfg(target_os = "linux")]
#[test]
fn a_result_that_cannot_be_written_is_told_in_one_line() {
    let model = bundled();
    for args in [
        &["--help"][..],
        &["--version"],
        &["run", "--help"],
        &["doctor"],
        &["doctor", "--json"],
        &["inspect", &model],
        &["inspect", &model, "--json"],
        &["run", "-p", "hi", "-n", "2", "--quiet"],
        &["run", "-p", "hi", "-n", "2", "--json"],
        &["eval", "distortion", "--vectors", "1", "-o", "csv"],
    ] {
        let output = command(args).stdout(full()).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        assert_line(&format!("{args:?}"), &output.stderr, &["stdout", "No space"]);
    }
}

#[test]
fn a_closed_pipe_ends_a_command_quietly() {
    let model = bundled();
    for args in
        [&["--help"][..], &["doctor"], &["inspect", &model], &["run", "-p", "hi", "-n", "2", "--quiet"]]
    {
        let mut child = command(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        assert_eq!((output.status.code(), text(&output.stderr)), (Some(0), String::new()), "{args:?}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_stderr_that_cannot_be_written_stops_no_work() {
    for (args, code) in [
        (&["run", "-p", "hi", "-n", "2"][..], 0),
        (&["run", "-m", "/no/such/file", "-p", "hi"], 1),
        (&["run"], 2),
        (&["fly"], 2),
        (&[], 2),
    ] {
        let output = command(args).stderr(full()).output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{args:?}");
        assert_eq!(output.stdout.is_empty(), code != 0, "{args:?}");
    }
}

/// A file that says of itself what is written here, with one tensor of 4 rows of `row` values, all of them `value`.
fn write_file(path: &Path, meta: &[(&str, &str)], tensor: &str, row: usize, value: f32) {
    let mut writer = GgufWriter::new();
    meta.iter().for_each(|(key, value)| writer.set(key, *value).unwrap());
    writer.add_tensor(tensor, &[row, 4], DType::F32).unwrap();
    let data = value.to_le_bytes().repeat(4 * row);
    writer.save(path, |sink| sink.bytes(tensor, &data)).unwrap();
}

#[test]
fn what_strangers_write_is_shown_and_not_obeyed() {
    const HOSTILE: &str = "\u{1b}]0;owned\u{7}\u{1b}[2J\u{9b}31m\u{202e}\r\n";
    let dir = scratch("escapes");
    let path = dir.join("red\u{1b}[31m\u{9b}2J.gguf");
    let (name, tensor) = (format!("a{HOSTILE}b"), format!("t{HOSTILE}"));
    write_file(&path, &[("general.architecture", &name), (&name, &name)], &tensor, 32, 0.5);
    let (path, out) = (path.to_str().unwrap(), dir.join("out.gguf"));
    let sound = dir.join("sound\u{1b}[31m.gguf");
    fs::copy(bundled(), &sound).unwrap();
    let sound = sound.to_str().unwrap();
    for args in [
        &["chat", "-m", sound][..],
        &["eval", "ppl", "-m", sound, "-f", "\u{1b}[2J"],
        &["bench", "-m", sound, "-p", "1", "-n", "0", "-r", "1", "-o", "csv"],
        &["inspect", path, "-v"],
        &["inspect", path, "--json", "-v"],
        &["run", "-m", path, "-p", "x"],
        &["chat", "-m", path],
        &["quantize", path, out.to_str().unwrap(), "q8_0"],
        &["run", "-m", "\u{1b}[2J\u{9b}", "-p", "x"],
        &["\u{1b}[2J"],
        &["run", "-p", "x", "--kv-policy", "\u{1b}[2J"],
    ] {
        let output = kvant(args);
        let shown = text(&output.stdout) + &text(&output.stderr);
        let is_obeyed = |c: char| c.is_control() && c != '\n' || c == '\u{202e}' && !args.contains(&"--json");
        assert!(!shown.is_empty() && !shown.contains(is_obeyed), "{args:?}: {shown:?}");
    }
}

#[test]
fn a_name_of_a_megabyte_gives_a_short_line() {
    let dir = scratch("long");
    let (path, name) = (dir.join("long.gguf"), "x".repeat(1 << 20));
    write_file(&path, &[("general.architecture", &name)], "t", 32, 0.5);
    let output = kvant(&["run", "-m", path.to_str().unwrap(), "-p", "x"]);
    assert_eq!(output.status.code(), Some(1));
    assert_line(
        "run",
        &output.stderr,
        &["unknown architecture 'xxxx", "(1048576 characters)", "known: llama"],
    );
    assert!(output.stderr.len() < 300, "{} bytes", output.stderr.len());
    let shown = kvant(&["inspect", path.to_str().unwrap()]).stdout;
    assert!(shown.len() < 4000, "{} bytes", shown.len());
}
