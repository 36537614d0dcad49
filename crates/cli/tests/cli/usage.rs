//! End-to-end tests of the command line: answers, summaries, exit codes, one clear line for every
//! mistake.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use kvant_lab::gate::QUESTIONS;
use serde_json::Value;

pub fn kvant(args: &[&str]) -> Output {
    kvant_with(args, &[])
}

fn kvant_with(args: &[&str], env: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvant"));
    command.args(args).envs(env.iter().copied());
    command.output().expect("the binary starts")
}

pub fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

pub fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

pub fn json(output: &Output) -> Value {
    assert!(output.status.success(), "{}", stderr(output));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Returns an empty scratch folder for one test.
pub fn scratch(test: &str) -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(test);
    let _ = fs::remove_dir_all(&dir);
    fs::create_dir_all(&dir).unwrap();
    dir
}

pub fn bundled() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/assets/pocket-q8_0.gguf")
}

/// Asserts one line on stderr that contains every one of `words`, and this exit code.
pub fn assert_refused(output: &Output, code: i32, words: &[&str]) {
    let line = stderr(output);
    assert_eq!(output.status.code(), Some(code), "{line}");
    assert_eq!(line.trim_end().lines().count(), 1, "more than one line: {line}");
    assert!(line.starts_with("error: ") && !line.contains("panic"), "{line}");
    for word in words {
        assert!(line.contains(word), "'{word}' is not in: {line}");
    }
}

fn assert_ten_of_ten(isa: &[(&str, &str)]) {
    for dtype in ["f16", "q8_0", "turbo4", "turbo3", "turbo2", "turbo3t", "turbo2t"] {
        for (question, answer) in QUESTIONS {
            let output =
                kvant_with(&["run", "-p", question, "-ctk", dtype, "-ctv", dtype, "--temp", "0"], isa);
            assert!(output.status.success(), "{}", stderr(&output));
            assert!(stdout(&output).contains(answer), "{dtype} {isa:?}: {question} -> {}", stdout(&output));
        }
    }
}

#[test]
fn the_bundled_model_answers_ten_of_ten_with_every_cache() {
    assert_ten_of_ten(&[]);
}

#[test]
fn the_bundled_model_answers_ten_of_ten_with_scalar_kernels() {
    assert_ten_of_ten(&[("KVANT_ISA", "scalar")]);
}

