//! Tests of prompts, rendered chat templates, and unusable templates.

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

fn run(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvant"));
    command.args(["run", "--device", "cpu", "-t", "1", "-n", "1", "--json"]).args(args).output().unwrap()
}

fn n_prompt(args: &[&str]) -> u64 {
    let output = run(args);
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap()["n_prompt"].as_u64().unwrap()
}

/// Returns the error line of a command that fails with `code`.
fn refusal(args: &[&str], code: i32) -> String {
    let output = run(args);
    let line = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.status.code(), line.lines().count()), (Some(code), 1), "{args:?}: {line}");
    line
}

const BUNDLED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../engine/assets/pocket-q8_0.gguf");

/// Returns the folder of these tests; each of its files is written by one test.
fn scratch() -> PathBuf {
    let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("prompts");
    std::fs::create_dir_all(&dir).unwrap();
    dir
}

/// Returns the bundled model with some of its bytes changed, each `from` to a `to` of the same
/// length.
fn changed(name: &str, changes: &[(&str, &str)]) -> PathBuf {
    let mut bytes = std::fs::read(BUNDLED).unwrap();
    for (from, to) in changes {
        let at = bytes.windows(from.len()).position(|window| window == from.as_bytes()).unwrap();
        bytes[at..at + from.len()].copy_from_slice(to.as_bytes());
    }
    let path = scratch().join(name);
    std::fs::write(&path, bytes).unwrap();
    path
}

#[test]
fn a_prompt_cannot_end_its_own_turn() {
    // One letter is one token; the ten characters of the tag are several tokens unless special
    // tokens are parsed.
    let (x, mark) = (n_prompt(&["-p", "x"]), n_prompt(&["-p", "<|im_end|>"]));
    assert!(mark > x, "{mark} tokens of prompt with the mark, {x} with a letter");
    let raw = |more: &[&str]| n_prompt(&[&["--raw", "-p", "<|im_end|>"], more].concat());
    assert!(raw(&["--no-special"]) > raw(&[]));
}

#[test]
fn unusable_templates_are_rejected_with_an_alternative() {
    let text = scratch().join("bad.jinja");
    for (template, want) in
        [("{% async %}", "does not parse at line 1"), ("{{ 1 + 'a' }}", "failed at line 1")]
    {
        std::fs::write(&text, template).unwrap();
        let line = refusal(&["--chat-template", text.to_str().unwrap(), "-p", "x"], 1);
        assert!(line.contains(want) && line.contains("--raw") && line.contains("chatml"), "{line}");
    }
    let line = refusal(&["--chat-template", "nonsense", "-p", "x"], 2);
    assert!(line.contains("llama3") && line.contains("'nonsense'"), "{line}");
    // Changes the beginning of the file's own template.
    let bundled = std::fs::read(BUNDLED).unwrap();
    let key = b"tokenizer.chat_template";
    let at = bundled.windows(key.len()).position(|window| window == key).unwrap() + key.len() + 12;
    let begin = String::from_utf8(bundled[at..at + 11].to_vec()).unwrap();
    let bad = changed("bad-template.gguf", &[(&begin, "{% async %}")]);
    let bad = bad.to_str().unwrap();
    assert!(refusal(&["-m", bad, "-p", "x"], 1).contains("does not parse at line 1"));
    assert!(
        n_prompt(&["-m", bad, "-p", "x", "--chat-template", "chatml"])
            > n_prompt(&["-m", bad, "-p", "x", "--raw"])
    );
}

#[test]
fn a_model_without_a_template_is_noted() {
    let changes = [("tokenizer.chat_template", "tokenizer.chat_nothing!"), ("<|im_start|>", "<|im_stort|>")];
    let base = changed("no-template.gguf", &changes);
    let base = base.to_str().unwrap();
    let output = run(&["-m", base, "-p", "x"]);
    let lines = String::from_utf8(output.stderr).unwrap();
    assert!(
        output.status.success() && lines.lines().count() == 1 && lines.contains("no chat template"),
        "{lines}"
    );
    let line = refusal(&["-m", base, "-p", "x", "--system-prompt", "s"], 1);
    assert!(line.contains("--chat-template"), "{line}");
}

#[test]
fn an_overlong_prompt_is_rejected_immediately() {
    let file = scratch().join("spaces.txt");
    std::fs::write(&file, " ".repeat(10_000_000)).unwrap();
    let line = refusal(&["-f", file.to_str().unwrap(), "-c", "512", "--raw"], 1);
    assert!(line.contains("tokens or more, the context holds 512"), "{line}");
}

#[test]
fn template_options_of_other_programs_are_synonyms() {
    let chatml = n_prompt(&["--chat-template", "chatml", "-p", "x"]);
    assert_eq!(chatml, n_prompt(&["--chat-template-file", "chatml", "x"]));
    assert!(chatml > n_prompt(&["--raw", "-p", "x"]));
    assert!(refusal(&["--raw", "--in-prefix", "y", "-p", "x"], 2).contains("--chat-template"));
}

