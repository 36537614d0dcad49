//! Tests of invalid numbers, untrusted files and unwritable outputs: one clear line, an exit code,
//! and no terminal control characters.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use kvant::gguf::{Gguf, GgufWriter};
use kvant::{DType, limits};

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

/// Returns an empty scratch folder for one test.
fn scratch(test: &str) -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("untrusted").join(test);
    let _ = fs::remove_dir_all(&dir);
    fs::create_dir_all(&dir).unwrap();
    dir
}

fn bundled() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/assets/pocket-q8_0.gguf");
    path.to_str().unwrap().to_owned()
}

/// Asserts one line that begins with `error: `, contains `words`, and has at most 2,100 characters.
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
fn an_unwritable_result_is_reported_in_one_line() {
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

/// A failed turn is reported and the next one follows; a closed stdout ends the conversation.
#[cfg(target_os = "linux")]
#[test]
fn a_chat_with_unwritable_output_ends_with_one_error() {
    use std::io::Write;
    let mut child = command(&["chat", "-n", "2"]);
    let mut child = child.stdin(Stdio::piped()).stdout(full()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"hello\nhello\n").unwrap();
    let output = child.wait_with_output().unwrap();
    let lines = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(lines.matches("error: ").count(), 1, "{lines}");
}

#[test]
fn an_endless_text_is_rejected_in_one_line() {
    let output = kvant(&["eval", "ppl", "-f", "/dev/zero"]);
    assert!(!output.status.success());
    assert_line("/dev/zero", &output.stderr, &["/dev/zero", "of text, got more"]);
}

#[cfg(unix)]
#[test]
fn a_non_utf8_variable_never_selects_the_default_model() {
    use std::os::unix::ffi::OsStrExt;
    for (name, args) in [("KVANT_MODEL", &["run", "-p", "hi"][..]), ("KVANT_PROMPT", &["run"])] {
        let output = command(args).env(name, std::ffi::OsStr::from_bytes(b"m\xff.gguf")).output().unwrap();
        assert!(!output.status.success(), "{name}");
        assert_line(name, &output.stderr, &[name, "expected UTF-8 text"]);
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
fn an_unwritable_stderr_does_not_stop_the_work() {
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

#[test]
fn excessive_numbers_are_rejected_in_one_line() {
    let (max, model) = (usize::MAX.to_string(), bundled());
    let licence = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../LICENSE-APACHE");
    let licence = licence.to_str().unwrap();
    let run = ["run", "-p", "x", "-n", "1"];
    let turbo = ["-ctk", "turbo3", "-ctv", "turbo3", "--kv-policy"];
    let bench = ["bench", "--synthetic", "tiny:q4_0"];
    let with =
        |first: &[&str], rest: &[&str]| [first, rest].concat().into_iter().map(str::to_owned).collect();
    let cases: Vec<(Vec<String>, i32, &[&str])> = vec![
        (with(&run, &["-c", "20000000000"]), 1, &["-c: expected 1 to 2147483647", "20000000000"]),
        (with(&run, &["-c", &max]), 1, &["-c: expected 1 to 2147483647"]),
        (with(&run, &["-c", "2147483647"]), 1, &["2147483647 tokens", "fit", "-c"]),
        (
            with(&[&run[..], &turbo].concat(), &[&format!("sink:{max}")]),
            1,
            &["--kv-policy sink", "2147483647"],
        ),
        (
            with(&[&run[..], &turbo].concat(), &["recent:99999999999"]),
            1,
            &["--kv-policy recent", "2147483647"],
        ),
        (with(&[&run[..], &turbo].concat(), &["sink:2147483647"]), 1, &["needed for the cache"]),
        (with(&run, &["-t", &max]), 1, &["-t: expected 1 to "]),
        (with(&run, &["-t", "5000"]), 1, &["-t: expected 1 to ", "got 5000"]),
        (with(&["doctor", "-t"], &[&max]), 1, &["-t: expected 1 to "]),
        (with(&["doctor", "-t", "0"], &[]), 1, &["-t: expected 1 to ", "got 0"]),
        (with(&["inspect", &model, "-c", "100000000000000000"], &[]), 1, &["-c: expected 1 to 2147483647"]),
        (with(&["eval", "distortion", "--dim", "1000000000000"], &[]), 1, &["--dim: expected 1 to "]),
        (
            with(&["eval", "niah", "-f", licence, "-c", "64", "--depths"], &[&max]),
            1,
            &["--depths: expected 1 to "],
        ),
        (with(&["eval", "niah", "-f", licence, "-c"], &[&max]), 1, &["-c: expected 1 to 2147483647"]),
        (with(&["eval", "ppl", "-f", licence, "-c"], &[&max]), 1, &["-c: expected 4 to "]),
        (with(&["eval", "ppl", "-f", licence, "-ub"], &[&max]), 1, &["-ub: expected 1 to 512"]),
        (with(&bench, &["--profile", "-d", &max]), 1, &["-p, -n, -d: expected 1 to 2147483647"]),
        (with(&bench, &["-r", &max]), 1, &["-r: expected 0 to 1000000"]),
        (with(&bench, &["-n", "0", "-p", "1000000000000000"]), 1, &["-p, -n, -d: expected 1 to 2147483647"]),
        (with(&bench, &["-p", "0", "-n", &max, "-d", "5"]), 1, &["-p, -n, -d: expected 1 to 2147483647"]),
        (
            with(&bench, &["-p", "0", "-n", "1", "-d", "100000000000000"]),
            1,
            &["-p, -n, -d: expected 1 to 2147483647"],
        ),
    ];
    for (args, code, words) in cases {
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let output = kvant(&args);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {}", text(&output.stderr));
        assert_line(&format!("{args:?}"), &output.stderr, words);
    }
}

#[test]
fn large_numbers_without_allocation_are_accepted() {
    let max = usize::MAX.to_string();
    let many =
        ["--top-k", &max, "--repeat-last-n", &max, "--repeat-penalty", "1.1", "-n", "9223372036854775807"];
    let output = kvant(&[&["run", "-p", "hi", "-c", "40", "--ignore-eos"], &many[..]].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    let threads = limits::n_cores().to_string();
    assert!(kvant(&["run", "-p", "hi", "-n", "1", "-t", &threads]).status.success());
}

#[test]
fn memory_tables_contain_no_nan() {
    for n_ctx in ["0", "1", "2147483647"] {
        let output = kvant(&["inspect", &bundled(), "-c", n_ctx]);
        let table = text(&output.stdout);
        assert!(output.status.success() && !table.contains("NaN") && table.contains("100.0 %"), "{table}");
    }
    let own = text(&kvant(&["inspect", &bundled()]).stdout);
    assert_eq!(own, text(&kvant(&["inspect", &bundled(), "-c", "0"]).stdout));
}

/// Writes a file with this metadata and one tensor of 4 rows of `row` values, all of them `value`.
fn write_file(path: &Path, meta: &[(&str, &str)], tensor: &str, row: usize, value: f32) {
    let mut writer = GgufWriter::new();
    meta.iter().for_each(|(key, value)| writer.set(key, *value).unwrap());
    writer.add_tensor(tensor, &[row, 4], DType::F32).unwrap();
    let data = value.to_le_bytes().repeat(4 * row);
    writer.save(path, |sink| sink.bytes(tensor, &data)).unwrap();
}

/// Sizes in a file are checked against its tensors before anything is allocated per head and layer.
#[test]
fn head_and_layer_counts_beyond_the_tensors_are_rejected() {
    let dir = scratch("sizes");
    let path = dir.join("sizes.gguf");
    for (key, value) in [("attention.head_count_kv", i32::MAX as u32), ("block_count", 1_000_000_000)] {
        let mut writer = GgufWriter::new();
        writer.set("general.architecture", "llama").unwrap();
        let heads = if key == "block_count" { 1 } else { value };
        for (name, size) in [
            ("embedding_length", 32),
            ("feed_forward_length", 32),
            ("context_length", 64),
            ("attention.head_count", heads),
            ("attention.head_count_kv", heads),
            ("attention.key_length", 32),
            ("block_count", if key == "block_count" { value } else { 1 }),
        ] {
            writer.set(&format!("llama.{name}"), size).unwrap();
        }
        writer.set("llama.attention.layer_norm_rms_epsilon", 1e-5_f32).unwrap();
        writer.add_tensor("token_embd.weight", &[32, 4], DType::F32).unwrap();
        writer.save(&path, |sink| sink.bytes("token_embd.weight", &[0; 512])).unwrap();
        let path = path.to_str().unwrap();
        let output = kvant(&["run", "-m", path, "-p", "x"]);
        assert_eq!(output.status.code(), Some(1));
        assert_line(key, &output.stderr, &[&format!("llama.{key}: expected "), &format!("got {value}")]);
        let printed = text(&kvant(&["inspect", path]).stdout);
        assert!(printed.contains(&format!("KV cache: unknown (llama.{key}: expected ")), "{printed}");
    }
}

#[test]
fn untrusted_text_is_printed_without_control_characters() {
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
        let printed = text(&output.stdout) + &text(&output.stderr);
        let is_control =
            |c: char| c.is_control() && c != '\n' || c == '\u{202e}' && !args.contains(&"--json");
        assert!(!printed.is_empty() && !printed.contains(is_control), "{args:?}: {printed:?}");
    }
}

#[test]
fn line_breaks_in_paths_are_escaped() {
    let dir = scratch("lines");
    let named = |name: &str| dir.join(format!("a\nerror: {name}")).to_str().unwrap().to_owned();
    let [path, out, cache, missing] = ["in.gguf", "out.gguf", "cache", "none"].map(named);
    fs::copy(bundled(), &path).unwrap();
    for args in [
        &["inspect", &path][..],
        &["quantize", &path, &out, "q4_0"],
        &["run", &path, "-p", "x", "-n", "1", "--prompt-cache", &cache],
        &["run", "-m", &missing, "-p", "x"],
        &["run", "-f", &missing],
        &["eval", "kld", "--base", &missing],
        &["bench", &path, "-p", "1", "-n", "0", "-r", "1"],
    ] {
        let output = kvant(args);
        let printed = text(&output.stdout) + &text(&output.stderr);
        let n_errors = printed.lines().filter(|line| line.starts_with("error: ")).count();
        assert_eq!(n_errors, usize::from(!output.status.success()), "{args:?}: {printed}");
    }
    let printed = text(&kvant(&["inspect", &path]).stdout);
    assert!(printed.lines().next().unwrap().contains(r"a\nerror: in.gguf (GGUF v3"), "{printed}");
}

#[test]
fn a_megabyte_name_gives_a_short_line() {
    let dir = scratch("long");
    let (path, name) = (dir.join("long.gguf"), "x".repeat(1 << 20));
    write_file(&path, &[("general.architecture", &name)], "t", 32, 0.5);
    let output = kvant(&["run", "-m", path.to_str().unwrap(), "-p", "x"]);
    assert_eq!(output.status.code(), Some(1));
    assert_line(
        "run",
        &output.stderr,
        &["unknown architecture 'xxxx", "(1048576 characters)", "known are llama"],
    );
    // The list of families is long, and it is not from the file.
    assert!(output.stderr.len() < 1000, "{} bytes", output.stderr.len());
    let printed = kvant(&["inspect", path.to_str().unwrap()]).stdout;
    assert!(printed.len() < 4000, "{} bytes", printed.len());
}

#[test]
fn substituted_types_are_reported_with_their_count() {
    let dir = scratch("stand_in");
    let (path, out) = (dir.join("in.gguf"), dir.join("out.gguf"));
    write_file(&path, &[("general.architecture", "llama")], "blk.0.ffn_up.weight", 96, 0.5);
    let output = kvant(&["quantize", path.to_str().unwrap(), out.to_str().unwrap(), "q2_K"]);
    let lines = text(&output.stderr);
    assert!(output.status.success(), "{lines}");
    assert!(
        lines.contains("iq4_nl: 1 matrix instead of q2_K, as their rows are not a multiple of"),
        "{lines}"
    );
    assert_eq!(Gguf::open(&out).unwrap().tensors()[0].dtype, DType::IQ4NL);
}

#[test]
fn nan_weights_are_rejected_with_the_tensor() {
    let dir = scratch("nan");
    let (path, out) = (dir.join("nan.gguf"), dir.join("out.gguf"));
    let (path, out) = (path.to_str().unwrap(), out.to_str().unwrap());
    let gguf = Gguf::open(bundled()).unwrap();
    let mut tensors: Vec<_> = gguf.tensors().iter().filter(|info| info.name.starts_with("blk.1.")).collect();
    tensors.extend(gguf.find_tensor("token_embd.weight").map(|tensor| tensor.info));
    assert!(tensors.iter().any(|info| info.dtype == DType::Q8_0), "scales to break");
    for info in tensors {
        let mut bytes = fs::read(bundled()).unwrap();
        // Offset of the scale of the last block of the last row, or of the last value.
        let last = info.offset as usize + info.n_bytes - info.dtype.block_bytes();
        let (broken, at) = match info.dtype {
            DType::F32 => (&f32::INFINITY.to_le_bytes()[..], last),
            _ => (&[0xff, 0x7f][..], last),
        };
        bytes[at..at + broken.len()].copy_from_slice(broken);
        fs::write(path, bytes).unwrap();
        let row = format!("row {} holds NaN or an infinity", info.rows() - 1);
        for args in [&["run", "-m", path, "-p", "x", "--device", "cpu"][..], &["quantize", path, out, "q4_0"]]
        {
            let output = kvant(args);
            assert_eq!(output.status.code(), Some(1), "{args:?}");
            assert_line(&format!("{args:?}"), &output.stderr, &[&format!("tensor '{}'", info.name), &row]);
        }
        assert!(!Path::new(out).exists());
    }
}
