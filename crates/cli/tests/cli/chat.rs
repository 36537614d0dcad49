//! Tests of conversations through a pipe: commands, a full context, and Ctrl-C.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Returns stdout and stderr of a conversation with these input lines.
fn chat(args: &[&str], lines: &str) -> (String, String) {
    chat_with_bytes(args, lines.as_bytes())
}

fn chat_with_bytes(args: &[&str], lines: &[u8]) -> (String, String) {
    let mut chat = Command::new(env!("CARGO_BIN_EXE_kvant"))
        .arg("chat")
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    chat.stdin.take().unwrap().write_all(lines).unwrap();
    let output = chat.wait_with_output().unwrap();
    assert!(output.status.success());
    (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap())
}

fn scratch(test: &str) -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("chat").join(test);
    let _ = fs::remove_dir_all(&dir);
    fs::create_dir_all(&dir).unwrap();
    dir
}

const FRANCE: &str = "What is the capital of France?";

#[test]
fn the_banner_names_model_context_cache_and_exit_command() {
    let (out, err) = chat(&["-c", "512", "-ctk", "turbo3", "-ctv", "turbo3"], "");
    assert_eq!(out, "");
    for word in
        ["bundled", "cpu", "context 512 tokens", "KV turbo3/turbo3", "KiB when full", "/help", "/exit"]
    {
        assert!(err.contains(word), "{word}: {err}");
    }
    assert!(!err.contains('\u{1b}'), "no colours through a pipe: {err}");
}

#[test]
fn exit_bye_quit_and_end_of_input_end_the_program() {
    for leave in ["/exit", "/bye", "/quit"] {
        let (out, _) = chat(&["--temp", "0", "-n", "4"], &format!("{FRANCE}\n{leave}\n{FRANCE}\n"));
        assert_eq!(out.lines().count(), 1, "{leave}: {out}");
    }
}

#[test]
fn lines_that_are_not_utf8_are_skipped() {
    let lines = [b"caf\xe9 \xff\n", FRANCE.as_bytes(), b"\n"].concat();
    let (stdout, stderr) = chat_with_bytes(&["-n", "8", "--temp", "0"], &lines);
    assert!(stdout.contains("Paris") && stderr.contains("not UTF-8"), "{stdout}\n{stderr}");
}

#[test]
fn a_message_may_begin_with_a_slash_and_have_several_lines() {
    let (out, err) = chat(&["-n", "4"], "/etc\n//etc\none\\\ntwo\n\"\"\"three\nfour\"\"\"\n");
    assert_eq!(out.lines().count(), 3, "{out}{err}");
    assert!(err.contains("no command /etc") && err.contains("//"), "{err}");
}

#[test]
fn a_first_message_may_be_given_with_the_command() {
    for args in [&["--temp", "0", FRANCE][..], &["--temp", "0", "bundled", "-p", FRANCE]] {
        assert!(chat(args, "").0.contains("Paris"), "{args:?}");
    }
}

#[test]
fn answers_have_the_requested_length_and_regenerate_differs() {
    let args = ["-n", "12", "--temp", "2", "--top-k", "0", "--min-p", "0", "--top-p", "1", "-s", "7"];
    let (out, err) = chat(&args, "/regenerate\nOnce\n/regenerate\n/stats\n");
    assert!(err.contains("no answer yet"), "{err}");
    assert!(err.contains("seed 7"), "{err}");
    let (again, _) = chat(&args, "Once\n/regenerate\n");
    assert_eq!(out, again, "the seed repeats a conversation");
    let (first, second) = out.split_at(chat(&args, "Once\n").0.len());
    assert_ne!(first, second);
}

#[test]
fn a_system_message_is_shown_changed_and_survives_clear() {
    let (_, err) = chat(&["--system-prompt", "Be brief."], "/system\n/system Be long.\n/clear\n/system\n");
    assert!(err.contains("\nBe brief.\nBe long.\n"), "{err}");
    let (_, err) = chat(
        &["-sys", "Be brief.", "-n", "1"],
        "hi\n/kv\n/system Another one, which is longer.\n/regenerate\n/kv\n",
    );
    let tokens: Vec<usize> =
        err.lines().filter_map(|line| line.split(" of 2048 tokens").next()?.parse().ok()).collect();
    assert!(tokens.len() == 2 && tokens[1] > tokens[0], "{err}");
}

