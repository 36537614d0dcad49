//! Tests of `kvant lab`: names, exit codes, and workers as processes.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use kvant_lab::case::Case;
use kvant_lab::device::arithmetic;
use kvant_lab::exam::{Answers, exam};
use kvant_lab::process::Program;
use kvant_lab::subject::{Contender, Settings, answers_of};
use kvant_lab::wire::to_bytes;
use kvant_lab::{Random, target};

const KVANT: &str = env!("CARGO_BIN_EXE_kvant");

/// Runs `kvant lab` in an empty folder outside any checkout.
fn lab(args: &[&str]) -> Output {
    let folder = std::env::temp_dir().join(format!("kvant-lab-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    Command::new(KVANT).arg("lab").args(args).current_dir(folder).output().unwrap()
}

#[track_caller]
fn assert_one_line(output: &Output, code: i32, words: &[&str]) {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{stderr}");
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    words.iter().for_each(|word| assert!(stderr.contains(word), "{word}: {stderr}"));
}

#[test]
fn targets_of_present_devices_are_listed() {
    let output = lab(&["targets", "-o", "json"]);
    let rows: Vec<serde_json::Value> = serde_json::from_slice(&output.stdout).unwrap();
    let names: Vec<&str> = rows.iter().map(|row| row["target"].as_str().unwrap()).collect();
    for name in ["attend-turbo3-128", "product-q4_K-1", "append-turbo3t-128", "decode-bundled"] {
        assert!(names.contains(&name), "{name}");
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    for device in ["wgpu:0", "cuda:0"] {
        let is_listed = rows.iter().any(|row| row["device"] == device);
        assert_eq!(stderr.lines().any(|line| line.contains(device)), !is_listed, "{device}: {stderr}");
    }
}

#[test]
fn judgements_that_cannot_begin_say_why_in_one_line() {
    let unknown = lab(&["eval", "--target", "attend-turbo3-129"]);
    assert_one_line(&unknown, 2, &["attend-turbo3-129", "attend-turbo3-128"]);
    assert_one_line(&lab(&["eval"]), 2, &["--target"]);
    let outside = lab(&["eval", "--target", "attend-turbo3-128"]);
    assert_one_line(&outside, 1, &["git"]);
}

/// Starts the worker of this build.
fn start(case: &str, state: &[u8], device: &str) -> Result<Vec<u8>, String> {
    let case: Case = case.parse().unwrap();
    let settings = Settings { device: device.to_owned(), isa: Some("scalar"), threads: 1 };
    let mut program = Program { path: PathBuf::from(KVANT) };
    answers_of(&mut *program.start(&case, state, &settings)?, &[0.5, 1.0, -2.0, 4.0])
}

#[test]
fn a_worker_answers_over_pipes() {
    // Two rows of four ones each: the sum of the inputs.
    let state = to_bytes(&[1.0; 8]);
    let answers = start("product type=f32 out=2 in=4 rows=1 copies=1", &state, "cpu").unwrap();
    assert_eq!(answers, to_bytes(&[3.5, 3.5]));
}

#[test]
fn a_worker_that_cannot_serve_says_why() {
    let case = "product type=f32 out=2 in=4 rows=1 copies=1";
    let error = start(case, &[0; 5], "cpu").unwrap_err();
    assert!(error.contains("project") || error.contains("matrix"), "{error}");
    let error = start(case, &[], "tpu").unwrap_err();
    assert!(error.contains("expected cpu, wgpu:N or cuda:N, got 'tpu'"), "{error}");
    let settings = Settings { device: "cpu".to_owned(), isa: None, threads: 1 };
    let mut none = Program { path: Path::new(KVANT).with_file_name("no-such-program") };
    let error = none.start(&case.parse().unwrap(), &[], &settings).err().unwrap();
    assert!(error.starts_with("worker: "), "{error}");
}

#[test]
fn workers_of_gpus_are_right_at_edges() {
    let output = lab(&["targets", "-o", "json"]);
    let rows: Vec<serde_json::Value> = serde_json::from_slice(&output.stdout).unwrap();
    let mut random = Random::new(1);
    for name in
        ["wgpu-attend-turbo3-128", "wgpu-product-q4_K-8", "wgpu-append-q8_0-128", "cuda-attend-turbo3-128"]
    {
        if !rows.iter().any(|row| row["target"] == name) {
            eprintln!("skipped: {name}: this machine or build has no such device");
            continue;
        }
        let target = target(name).unwrap();
        let settings = Settings { device: target.device.to_owned(), isa: None, threads: 1 };
        let mut program = Program { path: PathBuf::from(KVANT) };
        // Lavapipe compiles a kernel in seconds.
        let case = &target.edges[1];
        let exam = exam(case, random.bits()).unwrap();
        let inputs = exam.inputs(2, &mut random);
        let mut worker = program.start(case, exam.state(), &settings).unwrap();
        let got = answers_of(&mut *worker, &inputs).unwrap();
        let answers = Answers { got: &got, base: None };
        let checked = exam.check(&arithmetic(&settings).unwrap(), &inputs, answers, &mut random);
        assert_eq!(checked, Ok(()), "{case}");
    }
}
