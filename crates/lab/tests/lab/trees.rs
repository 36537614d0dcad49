//! The judge's files, and rows of the table of experiments.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use kvant_lab::judge_files::{JUDGE_FILES, compare};
use kvant_lab::report::{HEADER, append_row};
use kvant_lab::{Fault, Judgement, Report, Target, target, targets};

/// Returns an empty folder.
fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("lab").join(name);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    folder
}

/// Returns a checkout with two files of the judge, and one that is not.
fn checkout(name: &str) -> PathBuf {
    let root = folder(name);
    for file in ["conformance/src/judge.rs", "crates/lab/src/race.rs", "crates/cpu/src/attend.rs"] {
        fs::create_dir_all(root.join(file).parent().unwrap()).unwrap();
        fs::write(root.join(file), "fn tolerance() -> f64 { 0.0 }").unwrap();
    }
    let status = Command::new("git").args(["init", "--quiet"]).current_dir(&root).status();
    assert!(status.expect("git").success());
    root
}

#[test]
fn a_tree_that_changes_the_test_is_broken() {
    let (candidate, base) = (checkout("changed"), checkout("base"));
    let digest = compare(&candidate, &base).unwrap();
    // Kernels may change.
    fs::write(candidate.join("crates/cpu/src/attend.rs"), "fast").unwrap();
    assert_eq!(compare(&candidate, &base).unwrap(), digest);

    let judge = candidate.join("conformance/src/judge.rs");
    fs::write(&judge, "fn tolerance() -> f64 { 1.0 }").unwrap();
    let fault = compare(&candidate, &base).unwrap_err();
    assert!(matches!(&fault, Fault::Broken(line) if line.contains("conformance/src/judge.rs")), "{fault}");
    fs::remove_file(&judge).unwrap();
    let fault = compare(&candidate, &base).unwrap_err().to_string();
    assert!(fault.contains("conformance/src/judge.rs") && fault.contains("missing"), "{fault}");

    fs::copy(base.join("conformance/src/judge.rs"), &judge).unwrap();
    fs::write(candidate.join("crates/lab/build.rs"), "fn main() {}").unwrap();
    let fault = compare(&candidate, &base).unwrap_err().to_string();
    assert!(fault.contains("crates/lab/build.rs") && fault.contains("not in base"), "{fault}");
}

#[test]
fn files_of_the_judge_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    for file in JUDGE_FILES {
        assert!(root.join(file).exists(), "{file}");
    }
}

#[test]
fn targets_have_one_name_each_and_name_existing_files() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let all = targets();
    for Target { name, files, guards, edges, .. } in &all {
        assert_eq!(target(name).unwrap().name, *name);
        assert_eq!(all.iter().filter(|other| other.name == *name).count(), 1, "{name}");
        assert!(!guards.is_empty() && !edges.is_empty(), "{name}");
        for file in files.split(", ").filter(|file| file.contains('/')) {
            assert!(root.join(file).exists(), "{name}: {file}");
            assert!(!JUDGE_FILES.iter().any(|judges| Path::new(file).starts_with(judges)), "{name}: {file}");
        }
    }
    let error = target("attend-turbo9").unwrap_err();
    assert!(error.contains("expected one such as attend-") && error.ends_with("'attend-turbo9'"), "{error}");
}

#[test]
fn rows_are_added_to_one_table() {
    let table = folder("rows").join("results.tsv");
    let report = Report {
        target: "attend-q8_0-128".to_owned(),
        commit: "abc+".to_owned(),
        base: "abc".to_owned(),
        judge: String::new(),
        description: "two\ttabs\nand a line".to_owned(),
        judgement: Judgement::of_fault(&Fault::Wrong("row 1".to_owned())),
    };
    append_row(&table, &report.row()).unwrap();
    append_row(&table, &report.row()).unwrap();
    let row = "abc+\tattend-q8_0-128\t\twrong\ttwo tabs and a line\trow 1";
    assert_eq!(fs::read_to_string(&table).unwrap(), format!("{HEADER}\n{row}\n{row}\n"));
    assert_eq!(report.lines(), ["METRIC verdict=wrong", "METRIC edges=0", "wrong: row 1"]);
    assert_eq!(report.json()["verdict"], "wrong");
}
