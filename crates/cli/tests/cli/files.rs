//! Tests of file errors: pipes and devices are rejected, unwritable targets are reported before the
//! work, changed files are rejected, and cache files that only save time never stop the work.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Timeout of a hung program: the bundled model loads in a fraction of a second.
const FOREVER: Duration = Duration::from_secs(120);

/// Runs the program with input lines, in a home folder of its own; kills it if it hangs.
fn kvant(args: &[&str], home: &Path, input: &str) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_kvant"))
        .args(args)
        .env("HOME", home)
        .env_remove("XDG_CACHE_HOME")
        .env_remove("KVANT_TUNING")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // A program that rejects its arguments does not read stdin.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    let started = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if started.elapsed() > FOREVER {
            child.kill().unwrap();
            panic!("{args:?} hangs");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    child.wait_with_output().unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

fn assert_refused(output: &Output, words: &[&str]) {
    let line = stderr(output);
    assert_eq!(output.status.code(), Some(1), "{line}");
    assert!(line.starts_with("error: ") && line.trim_end().lines().count() == 1, "{line}");
    assert!(output.stdout.is_empty(), "it was refused after the work: {line}");
    assert!(words.iter().all(|word| line.contains(word)), "{words:?} in: {line}");
}

/// Returns an empty scratch folder for one test.
fn scratch(test: &str) -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("files-{test}"));
    let _ = fs::remove_dir_all(&dir);
    fs::create_dir_all(&dir).unwrap();
    dir
}

fn asset(path: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path).display().to_string()
}

const POCKET: &str = "crates/engine/assets/pocket-q8_0.gguf";
const TEXT: &str = "LICENSE-APACHE";

/// Returns commands with one file argument each; those of the second list write the file.
fn commands<'a>(file: &'a str, model: &'a str, text: &'a str) -> [Vec<Vec<&'a str>>; 2] {
    let read = vec![
        vec!["eval", "kld", "-m", model, "--base", file],
        vec!["eval", "niah", "-m", model, "-f", text, "--form", file],
    ];
    let write = vec![
        vec!["run", "-m", model, "-p", "x", "-n", "1", "--prompt-cache", file],
        vec!["eval", "ppl", "-m", model, "-f", text, "--chunks", "1", "--state", file],
        vec!["eval", "ppl", "-m", model, "-f", text, "--chunks", "1", "--save-base", file],
        vec!["eval", "kld", "-m", model, "-f", text, "--chunks", "1", "--state", file],
        vec!["eval", "niah", "-m", model, "-f", text, "--state", file],
        vec!["quantize", model, file, "q4_0"],
    ];
    [read, write]
}

#[cfg(unix)]
#[test]
fn pipes_and_devices_are_rejected_as_files_and_stay() {
    use std::os::unix::fs::FileTypeExt;
    let dir = scratch("nodes");
    let (model, text) = (asset(POCKET), asset(TEXT));
    for (name, tool, args, expected) in
        [("pipe", "mkfifo", &[][..], "is a pipe"), ("device", "mknod", &["c", "1", "3"], "is a device")]
    {
        let node = dir.join(name);
        let made = Command::new(tool).arg(&node).args(args).stderr(Stdio::null()).status();
        if !made.is_ok_and(|status| status.success()) {
            eprintln!("skipped: {tool} {args:?}: not here, or not allowed");
            continue;
        }
        let file = node.display().to_string();
        for args in commands(&file, &model, &text).concat() {
            assert_refused(&kvant(&args, &dir, ""), &[name, expected]);
        }
        let input = format!("/save {file}\n/load {file}\n");
        let chat = stderr(&kvant(&["chat", "-m", &model], &dir, &input));
        assert_eq!(chat.matches(expected).count(), 2, "{chat}");
        let kind = fs::symlink_metadata(&node).unwrap().file_type();
        assert!(kind.is_fifo() || kind.is_char_device(), "{name} was replaced");
    }
}

#[test]
fn unwritable_targets_are_rejected_before_the_model_is_opened() {
    let dir = scratch("targets");
    let text = asset(TEXT);
    let [missing, model] = ["missing/file", "absent.gguf"].map(|name| dir.join(name).display().to_string());
    for args in &commands(&missing, &model, &text)[1] {
        assert_refused(&kvant(args, &dir, ""), &["missing", "No such file"]);
    }
    fs::write(dir.join("file"), "no folder").unwrap();
    let report = dir.join("file").join("report").display().to_string();
    let args = ["eval", "kld", "-m", &model, "-f", &text, "--report", &report];
    assert_refused(&kvant(&args, &dir, ""), &["report"]);
    assert!(fs::read_dir(&dir).unwrap().count() == 1, "the check leaves no file");
}

#[cfg(unix)]
#[test]
fn a_rewritten_prompt_cache_keeps_its_permissions() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let dir = scratch("mode");
    let [file, link] = ["context", "link"].map(|name| dir.join(name));
    symlink("context", &link).unwrap();
    let run = |path: &Path| {
        let args = ["run", "-p", "Hello", "-n", "1", "--prompt-cache", path.to_str().unwrap()];
        let output = kvant(&args, &dir, "");
        assert!(output.status.success(), "{}", stderr(&output));
    };
    run(&link);
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
    run(&file);
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
}