/// Uses one conversation of some 250 tokens, so that most of the cache is quantized at the last
/// questions.
#[test]
fn the_bundled_model_answers_all_ten_questions_with_every_cache() {
    for dtype in ["f16", "q8_0", "q4_0", "turbo4", "turbo3", "turbo2", "turbo3t", "turbo2t"] {
        let mut chat = Command::new(env!("CARGO_BIN_EXE_kvant"))
            .args(["chat", "-ctk", dtype, "-ctv", dtype, "--temp", "0"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let questions = QUESTIONS.map(|(question, _)| question).join("\n");
        chat.stdin.take().unwrap().write_all(questions.as_bytes()).unwrap();
        let answers = stdout(&chat.wait_with_output().unwrap());
        assert_eq!(answers.lines().count(), QUESTIONS.len(), "{dtype}: {answers}");
        for (line, (question, answer)) in answers.lines().zip(QUESTIONS) {
            assert!(line.contains(answer), "{dtype}: {question} -> {line}");
        }
    }
}

#[test]
fn the_summary_names_device_kernels_speed_and_measured_bytes() {
    let output = kvant(&["run", "-p", "What is the capital of France?", "-ctk", "turbo3", "-ctv", "turbo3"]);
    let summary = stderr(&output);
    assert_eq!(summary.lines().count(), 1, "{summary}");
    for word in ["cpu", "prompt", "decode", "tok/s", "KV turbo3/turbo3", "f16"] {
        assert!(summary.contains(word), "{word}: {summary}");
    }
}

#[test]
fn turbo3_takes_less_than_a_fourth_of_f16_at_2000_tokens() {
    let dir = scratch("two_thousand");
    let prompt = dir.join("prompt.txt");
    fs::write(&prompt, "once upon a time there was a king. ".repeat(180)).unwrap();
    let args = ["run", "--raw", "-f", prompt.to_str().unwrap(), "-n", "400", "--ignore-eos", "--json"];
    for isa in ["scalar", "avx512"] {
        let turbo = [&args[..], &["-ctk", "turbo3", "-ctv", "turbo3"]].concat();
        let output = kvant_with(&turbo, &[("KVANT_ISA", isa)]);
        if stderr(&output).contains("KVANT_ISA") {
            eprintln!("skipped: this CPU has no {isa}");
            continue;
        }
        let kv = json(&output)["kv"].clone();
        let (tokens, bytes, f16) = (kv["tokens"].as_f64(), kv["bytes"].as_f64(), kv["bytes_f16"].as_f64());
        assert!(tokens.unwrap() >= 2000.0, "{kv}");
        // 6.625 bits for 32 of them, and of 2,000 tokens five tiles in f16: the first, the latest,
        // and those where the answer begins.
        assert!(f16.unwrap() / bytes.unwrap() >= 4.1, "{kv}");
    }
}

#[test]
fn json_has_the_promised_keys() {
    let object = json(&kvant(&["run", "-p", "Hello", "-n", "3", "--json", "--ignore-eos"]));
    for key in [
        "text",
        "n_prompt",
        "n_gen",
        "prompt_tps",
        "decode_tps",
        "device",
        "kernels",
        "type_k",
        "type_v",
        "seed",
        "finish",
    ] {
        assert!(object.get(key).is_some_and(|value| !value.is_null()), "{key}: {object}");
    }
    assert!(object["kv"]["tokens"].as_u64().unwrap() > 0);
    assert_eq!(object["n_gen"], 3);
    assert_eq!(object["finish"], "length");
}

#[test]
fn files_without_a_model_are_rejected_in_one_line() {
    let dir = scratch("no_model");
    let whole = fs::read(bundled()).unwrap();
    let truncated = dir.join("truncated.gguf");
    fs::write(&truncated, &whole[..whole.len() / 2]).unwrap();
    let text = dir.join("text.gguf");
    fs::write(&text, "no model").unwrap();
    let alien = dir.join("alien.gguf");
    let at = whole.windows(5).position(|window| window == b"qwen3").unwrap();
    let mut bytes = whole;
    bytes[at..at + 5].copy_from_slice(b"mamba");
    fs::write(&alien, bytes).unwrap();
    for (path, words) in [
        (&truncated, vec!["truncated.gguf"]),
        (&text, vec!["text.gguf", "GGUF"]),
        (&dir, vec!["no_model", "file"]),
        (&dir.join("absent.gguf"), vec!["absent.gguf", "No such file"]),
        (&alien, vec!["mamba", "llama, qwen2, qwen3"]),
    ] {
        let path = path.to_str().unwrap();
        assert_refused(&kvant(&["run", "-m", path, "-p", "x"]), 1, &words);
    }
}

#[test]
fn a_missing_gpu_is_rejected_and_auto_uses_the_cpu() {
    // No machine has this many devices.
    let refused = kvant(&["run", "-p", "x", "--device", "cuda:9999"]);
    assert_refused(&refused, 1, &["cuda: no ", "needed: "]);
    let refused = kvant(&["run", "-p", "x", "--device", "wgpu:9999"]);
    assert_refused(&refused, 1, &["wgpu: no adapter 9999; this machine has "]);
    let doctor = kvant(&["doctor"]);
    assert!(doctor.status.success());
    let text = String::from_utf8(doctor.stdout).unwrap();
    assert!(text.lines().any(|line| line.starts_with("gpu      ")), "{text}");
}

#[test]
fn wrong_usage_is_rejected_in_one_line_with_exit_code_2() {
    assert_refused(&kvant(&["run", "-p", "x", "-c", "-1"]), 2, &["-1", "--ctx-size"]);
    assert_refused(&kvant(&["run", "-p", "x", "-ctk", "q9_9"]), 2, &["q9_9", "turbo3"]);
    assert_refused(&kvant(&["run", "-p", "x", "-ctv", "q6_K"]), 2, &["not a KV type"]);
    assert_refused(&kvant(&["run", "-p", "x", "--kv-policy", "boundry"]), 2, &["boundry", "boundary"]);
    assert_refused(&kvant(&["run", "-p", "x", "--device", "gpu"]), 2, &["gpu", "cpu", "cuda:N", "wgpu:N"]);
    // GPU layers never run elsewhere silently.
    assert_refused(&kvant(&["run", "-p", "x", "-ngl", "3", "--device", "cpu"]), 1, &["-ngl", "cpu", "got 3"]);
    assert_refused(&kvant(&["run", "-p", "x", "-ngl", "3", "--device", "cuda:9999"]), 1, &["cuda: no "]);
    assert_refused(&kvant(&["run", "-p", "x", "-ngl", "many"]), 2, &["many", "a number or all"]);
    assert_refused(&kvant(&["run", "-p", ""]), 2, &["empty"]);
    assert_refused(&kvant(&["run"]), 2, &["-p", "-f"]);
    assert_refused(&kvant(&["run", "-p", "x", "--top-p", "2"]), 2, &["top_p"]);
    assert_refused(&kvant(&["run", "-p", "x", "--temp", "-1"]), 2, &["temperature", "from 0 up", "-1"]);
    assert_refused(&kvant(&["run", "-p", "x", "-s", "-2"]), 2, &["-2", "-1 for a random one"]);
    assert_refused(&kvant(&["run", "x", "-p", "y"]), 2, &["two prompts"]);
    assert_refused(&kvant(&["run", "-m", "a.gguf", "b.gguf", "x"]), 2, &["two models", "a.gguf", "b.gguf"]);
    assert_refused(&kvant(&["run", "llama3.2:3b", "x"]), 2, &["no model 'llama3.2:3b'", "GGUF"]);
    assert_refused(&kvant(&["bench", "-p", "0", "-n", "0"]), 2, &["nothing to do", "-p", "-n"]);
    assert_refused(&kvant(&["quantize", "out.gguf", "q4_0"]), 2, &["a model, an output file and a type"]);
    assert_refused(&kvant(&["-m", "model.gguf"]), 2, &["kvant run -m"]);
    assert_refused(&kvant(&["fly"]), 2, &["fly"]);
}

#[test]
fn unreadable_inputs_are_rejected_in_one_line() {
    let dir = scratch("inputs");
    let latin = dir.join("latin1.txt");
    fs::write(&latin, b"caf\xe9").unwrap();
    assert_refused(&kvant(&["run", "-f", latin.to_str().unwrap()]), 1, &["latin1.txt", "UTF-8", "3"]);
    assert_refused(&kvant(&["run", "-f", dir.join("absent").to_str().unwrap()]), 1, &["absent"]);
    assert_refused(&kvant(&["run", "-p", &"word ".repeat(100), "-c", "32"]), 1, &["context holds 32", "-c"]);
    assert_refused(
        &kvant_with(&["run", "-p", "x"], &[("KVANT_ISA", "sse9")]),
        1,
        &["KVANT_ISA", "sse9", "scalar"],
    );
    // The second name is the earlier one.
    for flag in ["--prefill-precision", "--prompt-math"] {
        assert_refused(
            &kvant_with(&["run", "-p", "x", "--device", "cpu", flag, "bf16"], &[("KVANT_ISA", "scalar")]),
            1,
            &["--prefill-precision", "scalar has no matrix unit", "bf16"],
        );
    }
    let table = dir.join("types.txt");
    fs::write(&table, "0 0 K f16\n0 0 X f16\n").unwrap();
    assert_refused(
        &kvant(&["run", "-p", "x", "--kv-types", table.to_str().unwrap()]),
        1,
        &["types.txt", "line 2"],
    );
}

/// A prompt that the bundled model answers in one word, and that word.
const QUESTION: &str = "What is the capital of France?";

/// Model and prompt as words, as options, from the environment and through a pipe give the same
/// answer.
#[test]
fn model_and_prompt_are_accepted_in_every_usual_form() {
    let file = bundled().display().to_string();
    for args in [
        &["run", QUESTION][..],
        &["run", "What", "is", "the", "capital", "of", "France?"],
        &["run", "bundled", QUESTION],
        &["run", &file, QUESTION],
        &["run", "-m", &file, QUESTION],
        &["run", &file, "-p", QUESTION],
        &["run", "--model", &file, "--prompt", QUESTION, "-c", "0", "--top_k", "1", "-fa", "on"],
    ] {
        let output = kvant(&[args, &["--temperature", "0"]].concat());
        assert!(stdout(&output).contains("Paris"), "{args:?}: {}", stderr(&output));
    }
    let env = [("KVANT_MODEL", &file[..]), ("KVANT_PROMPT", QUESTION), ("KVANT_TEMP", "0")];
    assert!(stdout(&kvant_with(&["run"], &env)).contains("Paris"));
    let mut piped = Command::new(env!("CARGO_BIN_EXE_kvant"))
        .args(["run", "--temp", "0"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    piped.stdin.take().unwrap().write_all(QUESTION.as_bytes()).unwrap();
    assert!(stdout(&piped.wait_with_output().unwrap()).contains("Paris"));
    for (args, word) in [
        (&["inspect", &file, "--json"][..], "qwen3"),
        (&["inspect", "-m", &file, "--json"], "qwen3"),
        (&["bench", &file, "-p", "0", "-n", "1", "-r", "1"], "pocket-q8_0.gguf"),
        (&["bench", "-m", &file, "-p", "0", "-n", "1", "-r", "1"], "pocket-q8_0.gguf"),
    ] {
        let output = kvant(args);
        assert!(stdout(&output).contains(word), "{args:?}: {}", stderr(&output));
    }
}

#[test]
fn flags_come_before_the_environment() {
    let dir = scratch("environment");
    let file = dir.join("prompt.txt");
    fs::write(&file, QUESTION).unwrap();
    let run = ["run", "-f", file.to_str().unwrap(), "--temp", "0"];
    let output = kvant_with(&run, &[("KVANT_PROMPT", "Count to five.")]);
    assert!(stdout(&output).contains("Paris"), "{}", stderr(&output));
    let bench = ["bench", "--synthetic", "tiny:q4_0", "-p", "0", "-n", "1", "-r", "1"];
    let output = kvant_with(&bench, &[("KVANT_MODEL", "absent.gguf")]);
    assert!(stdout(&output).contains("tiny"), "{}", stderr(&output));
    assert_refused(&kvant_with(&["run", "-p", "x"], &[("KVANT_MODEL", "absent.gguf")]), 1, &["absent.gguf"]);
}

#[test]
fn without_a_seed_answers_differ_and_the_summary_has_the_seed() {
    let args = ["run", "-p", "Once", "--raw", "--temp", "2", "--top-k", "0", "-n", "20", "--ignore-eos"];
    let first = kvant(&args);
    let summary = stderr(&first);
    let seed = summary.split("| seed ").nth(1).unwrap().split_whitespace().next().unwrap().to_owned();
    assert_ne!(stdout(&first), stdout(&kvant(&args)));
    let again = kvant(&[&args[..], &["-s", &seed]].concat());
    assert_eq!(stdout(&first), stdout(&again));
    assert!(!stderr(&kvant(&["run", "-p", "Hello", "--temp", "0"])).contains("seed"));
}

#[test]
fn unmeasured_speeds_are_not_reported_as_zero() {
    let one = ["run", "-p", "Hello", "-n", "1", "--temp", "0"];
    let summary = stderr(&kvant(&one));
    assert!(summary.contains("decode 1 tok |") && !summary.contains(" 0.0 tok/s"), "{summary}");
    assert!(json(&kvant(&[&one[..], &["--json"]].concat()))["decode_tps"].is_null());
}

#[test]
fn deviations_from_the_request_are_noted() {
    for (args, words) in [
        (&["-c", "4096"][..], &["note: -c 4096", "2048"][..]),
        (&["--mlock"], &["note: --mlock: "]),
        (&["-fa", "off"], &["note: -fa: "]),
    ] {
        let output = kvant(&[&["run", "-p", "Hello", "-n", "1"], args].concat());
        assert!(output.status.success());
        for word in words {
            assert!(stderr(&output).contains(word), "{args:?}: {}", stderr(&output));
        }
    }
    if kvant::devices::check(kvant::DeviceChoice::Cuda(0)).is_err() {
        let output = kvant(&["run", "-p", QUESTION, "-ngl", "99", "--temp", "0"]);
        assert!(stdout(&output).contains("Paris"));
        assert!(stderr(&output).contains("note: -ngl: cuda: no "), "{}", stderr(&output));
    }
}

#[test]
fn the_log_has_the_requested_format_and_level() {
    let run = |args: &[&str]| stderr(&kvant(&[&["run", "-p", "Hello", "-n", "1", "--quiet"], args].concat()));
    assert_eq!(run(&[]), "");
    assert_eq!(run(&["--mlock", "--log-level", "error"]), "");
    let text = run(&["--log-level", "info"]);
    assert!(text.starts_with("info: model loaded model=bundled"), "{text}");
    let json: Value = serde_json::from_str(run(&["--log-format", "json", "--mlock"]).trim()).unwrap();
    assert_eq!(json["level"], "WARN");
    assert!(json["fields"]["message"].as_str().unwrap().contains("--mlock"), "{json}");
}

#[test]
fn completions_and_manuals_name_commands_and_options() {
    for shell in ["bash", "zsh", "fish"] {
        let script = stdout(&kvant(&["completions", shell]));
        assert!(script.contains("quantize") && script.contains("top-k"), "{shell}");
    }
    assert!(stdout(&kvant(&["man"])).contains(".TH kvant"));
    let page = stdout(&kvant(&["man", "eval", "ppl"]));
    assert!(page.contains("ubatch") && page.contains("EXTRA"), "{page}");
    assert_refused(&kvant(&["man", "fly"]), 2, &["fly"]);
}

#[test]
fn the_built_in_text_is_named_where_it_is_used() {
    let output = kvant(&["eval", "ppl", "-c", "128", "--chunks", "1"]);
    assert!(stdout(&output).contains("Final estimate"), "{}", stderr(&output));
    assert!(stderr(&output).contains("note: no -f"));
}

#[cfg(unix)]
#[test]
fn non_utf8_arguments_are_rejected_in_one_line() {
    use std::os::unix::ffi::OsStrExt;
    let argument = std::ffi::OsStr::from_bytes(b"caf\xe9");
    let output =
        Command::new(env!("CARGO_BIN_EXE_kvant")).args(["run", "-p"]).arg(argument).output().unwrap();
    assert_refused(&output, 2, &["UTF-8"]);
}

#[test]
fn a_full_context_ends_the_answer_with_a_note() {
    let object = json(&kvant(&["run", "-p", "Hello", "-c", "24", "--ignore-eos", "--json"]));
    assert_eq!(object["finish"], "context");
    assert_eq!(object["kv"]["tokens"], 24);
}

#[test]
fn inspect_shows_the_bytes_that_a_session_allocates() {
    let object = json(&kvant(&["inspect", bundled().to_str().unwrap(), "-c", "300", "--json"]));
    let rows = object["kv"]["types"].as_array().unwrap().clone();
    let row = rows.iter().find(|row| row["type K/V"] == "turbo3/turbo3").unwrap();
    let args =
        ["run", "-p", "Hello", "-c", "300", "--ignore-eos", "--json", "-ctk", "turbo3", "-ctv", "turbo3"];
    let run = json(&kvant(&args));
    assert_eq!(run["kv"]["tokens"], 300);
    assert_eq!(row["bytes"], run["kv"]["bytes"]);
}

#[test]
fn inspect_shows_the_size_of_recurrent_states() {
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../model/tests/fixtures/qwen35-h64-g2-delta.gguf");
    // In three layers the convolution's state of 320 channels, three rows, and four matrices of 32
    // x 48.
    let bytes = 3 * 4 * (3 * 320 + 4 * 32 * 48);
    let want = serde_json::json!({ "layers": 3, "bytes": bytes, "tokens_per_copy": 512 });
    assert_eq!(json(&kvant(&["inspect", model, "--json"]))["states"], want);
    let text = stdout(&kvant(&["inspect", model]));
    assert!(text.contains("States: 3 of 4 layers have one instead of keys and values, 83.2 KiB"), "{text}");
    assert_eq!(
        json(&kvant(&["inspect", bundled().to_str().unwrap(), "--json"]))["states"],
        serde_json::Value::Null
    );
}

#[test]
fn inspect_shows_the_kv_share_of_an_mtp_layer() {
    let model =
        concat!(env!("CARGO_MANIFEST_DIR"), "/../engine/tests/predictions/glm4moe-h64-g2-dense1.gguf");
    let object = json(&kvant(&["inspect", model, "--json"]));
    let n_layers = object["metadata"]["glm4moe.block_count"].as_str().unwrap().parse::<f64>().unwrap() - 1.0;
    // All its layers are alike.
    assert_eq!(object["mtp"]["kv_share"], 1.0 / n_layers);
    let text = stdout(&kvant(&["inspect", model]));
    let want = format!("and {:.1} % more for the MTP layer", 100.0 / n_layers);
    assert!(text.contains(&want), "{text}");
    assert_eq!(
        json(&kvant(&["inspect", bundled().to_str().unwrap(), "--json"]))["mtp"],
        serde_json::Value::Null
    );
}

#[test]
fn inspect_shows_the_expert_bytes_read_per_token() {
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../model/tests/fixtures/mixtral-h64-g2.gguf");
    // In two layers five experts of three matrices of 40 x 32 in f16, of which the router selects
    // two per token.
    let bytes = 2 * 5 * 3 * 40 * 32 * 2;
    let object = json(&kvant(&["inspect", model, "--json"]));
    let want = serde_json::json!({ "count": 5, "used": 2, "layers": 2, "bytes": bytes, "bytes_per_token": bytes / 5 * 2 });
    assert_eq!(object["experts"], want);
    let text = stdout(&kvant(&["inspect", model]));
    assert!(text.contains("Experts: each token selects 2 of 5 in 2 layers, and reads "), "{text}");
    assert_eq!(
        json(&kvant(&["inspect", bundled().to_str().unwrap(), "--json"]))["experts"],
        serde_json::Value::Null
    );
}

#[test]
fn doctor_names_a_kernel_for_every_type() {
    let object = json(&kvant(&["doctor", "--json"]));
    let choices = object["choices"].as_array().unwrap();
    for dtype in kvant::DType::ALL {
        // Weight types have matmul kernels, cache types attention kernels; f32 to q4_0 have both.
        for (op, has) in [("matmul", dtype.is_weight()), ("attend", dtype.is_kv())] {
            let rows = choices.iter().filter(|choice| choice["type"] == dtype.name() && choice["op"] == op);
            let kernels: Vec<_> = rows.map(|choice| choice["kernel"].as_str().unwrap()).collect();
            assert_eq!(kernels.len(), usize::from(has), "{op} {dtype}: {kernels:?}");
            assert!(kernels.iter().all(|kernel| kernel.contains(dtype.name())), "{op} {dtype}: {kernels:?}");
        }
    }
}

#[test]
fn a_prompt_cache_keeps_the_answer_and_other_types_reject_it() {
    let dir = scratch("prompt_cache");
    let file = dir.join("context");
    let file = file.to_str().unwrap();
    // Long enough to cross a prefix boundary: the prefix before it is read from the file.
    let prompt = "How do you spell river? ".repeat(100);
    let args = ["run", "-p", &prompt, "-n", "20", "--temp", "0", "--prompt-cache", file, "--json"];
    let turbo = [&args[..], &["-ctk", "turbo3", "-ctv", "turbo3"]].concat();
    let (first, second) = (json(&kvant(&turbo)), json(&kvant(&turbo)));
    assert_eq!(first["text"], second["text"]);
    let [first, second] = [&first, &second].map(|row| row["n_prompt"].as_u64().unwrap());
    assert!(first > 600 && second <= first - 512, "{second} of {first}");
    assert_refused(&kvant(&args), 1, &["type"]);
    fs::write(file, "garbage").unwrap();
    assert_refused(&kvant(&turbo), 1, &["context"]);
}

/// Returns a text that every checkout has.
fn licence() -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../LICENSE-APACHE").display().to_string()
}

#[test]
fn measurements_have_the_documented_keys_and_agree() {
    let file = licence();
    let text = ["-f", &file, "-c", "128", "--chunks", "2", "--json"];
    let ppl = json(&kvant(&[&["eval", "ppl"], &text[..]].concat()));
    for key in ["ppl", "stderr", "n_ctx", "chunks", "tokens", "type_k", "type_v", "bpv_k", "bpv_v"] {
        assert!(!ppl[key].is_null(), "{key}: {ppl}");
    }
    let kld = json(&kvant(&[&["eval", "kld", "-ctk", "f16,turbo3"], &text[..]].concat()));
    for key in ["mean_kld", "median_kld", "p99_kld", "max_kld", "same_top", "ppl", "ppl_base", "bpv_v"] {
        assert!(!kld[1][key].is_null(), "{key}: {kld}");
    }
    assert_eq!(kld[0]["mean_kld"], 0.0);
    assert_eq!(kld[0]["ppl"], ppl["ppl"]);
    assert_eq!(kld[1]["type_v"], "turbo3");
    let rows = json(&kvant(&["eval", "distortion", "--vectors", "50", "--json"]));
    for key in ["codec", "bpv", "dim", "law", "mse", "ip_error"] {
        assert!(!rows[0][key].is_null(), "{key}: {rows}");
    }
}

#[test]
fn a_profile_lists_every_stage_of_every_depth() {
    let args = [
        "bench",
        "--profile",
        "-d",
        "64,32",
        "-ctk",
        "q8_0,turbo3",
        "-ctv",
        "turbo3",
        "-r",
        "1",
        "-o",
        "json",
    ];
    let rows = json(&kvant_with(&args, &[]));
    let rows = rows.as_array().unwrap();
    assert_eq!(rows.len(), 2 * 2 * 5);
    for row in rows {
        assert!(row["ms_per_token"].as_f64().unwrap() > 0.0 && row["ns_per_pair"].as_f64().unwrap() > 0.0);
    }
    let scalar = kvant_with(&["bench", "--profile", "-d", "64"], &[("KVANT_ISA", "scalar")]);
    assert_refused(&scalar, 1, &["attend", "stages", "scalar"]);
    assert_refused(&kvant(&["bench", "--profile"]), 2, &["--profile", "-d"]);
}

#[test]
fn measurements_of_invalid_input_are_rejected_in_one_line() {
    let dir = scratch("eval");
    let path = |name: &str| dir.join(name).display().to_string();
    let (short, table, base) = (path("short.txt"), path("table.txt"), path("base.dat"));
    fs::write(&short, "A few words.").unwrap();
    fs::write(&table, "0 0 K turbo3\n0 0 X f16\n").unwrap();
    fs::write(&base, "_logits_ and no more").unwrap();
    let file = licence();
    let refused = |args: &[&str], words: &[&str]| assert_refused(&kvant(args), 1, words);
    refused(&["eval", "ppl", "-f", &short], &["tokens", "one chunk takes 512"]);
    refused(&["eval", "niah", "-f", &short], &["tokens", "256"]);
    refused(&["eval", "kld", "-f", &file, "--kv-types", &table], &["table.txt", "line 2"]);
    refused(&["eval", "kld", "--base", &base], &["base.dat"]);
    refused(&["eval", "kld", "--base", &path("none")], &["none", "No such file"]);
    refused(&["eval", "niah", "-f", &file, "--form", "haiku"], &["haiku", "secret-word"]);
    // 0 is the model's training context.
    for measure in ["ppl", "kld", "agree"] {
        refused(&["eval", measure, "-f", &short, "-c", "0"], &["one chunk takes 2048"]);
    }
    refused(&["eval", "niah", "-f", &short, "-c", "0"], &["2048"]);
    let saved = ["eval", "ppl", "-f", &file, "-c", "64", "--chunks", "1", "--save-base", &base];
    assert!(kvant(&[&saved[..], &["-ctk", "turbo4"]].concat()).status.success());
    let message = stderr(&kvant(&["eval", "kld", "--base", &base, "-ctk", "f16"]));
    assert!(message.contains("computed with another cache than f16"), "{message}");
    assert_refused(
        &kvant(&["eval", "kld", "--base", &base, "-c", "256"]),
        2,
        &["the base has chunks of 64 tokens"],
    );
    assert_refused(
        &kvant(&["eval", "kld", "-f", &file, "-ctk", "f16,q8_0", "-ctv", "f16,q8_0,q4_0"]),
        2,
        &["paired"],
    );
}

#[test]
fn plans_are_used_and_changed_or_foreign_ones_are_rejected() {
    let dir = scratch("plan");
    let text = |path: PathBuf| path.to_str().unwrap().to_owned();
    let (model, path) = (text(dir.join("pocket.gguf")), text(dir.join("pocket.kvplan")));
    fs::copy(bundled(), &model).unwrap();
    let report = text(dir.join("report"));
    let made = json(&kvant(&["plan", &model, "--budget", "3.5", "-c", "128", "--json", "--report", &report]));
    let page = fs::read_to_string(dir.join("report/index.html")).unwrap();
    assert!(page.contains("Where the plan spends bits") && page.contains("the plan: "), "{page}");
    let bits = made["certificate"]["bits"].as_f64().unwrap();
    assert!(made["path"] == path.as_str() && 3.0 < bits && bits <= 3.5, "{made}");
    assert_eq!(made["certificate"]["tail"], true);
    let number = |name: &str| made["certificate"][name].as_f64().unwrap();
    assert!(number("mean_kld_stderr") > 0.0 && number("ppl_ratio_stderr") > 0.0, "{made}");
    // 128 tokens are too few for a needle.
    assert!(made["certificate"]["needles"] == 0 && made["certificate"]["weights"].is_null(), "{made}");
    // A missed goal preserves the existing plan.
    let before = fs::read(&path).unwrap();
    let missed = kvant(&["plan", &model, "--max-kld", "1e-9", "-c", "128"]);
    assert_refused(&missed, 1, &["--max-kld 0.000000001: the best plan adds", "none is written"]);
    assert_eq!(fs::read(&path).unwrap(), before);
    let line = format!("bits per value   {bits:.3}");
    let inspect = || stdout(&kvant(&["inspect", &model]));
    assert!(inspect().contains(&line), "{}", inspect());
    let run_question = |model: &str, more: &[&str]| {
        let question =
            ["run", "-m", model, "-p", "What is the capital of France?", "--temp", "0", "--kv-plan", &path];
        kvant(&[&question, more].concat())
    };
    let answer = run_question(&model, &[]);
    assert!(stdout(&answer).contains("Paris") && stderr(&answer).contains("mixed"), "{}", stderr(&answer));
    let message = stderr(&run_question(&model, &["--weights", "q4_0"]));
    assert!(
        message.contains("measured with weights as the file has them, and these are in q4_0"),
        "{message}"
    );
    // Named types take precedence; the plan's factors still apply.
    assert!(stderr(&run_question(&model, &["-ctk", "turbo4"])).contains("KV turbo4/f16"));
    // Beside the model the plan is found where no type is named.
    let hello = |model: &str, more: &[&str]| {
        let answer = kvant(&[&["run", "-m", model, "-p", "hi", "-n", "1"], more].concat());
        assert!(answer.status.success(), "{}", stderr(&answer));
        stderr(&answer)
    };
    assert!(hello(&model, &[]).contains("KV mixed/mixed (auto, pocket.kvplan)"), "{}", hello(&model, &[]));
    assert!(hello(&model, &["-ctv", "turbo4"]).contains("KV f16/turbo4:"));
    let other = text(dir.join("other.gguf"));
    assert!(kvant(&["quantize", &model, &other, "q4_0"]).status.success());
    assert!(hello(&other, &[]).contains("KV turbo4/turbo4 (auto, no plan)"));
    assert_refused(&run_question(&other, &[]), 1, &["pocket.kvplan", "the plan of another model"]);
    let changed = fs::read_to_string(&path).unwrap().replacen("turbo3", "turbo2", 1);
    fs::write(&path, changed).unwrap();
    assert_refused(&run_question(&model, &[]), 1, &["pocket.kvplan", "corrupt cache plan: checksum"]);
    assert!(inspect().contains("Plan: not usable"), "{}", inspect());
    let message = hello(&model, &[]);
    assert!(message.contains("checksum") && message.contains("the plan is not used"), "{message}");
    assert!(message.contains("KV turbo4/turbo4 (auto, no plan)"), "{message}");
    assert_refused(&kvant(&["plan", &model, "--budget", "1", "-c", "128"]), 1, &["--budget: expected 2."]);
    assert_refused(&kvant(&["plan", "bundled"]), 2, &["-o FILE"]);
}