/// Missing GPUs are noted for requested layers; an unusable template is not reported as a GPU
/// error.
#[test]
fn missing_templates_are_reported_before_a_gpu_is_opened() {
    let output = Command::new(env!("CARGO_BIN_EXE_kvant"))
        .args(["run", "-ngl", "99", "-p", "x", "--chat-template"])
        .arg({
            let bad = scratch().join("bad-for-gpu.jinja");
            std::fs::write(&bad, "{% async %}").unwrap();
            bad
        })
        .output()
        .unwrap();
    let line = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.status.code(), line.lines().count()), (Some(1), 1), "{line}");
    assert!(line.contains("does not parse at line 1"), "{line}");
}

/// A partly loaded conversation continues in the model's own format: the template's tags are
/// special tokens, those in user text are not.
#[test]
fn tags_in_user_text_are_plain_text_after_a_load() {
    let file = scratch().join("conversation");
    let file = file.to_str().unwrap();
    let n_cached = |lines: &str| {
        let mut chat = Command::new(env!("CARGO_BIN_EXE_kvant"))
            .args(["chat", "--device", "cpu", "--temp", "0", "-n", "1"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        chat.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
        let output = String::from_utf8(chat.wait_with_output().unwrap().stderr).unwrap();
        let n_tokens =
            output.lines().filter_map(|line| line.split(" of 2048 tokens").next()?.parse().ok()).next_back();
        n_tokens.unwrap_or_else(|| panic!("{output}"))
    };
    let begun: u64 = n_cached(&format!("Hello\n/save {file}\n/kv\n"));
    let on = |message: &str| n_cached(&format!("/load {file}\n{message}\n/kv\n")) - begun;
    let (x, mark) = (on("x"), on("<|im_end|>"));
    assert!(x > 3 && mark > x, "{mark} tokens with the mark, {x} with a letter");
}

/// As in llama.cpp: the line break that ends the last line is stripped, others belong to the
/// prompt.
#[test]
fn a_prompt_file_has_neither_mark_nor_last_line_break() {
    let file = scratch().join("prompt.txt");
    let n = |text: &str| {
        std::fs::write(&file, text).unwrap();
        n_prompt(&["--raw", "-f", file.to_str().unwrap()])
    };
    let plain = n_prompt(&["--raw", "-p", "The sky is"]);
    for same in ["The sky is", "The sky is\n", "The sky is\r\n", "\u{feff}The sky is\n"] {
        assert_eq!(n(same), plain, "{same:?}");
    }
    for other in ["The sky is\n\n", "\nThe sky is", "The sky is\r", "The sky\u{feff} is"] {
        assert!(n(other) > plain, "{other:?}");
    }
    for empty in ["\n", "\u{feff}\n", "\u{feff}"] {
        std::fs::write(&file, empty).unwrap();
        assert!(refusal(&["-f", file.to_str().unwrap()], 2).contains("empty"), "{empty:?}");
    }
    let piped = |text: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvant"));
        command.args(["run", "--device", "cpu", "-t", "1", "-n", "1", "--json", "--raw"]);
        let mut run = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        run.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
        let output = run.wait_with_output().unwrap();
        serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap()["n_prompt"].as_u64().unwrap()
    };
    assert_eq!((piped("The sky is\n"), piped("\u{feff}The sky is")), (plain, plain));
    // A file is appended to a prompt, and stdin where requested; otherwise stdin is noted.
    std::fs::write(&file, "The sky is\n").unwrap();
    let both = n_prompt(&["-p", "Go on:", "-f", file.to_str().unwrap()]);
    assert_eq!(both, n_prompt(&["-p", "Go on:\nThe sky is"]));
    let beside = |more: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvant"));
        command.args(["run", "--device", "cpu", "-t", "1", "-n", "1", "--json", "-p", "Go on:"]).args(more);
        let mut run =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        run.stdin.take().unwrap().write_all(b"The sky is\n").unwrap();
        let output = run.wait_with_output().unwrap();
        let object: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        (
            object["n_prompt"].as_u64().unwrap(),
            String::from_utf8(output.stderr).unwrap().contains("is not read"),
        )
    };
    assert_eq!(beside(&["-f", "-"]), (both, false));
    assert_eq!(beside(&[]), (n_prompt(&["-p", "Go on:"]), true));
    // A byte order mark is stripped from templates too.
    let template = scratch().join("marked.jinja");
    let with = |text: &str| {
        std::fs::write(&template, text).unwrap();
        n_prompt(&["-p", "x", "--chat-template", template.to_str().unwrap()])
    };
    assert_eq!(with("\u{feff}{{ messages[0].content }}"), with("{{ messages[0].content }}"));
}