#[test]
fn clear_restores_the_requested_types_after_a_load() {
    let file = scratch("load").join("f16");
    let file = file.to_str().unwrap();
    let f16 = ["-ctk", "f16", "--temp", "0"];
    let (_, err) = chat(&f16, &format!("{FRANCE}\n/save {file}\n"));
    assert!(err.contains(" tokens in "), "{err}");
    let turbo = ["-ctk", "turbo3", "-ctv", "turbo3", "--temp", "0"];
    let (_, err) = chat(&turbo, &format!("/load {file}\n/kv\n/clear\n/kv\n"));
    assert!(err.contains("f16/f16, not turbo3/turbo3"), "{err}");
    let kv: Vec<&str> = err.lines().filter(|line| line.contains(" of 2048 tokens")).collect();
    assert!(
        kv[0].contains("f16/f16") && kv[1].starts_with("0 of") && kv[1].contains("turbo3/turbo3"),
        "{err}"
    );
    let (_, err) = chat(&f16, &format!("/load {file}\n"));
    assert!(!err.contains("as requested"), "{err}");
}

#[test]
fn the_advice_for_a_full_context_works() {
    let questions = format!("{FRANCE}\n").repeat(6);
    let (out, err) = chat(&["-c", "64", "--temp", "0"], &format!("{questions}/clear\n{FRANCE}\n"));
    assert!(err.contains("/clear starts a new conversation; kvant chat --context-shift"), "{err}");
    assert!(out.lines().last().unwrap().contains("Paris"), "{out}");
}

#[test]
fn a_shifted_context_continues_indefinitely() {
    let questions = format!("{FRANCE}\n").repeat(12);
    let (out, err) = chat(&["-c", "96", "--temp", "0", "--context-shift"], &format!("{questions}/kv\n"));
    assert_eq!(out.lines().filter(|line| line.contains("Paris")).count(), 12, "{out}{err}");
    assert!(err.contains("dropped the oldest") && !err.contains("error"), "{err}");
    // A question that exceeds the context by itself is rejected, and the conversation continues.
    let long = "word ".repeat(200);
    let (out, err) = chat(&["-c", "96", "--temp", "0", "--context-shift"], &format!("{long}\n{FRANCE}\n"));
    assert!(err.contains("the context holds 96") && out.contains("Paris"), "{out}{err}");
}

/// A long answer continues after older turns make room for it.
#[test]
fn an_answer_continues_after_a_context_shift() {
    let args = ["-c", "128", "-n", "100", "--temp", "0", "--context-shift", "--log-level", "info"];
    let (_, err) =
        chat(&args, &format!("{FRANCE}\nCount to five.\nWhat color is the sky?\nTell me a story.\n/kv\n"));
    assert!(!err.contains("error"), "{err}");
}

#[cfg(unix)]
#[test]
fn an_interrupt_ends_a_chat_waiting_on_a_pipe() {
    use std::time::{Duration, Instant};
    let mut chat = Command::new(env!("CARGO_BIN_EXE_kvant"))
        .arg("chat")
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(chat.stderr.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("/exit")));
    let id = chat.id().to_string();
    assert!(Command::new("kill").args(["-INT", &id]).status().unwrap().success());
    let started = Instant::now();
    let status = loop {
        match chat.try_wait().unwrap() {
            Some(status) => break status,
            None if started.elapsed() > Duration::from_secs(20) => {
                chat.kill().unwrap();
                panic!("still there");
            }
            None => std::thread::sleep(Duration::from_millis(10)),
        }
    };
    assert_eq!(status.code(), Some(130));
}

#[test]
fn reasoning_can_be_hidden_and_is_controlled_by_the_template() {
    let file = scratch("reasoning").join("thinks.jinja");
    let template =
        "{{ messages[-1].content }}{% if enable_thinking %}<think>{% else %}<think></think>{% endif %}";
    fs::write(&file, template).unwrap();
    let answer = |more: &[&str]| {
        let args = ["-n", "6", "--temp", "0", "--chat-template", file.to_str().unwrap()];
        chat(&[&args[..], more].concat(), &format!("{FRANCE}\n")).0
    };
    // The reasoning does not end within six tokens.
    assert_eq!(answer(&["--think", "on", "--hide-thinking"]), "\n");
    assert_ne!(answer(&["--think", "on"]), "\n");
    assert_ne!(answer(&["--think", "off", "--hide-thinking"]), "\n");
    assert_ne!(answer(&["--hide-thinking"]), "\n");

    let chat = Command::new(env!("CARGO_BIN_EXE_kvant")).args(["chat", "--think", "on"]).output().unwrap();
    let error = String::from_utf8(chat.stderr).unwrap();
    assert!(!chat.status.success() && error.contains("--think: this model's template"), "{error}");
}
