//! Tests of `kvant doctor --tune` and its saved results.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::{Value, json};

/// Runs the program with `file` as its tuning file.
fn kvant(args: &[&str], file: &Path) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvant"));
    command.args(args).env("KVANT_TUNING", file).output().expect("the binary starts")
}

fn object(args: &[&str], file: &Path) -> Value {
    let output = kvant(args, file);
    assert!(output.status.success(), "{}", stderr(&output));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// Returns the tuning file of a test, in a folder that does not exist yet.
fn scratch(test: &str) -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(test);
    let _ = fs::remove_dir_all(&dir);
    dir.join("tuning.json")
}

#[test]
fn a_tuned_machine_is_reported_and_foreign_results_are_ignored() {
    let file = scratch("tuned");
    let trials = object(&["doctor", "--tune", "--json"], &file);
    assert!(trials.as_array().unwrap().iter().filter(|trial| trial["kept"] == "yes").count() == 3);
    let mut tuning: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    tuning["cpu"]["prefetch"] = 4096.into();
    fs::write(&file, tuning.to_string()).unwrap();
    let device = object(&["doctor", "--json"], &file);
    assert!(device["kernels"].as_str().unwrap().ends_with(", tuned"), "{device}");
    tuning["cpu"]["n_threads"] = 1000.into();
    fs::write(&file, tuning.to_string()).unwrap();
    let device = object(&["doctor", "--json"], &file);
    assert!(
        !device["kernels"].as_str().unwrap().contains("tuned"),
        "numbers of another machine do not count"
    );
}

#[test]
fn an_adapter_uses_its_saved_variants_or_doctor_reports_why() {
    let file = scratch("tuned_adapter");
    for device in ["cuda:0", "auto"] {
        let refused = kvant(&["doctor", "--tune", "--device", device], &file);
        assert_eq!(refused.status.code(), Some(2));
        let want = format!("error: --device with --tune: expected cpu or wgpu:N, got {device}");
        assert!(stderr(&refused).starts_with(&want), "{}", stderr(&refused));
    }
    let refused = kvant(&["doctor", "--tune", "--device", "wgpu:9999"], &file);
    assert_eq!(refused.status.code(), Some(1));
    assert!(stderr(&refused).contains("wgpu: no adapter 9999; this machine has "), "{}", stderr(&refused));
    assert!(!file.exists(), "no result was saved");

    let doctor = || object(&["doctor", "--json"], &file)["adapters"][0].clone();
    let adapter = doctor();
    if adapter["product"].is_null() {
        assert!(std::env::var_os("KVANT_REQUIRE_WGPU").is_none(), "{adapter}");
        return eprintln!("skipped: an_adapter_uses_its_saved_variants: no adapter");
    }
    assert_eq!(adapter["tuned"], false);
    let save = |look_ups: &str| {
        let name = ["product", "interface", "driver"].map(|key| (key.to_owned(), adapter[key].clone()));
        let variant = json!({"types": "codebooks", "look_ups": look_ups, "queries": 4, "words": 2});
        let name: Value = name.into_iter().collect();
        let tuning = json!({"cpu": null, "adapters": [{"adapter": name, "ways": [variant]}]});
        fs::write(&file, tuning.to_string()).unwrap();
        variant
    };
    let run = || {
        let args = ["run", "-p", "Hi", "-n", "1", "--device", "wgpu:0", "--json"];
        object(&args, &file)["kernels"].as_str().unwrap().to_owned()
    };
    let variant = save("table");
    let tuned = doctor();
    assert!(tuned["tuned"] == true && tuned["ways"][2] == variant, "{tuned}");
    let kernels = run();
    assert!(kernels.ends_with(", tuned"), "{kernels}");

    save("magic");
    let output = kvant(&["doctor"], &file);
    let warning = stderr(&output);
    let want =
        "wgpu:0: unknown look-ups magic; not used (kvant doctor --tune --device wgpu:0 creates it again)";
    assert!(warning.contains(want), "{warning}");
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.lines().any(|line| line.starts_with("adapter ") && line.ends_with("(default)")), "{text}");
    let kernels = run();
    assert!(!kernels.contains("tuned"), "{kernels}");
}