#[test]
fn a_foreign_tuning_file_is_ignored_and_doctor_reports_it() {
    let dir = scratch("tuning");
    let folder = dir.join(".cache").join("kvant");
    fs::create_dir_all(&folder).unwrap();
    let file = folder.join("tuning.json");
    let absurd = r#"{"cpu":{"product":"","kernels":"","n_threads":1,"prefetch":0,"items_per_thread":99999999999,"row_block":0},"adapters":[]}"#;
    for foreign in ["{", "", "[]", r#"{"of": "another program"}"#, absurd, "folder"] {
        match foreign {
            "folder" => {
                fs::remove_file(&file).unwrap();
                fs::create_dir(&file).unwrap();
            }
            text => fs::write(&file, text).unwrap(),
        }
        let run = kvant(&["run", "-p", "Hello", "-n", "1"], &dir, "");
        assert!(run.status.success() && stderr(&run).lines().count() == 1, "{foreign}: {}", stderr(&run));
        let doctor = kvant(&["doctor", "--json"], &dir, "");
        let warning = stderr(&doctor);
        assert!(doctor.status.success() && warning.starts_with("warning: "), "{foreign}: {warning}");
        assert!(warning.contains("tuning.json") && warning.trim_end().lines().count() == 1, "{warning}");
    }
}

#[test]
fn a_home_that_is_no_folder_is_ignored() {
    let dir = scratch("home");
    let home = dir.join("home");
    fs::write(&home, "no folder").unwrap();
    let file = dir.join("context").display().to_string();
    let commands: [&[&str]; 2] =
        [&["run", "-p", "Hello", "-n", "1", "-m", &asset(POCKET), "--prompt-cache", &file], &["doctor"]];
    for args in commands {
        let output = kvant(args, &home, "");
        assert!(output.status.success(), "{}", stderr(&output));
        assert!(!stderr(&output).contains("warning"), "{}", stderr(&output));
    }
}

#[test]
fn a_changed_model_rejects_the_context_file_of_the_old_one() {
    let dir = scratch("changed");
    let [model, file] = ["model.gguf", "context"].map(|name| dir.join(name).display().to_string());
    let mut bytes = fs::read(asset(POCKET)).unwrap();
    fs::write(&model, &bytes).unwrap();
    let args = ["run", "-m", &model, "-p", "Hello", "-n", "1", "--temp", "0", "--prompt-cache", &file];
    for _ in 0..2 {
        let output = kvant(&args, &dir, "");
        assert!(output.status.success(), "{}", stderr(&output));
    }
    // Changes the middle of the largest tensor.
    let gguf = kvant::Gguf::from_bytes(bytes.clone()).unwrap();
    let largest = gguf.tensors().iter().max_by_key(|info| info.n_bytes).unwrap();
    bytes[largest.offset as usize + largest.n_bytes / 2] ^= 1;
    fs::write(&model, &bytes).unwrap();
    assert_refused(&kvant(&args, &dir, ""), &["context: model.fingerprint: expected", "the file has"]);
}

#[test]
#[cfg(unix)]
fn exceeding_the_file_size_limit_is_a_one_line_error() {
    let dir = scratch("limit");
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/assets/pocket-q8_0.gguf");
    let cache = format!("run -p hi -n 1 -m {} --prompt-cache cache --quiet", model.display());
    let quantized = format!("quantize {} out.gguf q4_0", model.display());
    for (args, made) in [(cache, "cache"), (quantized, "out.gguf")] {
        // `ulimit -f` counts blocks of 512 bytes in some shells and of 1,024 in others.
        let script = format!("ulimit -f 8; exec {} {args}", env!("CARGO_BIN_EXE_kvant"));
        let output = Command::new("sh").args(["-c", &script]).current_dir(&dir).env("HOME", &dir).output();
        let output = output.unwrap();
        let message = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{args}: {message}");
        assert_eq!(
            message.lines().filter(|line| line.starts_with("error: ")).count(),
            1,
            "{args}: {message}"
        );
        assert!(!dir.join(made).exists(), "{args}: half a file");
    }
}

/// Ctrl-C saves the context of an answer, and a second run prefills none of it again.
#[cfg(unix)]
#[test]
fn an_interrupt_keeps_the_context_of_an_answer() {
    use std::io::Read;
    let file = scratch("interrupt").join("context");
    let file = file.to_str().unwrap();
    // Long enough to cross a prefix boundary: the prefix before it is read from the file.
    let prompt = "How do you spell river? ".repeat(100);
    let args = ["run", "-p", &prompt, "--prompt-cache", file, "--ignore-eos"];
    let mut run = Command::new(env!("CARGO_BIN_EXE_kvant"))
        .args(args)
        .args(["-n", "100000"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut out = run.stdout.take().unwrap();
    out.read_exact(&mut [0; 3]).unwrap();
    assert!(Command::new("kill").args(["-INT", &run.id().to_string()]).status().unwrap().success());
    let mut rest = String::new();
    out.read_to_string(&mut rest).unwrap();
    let output = run.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(rest.ends_with('\n') && rest.len() < 100_000, "{}", rest.len());
    assert!(String::from_utf8_lossy(&output.stderr).contains("decode"), "the summary is printed");
    let again =
        Command::new(env!("CARGO_BIN_EXE_kvant")).args(args).args(["-n", "1", "--json"]).output().unwrap();
    let row: serde_json::Value = serde_json::from_slice(&again.stdout).unwrap();
    assert!(row["n_prompt"].as_u64().unwrap() < 300, "{row}");
}
